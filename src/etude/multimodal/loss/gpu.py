"""The expected-value loss on a GPU: products by cuBLAS, Triton kernels between them, chunk by chunk.

A problem without a kernel is solved by `chunked_expectation`, and so are all problems if triton is missing or fails.
"""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import torch

from etude.losses.products import add_logit_gradients, chunk_rows_for
from etude.multimodal.loss.fused import ExpectationProblem, ExpectationResult, chunked_expectation, empty_result
from etude.multimodal.loss.gpu_chunks import Chunks, DistanceChunks, ExpectedVectorChunks, ScalarChunks
from etude.multimodal.loss.kinds import HLGauss, Huber, MeanSquaredError, Wasserstein

CHUNK_BYTES = 256 << 20
"""Memory for one chunk."""
ROW_TILE = 128
"""Chunks have a multiple of this many rows: the tile height of the products."""
MOST_CODES = 32768
"""A row of logits must fit into the registers of a multiprocessor."""
MOST_VALUES = 4096
"""A vector must fit there too."""

_failed = False


def expectation(problem: ExpectationProblem) -> ExpectationResult:
    """Solve the problem with Triton kernels, or with `chunked_expectation` if there are none for it."""
    global _failed
    if _failed or not knows(problem):
        return chunked_expectation(problem)
    device = problem.hidden.device
    try:
        from etude.multimodal.loss import triton_kernels as kernels
    except ImportError:
        return chunked_expectation(problem)
    try:
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return _solve(problem, kernels)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a compiler may raise anything
        _failed = True
        warnings.warn(
            f"the Triton kernels of the expected-value loss cannot be used ({error}); the loss is computed without "
            "them, which takes several times as long",
            RuntimeWarning,
            stacklevel=2,
        )
    return chunked_expectation(problem)


def knows(p: ExpectationProblem) -> bool:
    """Whether there is a kernel for the problem.

    Vectors have one only in bfloat16. In float32 nearly all the time is spent in products, which are the same without
    kernels; in float16 gradients of logits must be scaled by the largest of them before rounding.
    """
    scalars = p.reconstruction.centred.shape[1] == 1
    types = (torch.bfloat16, torch.float16, torch.float32) if scalars else (torch.bfloat16,)
    return (
        type(p.reconstruction) in (MeanSquaredError, Huber, Wasserstein, HLGauss)  # subclasses may compute anything
        and p.hidden.dtype in types
        and p.row_weights.dtype is torch.float32
        and p.weight.shape[0] <= MOST_CODES
        and p.reconstruction.centred.shape[1] <= MOST_VALUES
        and p.hidden.shape[0] > 0
    )


def _solve(p: ExpectationProblem, kernels: ModuleType) -> ExpectationResult:
    p = replace(p, targets=p.targets.contiguous(), row_weights=p.row_weights.contiguous())
    result = empty_result(p)
    way: type[Chunks] = ExpectedVectorChunks
    if p.reconstruction.centred.shape[1] == 1:
        way = ScalarChunks
    elif isinstance(p.reconstruction, (Wasserstein, HLGauss)):
        way = DistanceChunks
    num_rows = p.hidden.shape[0]
    auto = -(-chunk_rows_for(num_rows, way.row_bytes(p), CHUNK_BYTES) // ROW_TILE) * ROW_TILE
    size = max(1, min(auto if p.chunk_rows == "auto" else p.chunk_rows, num_rows))
    chunks = way(p, kernels, size)
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        grads = chunks.solve(result, rows)
        if chunks.gradients:
            add_logit_gradients(
                grads,
                chunks.spare[: len(grads)],
                p.hidden[rows],
                p.weight,
                None if result.grad_hidden is None else result.grad_hidden[rows],
                result.grad_weight,
                result.grad_bias,
            )
    return result
