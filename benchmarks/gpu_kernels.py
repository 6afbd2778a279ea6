"""Single operations for the GPU benchmark, forward and backward: losses of a linear layer, attention of documents."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_loops import autocast
from benchmarks.gpu_race import DEVICE, Contestant, Section
from benchmarks.gpu_training import device_words
from benchmarks.linear_ce import chunked as own_linear, plain as plain_linear
from benchmarks.meaningful import KINDS, Problem
from etude.losses import linear_autograd
from etude.losses.chunked import chunked
from etude.models.attention import attention_mask
from etude.multimodal.loss import fused as expectations

TYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
COLUMNS = {"way": "", "ms": ".3f", "from": ".3f", "to": ".3f", "× time": ".2f", "called ms": ".3f"}
COLUMNS |= {"MiB": ",.0f", "ready s": ".1f"}
HOW = (
    "All in turns in one process, medians and quartiles of {} rounds. A round is as many forward and backward passes "
    "in a row as take 20 ms, after a pause of 50 ms, so that a GPU runs at its full clock; ms: of one of them, "
    "replayed as a CUDA graph where it can be one, as in a captured step; "
    "called ms: called from Python. MiB: the peak of a pass above its inputs, gradients included. "
    "ready s: the first pass, with compiling. × time: of {}."
)
COMPILED = "torch.compile of the plain formula"
Step = Callable[[], object]


def one_pass(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Step:
    """Return a forward pass under autocast and a backward pass; gradients are dropped."""

    def step() -> None:
        with autocast():
            value = function(*inputs)
        value.backward(value.detach())  # any gradient without gaps
        for one in grads:
            one.grad = None

    return step


def by_triton(step: Step) -> Step:
    """Return the step; that its kernel cannot be used, of which the first call warns, is an error."""
    first = iter([True])

    def checked() -> None:
        if not next(first, False):
            step()
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            step()

    return checked


def with_kernel(step: Step, kernels: dict[str, Any], kernel: Any) -> Step:
    """Return the step with another kernel of the device."""

    def patched() -> None:
        with mock.patch.dict(kernels, {DEVICE.type: kernel}):
            step()

    return patched


def section(title: str, contestants: Mapping[str, Contestant], reference: Any, words: str, *, quick: bool) -> Section:
    rounds = 3 if quick else 20
    how = HOW.format(rounds, words)
    return Section(f"{title}, on {device_words()}", COLUMNS, how, contestants, ("ms", "× time"), reference, rounds)


# ------------------------------------------------------------------------------------------------ linear + CE

PRODUCTS = "the three products alone"


class Linear:
    """Hidden states, weights of an output layer in float32, and labels; made when they are first needed."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        self.sizes = tokens, width, vocabulary
        self._made: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._made is None:
            tokens, width, vocabulary = self.sizes
            torch.manual_seed(0)
            hidden = torch.randn(tokens, width, device=DEVICE).to(TYPE).requires_grad_()
            weight = torch.randn(vocabulary, width, device=DEVICE).mul_(width**-0.5).requires_grad_()
            self._made = hidden, weight, torch.randint(vocabulary, (tokens,), device=DEVICE)
        return self._made

    def of(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
        """Return a pass of a function of hidden states, weights and labels."""
        return one_pass(function, self.tensors, self.tensors[:2])

    def of_half(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Step:
        """Return a pass of a function that wants weights in the type of the hidden states."""
        return self.of(lambda hidden, weight, labels: function(hidden, weight.to(hidden.dtype), labels))

    def triton(self) -> Step:
        return by_triton(self.of(own_linear))

    def chunked(self) -> Step:
        return with_kernel(self.of(own_linear), linear_autograd.KERNELS, chunked)

    def compiled(self) -> Step:
        return self.of(torch.compile(plain_linear, dynamic=False))

    def plain(self) -> Step:
        return self.of(plain_linear)

    def products(self) -> Step:
        hidden, weight = (one.detach() for one in self.tensors[:2])

        def step() -> tuple[Tensor, Tensor]:
            half = weight.to(hidden.dtype)
            logits = hidden @ half.t()
            return logits @ half, logits.t() @ hidden

        return step

    def torch_own(self) -> Step:
        """torch.nn.functional.linear_cross_entropy, of torch 2.13, which never holds all logits."""
        if "linear_cross_entropy" not in vars(F):
            raise RuntimeError("needs torch 2.13")
        options = torch.nn.LinearCrossEntropyOptions()
        return self.of_half(partial(F.linear_cross_entropy, reduction="sum", options=options))

    def liger(self) -> Step:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        return self.of_half(lambda hidden, weight, labels: loss(weight, hidden, labels))

    def cce(self) -> Step:
        from cut_cross_entropy import linear_cross_entropy

        return self.of_half(partial(linear_cross_entropy, reduction="sum"))

    def contestants(self) -> dict[str, Contestant]:
        return {
            PRODUCTS: Contestant(self.products, cuda=False),
            "Etude, Triton": Contestant(self.triton, ("triton",)),
            "Etude, chunked": Contestant(self.chunked, cuda=False),
            "plain formula": Contestant(self.plain, cuda=False),
            COMPILED: Contestant(self.compiled),
            "torch, linear_cross_entropy": Contestant(self.torch_own, cuda=False),
            "Liger": Contestant(self.liger, ("liger_kernel",), is_peer=True),
            "CCE": Contestant(self.cce, ("cut_cross_entropy",), is_peer=True),
        }


def linear_sections(*, quick: bool) -> list[Section]:
    """Return a table for each of three sizes."""
    sizes = [(32_768, 768, 50_304), (32_768, 768, 50_257), (8_192, 2_048, 128_256)]
    return [
        section(
            "Linear layer + cross entropy: {:,} tokens, {:,} wide, {:,} classes".format(*one),
            Linear(*one).contestants(),
            lambda _: (PRODUCTS,),
            PRODUCTS,
            quick=quick,
        )
        for one in ([(64, 16, 130)] if quick else sizes)
    ]


# ------------------------------------------------------------------------------------------------ meaningful loss


class Meaningful:
    """The expected-value loss of one kind; made when it is first needed."""

    def __init__(self, kind: str, sizes: tuple[int, int, int, int]) -> None:
        self.kind, self.sizes = kind, sizes
        self._made: Problem | None = None

    @property
    def problem(self) -> Problem:
        if self._made is None:
            self._made = Problem(DEVICE, self.sizes, self.kind, self.sizes[2], TYPE)
        return self._made

    def of(self, function: Callable[[int], Tensor]) -> Step:
        problem = self.problem
        rows = len(problem.hidden)
        return one_pass(lambda: function(rows), (), (problem.hidden, problem.weight))

    def triton(self) -> Step:
        return by_triton(self.of(self.problem.fused))

    def chunked(self) -> Step:
        step = self.of(self.problem.fused)
        return with_kernel(step, expectations.KERNELS, expectations.chunked_expectation)

    def compiled(self) -> Step:
        return self.of(torch.compile(self.problem.plain, dynamic=False))

    def plain(self) -> Step:
        return self.of(self.problem.plain)


def meaningful_sections(*, quick: bool) -> list[Section]:
    """Return one table with all kinds."""
    sizes = (64, 16, 128, 8) if quick else (16_384, 768, 8_192, 256)
    contestants: dict[str, Contestant] = {}
    for kind in KINDS:
        one = Meaningful(kind, sizes)
        contestants |= {
            f"{kind}, Etude, Triton": Contestant(one.triton, ("triton",)),
            f"{kind}, Etude, chunked": Contestant(one.chunked, cuda=False),
            f"{kind}, plain formula": Contestant(one.plain, cuda=False),
            f"{kind}, {COMPILED}": Contestant(one.compiled),
        }

    def references(name: str) -> list[str]:
        kind = name.partition(",")[0]
        return [f"{kind}, {COMPILED}"] if DEVICE.type == "cuda" else [f"{kind}, plain formula"]

    title = "Expected-value loss: {:,} positions, {:,} wide, {:,} codes of {:,} values".format(*sizes)
    return [section(title, contestants, references, "the plain formula, compiled", quick=quick)]


# ------------------------------------------------------------------------------------------------ documents

CAUSAL = "plain causal"


class Documents:
    """Queries, keys and values (B, L, H, E) of rows that hold documents of one length."""

    def __init__(self, batch: int, length: int, document: int, heads: int, width: int) -> None:
        self.sizes = batch, length, heads, width
        self.document = document
        self._made: list[Tensor] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        if self._made is None:
            torch.manual_seed(0)
            self._made = [torch.randn(self.sizes, device=DEVICE, dtype=TYPE).requires_grad_() for _ in range(3)]
        return self._made

    def ids(self) -> Tensor:
        """Return the document of every position, (B, L)."""
        batch, length = self.sizes[:2]
        return torch.arange(length, device=DEVICE).div(self.document, rounding_mode="floor").expand(batch, length)

    def of(self, function: Callable[..., Tensor]) -> Step:
        """Return a pass of a function of queries, keys and values (B, H, L, E)."""
        inputs = tuple(self.tensors)
        return one_pass(lambda *heads: function(*(one.transpose(1, 2) for one in heads)), inputs, inputs)

    def causal(self) -> Step:
        return self.of(partial(F.scaled_dot_product_attention, is_causal=True))

    def dense(self) -> Step:
        mask = attention_mask(self.ids(), None, self.ids())
        return self.of(partial(F.scaled_dot_product_attention, attn_mask=mask))

    def varlen(self) -> Step:
        from torch.nn.attention.varlen import varlen_attn

        total = self.sizes[0] * self.sizes[1]
        starts = torch.arange(0, total + 1, self.document, device=DEVICE, dtype=torch.int32)
        known = inspect.signature(varlen_attn).parameters
        causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
        attend = partial(
            varlen_attn, cu_seq_q=starts, cu_seq_k=starts, max_q=self.document, max_k=self.document, **causal
        )
        inputs = tuple(self.tensors)
        return one_pass(lambda *heads: attend(*(one.flatten(0, 1) for one in heads)), inputs, inputs)

    def flex(self, *, every_time: bool) -> Step:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        ids = self.ids().contiguous()
        batch, length = ids.shape

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (ids[b, query] == ids[b, key])

        make = torch.compile(create_block_mask, dynamic=False) if every_time else create_block_mask
        attend = torch.compile(flex_attention, dynamic=False)

        def mask() -> Any:
            return make(sees, batch, None, length, length, device=DEVICE)

        kept = None if every_time else mask()
        return self.of(lambda *heads: attend(*heads, block_mask=mask() if every_time else kept))

    def contestants(self) -> dict[str, Contestant]:
        return {
            CAUSAL: Contestant(self.causal, cuda=False),
            "dense mask, SDPA": Contestant(self.dense, cuda=False),
            "varlen_attn": Contestant(self.varlen, ("torch.nn.attention.varlen",)),
            "FlexAttention, mask built once": Contestant(partial(self.flex, every_time=False)),
            "FlexAttention, mask built every time": Contestant(partial(self.flex, every_time=True)),
        }


def documents_sections(*, quick: bool) -> list[Section]:
    """Return the table of attention inside documents."""
    sizes = (2, 16, 4, 2, 8) if quick else (8, 2_048, 256, 12, 64)
    title = "Attention: {} × {:,} tokens in documents of {}, {} heads × {}".format(*sizes)
    one = Documents(*sizes)
    return [section(title, one.contestants(), lambda _: (CAUSAL,), "plain causal attention", quick=quick)]
