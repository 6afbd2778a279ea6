"""Computing a chunk of positions on a GPU: its memory, its products and the kernels between them.

    numbers              logits; one kernel for everything else
    vectors, mse, huber  logits; probabilities; expected values, a product with the table; penalty and its slopes; then
                         one kernel computes slopes @ table.T and turns its current block into gradients
    vectors, others      logits; products of the vectors with the true ones; one kernel for losses, gradients and
                         probabilities; expected values for the squared error

Logits are float32. Later results reuse their memory: probabilities or gradients, in the dtype of the products, use
the first half, and expected vectors and slopes the second half if they fit.
"""

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from etude.losses.products import ALIGNED, product
from etude.multimodal.loss.fused import ExpectationProblem, ExpectationResult
from etude.multimodal.loss.kinds import HLGauss, Huber
from etude.multimodal.loss.reconstruction import Reconstruction

ROW_ELEMENTS = 32
"""Elements of a row of logits per thread."""
SLOPE_BLOCK = {"BLOCK_ROWS": 128, "BLOCK_CODES": 128, "num_warps": 8, "num_stages": 3}
"""Tiling of the product with the slopes: two blocks fit into a multiprocessor, one computes while one stores."""
SLOPE_DEPTH = 64
"""Elements of a vector that are multiplied at a time."""
SPLIT_VALUES = 64
"""Vectors of up to this length are stored as the sum of two bfloat16 vectors: their products are cheap."""
FEW_ALIGNED = 8
"""Short rows start at multiples of this many elements, long ones of `ALIGNED`: products are slow otherwise."""


class Chunks(ABC):
    """Memory for a chunk of rows, and how they are solved."""

    def __init__(self, p: ExpectationProblem, kernels: ModuleType, size: int) -> None:
        self.p, self.kernels, self.num_codes = p, kernels, p.weight.shape[0]
        self.gradients = p.want_hidden or p.want_weight or p.want_bias
        self.kind = torch.bfloat16 if p.hidden.dtype is torch.bfloat16 else torch.float32
        self.logits = self._matrix(size, self.num_codes)
        self.narrow = _whole_rows(self.logits).view(self.kind)[:, : self.num_codes]
        self.spare = self.logits  # memory that `add_logit_gradients` may overwrite
        block = max(16, _power_of_2(self.num_codes))
        self.row_options: dict[str, Any] = {
            "bias": p.row_weights if p.bias is None else p.bias,
            "softcap": 1.0 if p.softcap is None else float(p.softcap),
            "num_codes": self.num_codes,
            "BIAS": p.bias is not None,
            "SOFTCAP": p.softcap is not None,
            "BLOCK": block,
            "num_warps": max(1, min(16, block // (32 * ROW_ELEMENTS))),
        }

    @staticmethod
    @abstractmethod
    def row_bytes(p: ExpectationProblem) -> int:
        """Return the memory per row."""

    @abstractmethod
    def solve(self, result: ExpectationResult, rows: slice) -> Tensor:
        """Compute losses and squared errors of these rows; return gradients of their logits if needed."""

    def _matrix(self, num_rows: int, width: int) -> Tensor:
        return self._empty(num_rows, _aligned(width, ALIGNED if width > ALIGNED else FEW_ALIGNED))[:, :width]

    def _empty(self, *shape: int) -> Tensor:
        return self.p.hidden.new_empty(shape, dtype=torch.float32)

    def _make_logits(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return logits, and their memory for later results."""
        num = rows.stop - rows.start
        return _product(self.p.hidden[rows], self.p.weight.t(), self.logits[:num]), self.narrow[:num]


class ScalarChunks(Chunks):
    """Codes that represent one number each."""

    def __init__(self, p: ExpectationProblem, kernels: ModuleType, size: int) -> None:
        super().__init__(p, kernels, size)
        if p.hidden.dtype is torch.float16:
            self.spare = self._matrix(size, self.num_codes)

    @staticmethod
    def row_bytes(p: ExpectationProblem) -> int:
        """Return the size of the logits, twice for float16."""
        return (8 if p.hidden.dtype is torch.float16 else 4) * p.weight.shape[0]

    def solve(self, result: ExpectationResult, rows: slice) -> Tensor:
        """Run one kernel."""
        p, recon = self.p, self.p.reconstruction
        logits, grads = self._make_logits(rows)
        unused = p.row_weights
        bins = dict.fromkeys(("edges", "edge_rests", "place_rests", "sigmas"), unused)
        if isinstance(recon, HLGauss):
            bins = {name: getattr(recon, name) for name in bins}
        self.kernels.scalar_kernel[(len(logits),)](
            logits,
            logits.stride(0),
            grads,
            grads.stride(0),
            targets=p.targets[rows],
            row_weights=p.row_weights[rows],
            values=recon.places if isinstance(recon, HLGauss) else recon.centred,
            losses=result.losses[rows],
            squares=result.squared_errors[rows],
            delta=_delta(recon),
            KIND=recon.name,
            GRADS=self.gradients,
            **bins,
            **self.row_options,
        )
        return grads


class VectorChunks(Chunks):
    """Codes that represent vectors: the expected vector is a product of probabilities with a table."""

    penalty = ""

    def __init__(self, p: ExpectationProblem, kernels: ModuleType, size: int) -> None:
        super().__init__(p, kernels, size)
        self.table = table = table_of(p.reconstruction)
        width, end = table.values.shape[1], table.values.shape[1] + table.padded // 2  # two slopes share one element
        room, half = _whole_rows(self.logits), self.logits.stride(0) // 2
        if end > half:
            room, half = self._empty(size, end), 0
        self.expected = room[:, half : half + width]
        self.slopes = room[:, half + width : half + end].view(p.hidden.dtype)
        self.inverses, self.shifts = self._empty(size), self._empty(size)

    def _compare_expected(self, result: ExpectationResult, rows: slice, probs: Tensor) -> None:
        """Compute squared errors, and with a penalty also losses and slopes."""
        p, table = self.p, self.table
        self.kernels.penalty_kernel[(len(probs),)](
            _product(probs, table.values, self.expected[: len(probs)]),
            self.expected.stride(0),
            table.values,
            self.inverses,
            p.targets[rows],
            p.row_weights[rows],
            result.losses[rows],
            result.squared_errors[rows],
            self.slopes,
            self.slopes.stride(0),
            self.shifts,
            table.size,
            table.padded,
            _delta(p.reconstruction),
            KIND=self.penalty,
            PARTS=table.values.shape[1] // table.padded,
            GRADS=self.gradients,
            BLOCK=_power_of_2(table.padded),
            num_warps=max(1, min(8, table.padded // 128)),
        )


class ExpectedVectorChunks(VectorChunks):
    """A penalty of the expected vector."""

    def __init__(self, p: ExpectationProblem, kernels: ModuleType, size: int) -> None:
        super().__init__(p, kernels, size)
        self.penalty = p.reconstruction.name
        self.log_totals = self._empty(size)

    @staticmethod
    def row_bytes(p: ExpectationProblem) -> int:
        """Return the size of logits, or of an expected vector and its slopes if those are longer."""
        codes, values = p.weight.shape[0], p.reconstruction.centred.shape[1]
        return 4 * codes if 5 * values <= codes else 4 * codes + 10 * values

    def solve(self, result: ExpectationResult, rows: slice) -> Tensor:
        """Run three kernels."""
        logits, probs = self._make_logits(rows)
        self.kernels.softmax_kernel[(len(probs),)](
            logits,
            logits.stride(0),
            probs,
            probs.stride(0),
            inverses=self.inverses,
            log_totals=self.log_totals,
            **self.row_options,
        )
        self._compare_expected(result, rows, probs)
        if self.gradients:
            self._multiply_slopes(probs)
        return probs

    def _multiply_slopes(self, probs: Tensor) -> None:
        """Turn probabilities into gradients of logits."""
        tl, table = self.kernels.tl, self.table
        blocks = (self.num_codes, SLOPE_BLOCK["BLOCK_CODES"]), (len(probs), SLOPE_BLOCK["BLOCK_ROWS"])
        self.kernels.slope_kernel[tuple(-(-all_of // block) for all_of, block in blocks)](
            probs,
            probs.stride(0),
            self.slopes,
            self.slopes.stride(0),
            table.values,
            table.values.stride(0),
            self.inverses,
            self.shifts,
            self.log_totals,
            self.row_options["softcap"],
            len(probs),
            self.num_codes,
            table.padded,
            SOFTCAP=self.row_options["SOFTCAP"],
            BLOCK_SIZE=min(SLOPE_DEPTH, max(16, _power_of_2(table.padded))),
            DOT=tl.bfloat16 if probs.is_cuda else tl.float32,  # triton's interpreter has no bfloat16 products
            **SLOPE_BLOCK,
        )


class DistanceChunks(VectorChunks):
    """Kinds that compare the distribution with the vectors' distances from the target."""

    def __init__(self, p: ExpectationProblem, kernels: ModuleType, size: int) -> None:
        super().__init__(p, kernels, size)
        self.products = self._matrix(size, self.num_codes)
        self.grads = _whole_rows(self.products).view(self.kind)[:, : self.num_codes]

    @staticmethod
    def row_bytes(p: ExpectationProblem) -> int:
        """Return the size of logits and products, the expected vector and the target as a factor."""
        return 8 * p.weight.shape[0] + 20 * p.reconstruction.centred.shape[1]

    def solve(self, result: ExpectationResult, rows: slice) -> Tensor:
        """Run two kernels."""
        p, recon = self.p, self.p.reconstruction
        logits, probs = self._make_logits(rows)
        left, right, norms = self.table.factors()
        products = _product(left[p.targets[rows]], right.t(), self.products[: len(probs)])
        grads = self.grads[: len(probs)]
        self.kernels.distance_kernel[(len(probs),)](
            logits,
            logits.stride(0),
            probs,
            probs.stride(0),
            targets=p.targets[rows],
            row_weights=p.row_weights[rows],
            products=products,
            product_stride=products.stride(0),
            grads=grads,
            grad_stride=grads.stride(0),
            norms=norms,
            sigmas=recon.sigmas if isinstance(recon, HLGauss) else norms,
            losses=result.losses[rows],
            inverses=self.inverses,
            size=self.table.size,
            KIND=recon.name,
            GRADS=self.gradients,
            **self.row_options,
        )
        self._compare_expected(result, rows, probs)
        return grads


class VectorTable:
    """The vectors of a modality as factors of bfloat16 products."""

    def __init__(self, centred: Tensor) -> None:
        self.size, self.padded = centred.shape[1], _aligned(centred.shape[1], FEW_ALIGNED)
        self._centred = centred
        wide = pad(centred.float(), (0, self.padded - self.size))
        self._parts: list[Tensor] = []
        for _ in range(3):  # each holds the remainder of the previous ones
            self._parts.append(wide.bfloat16())
            wide = wide - self._parts[-1].float()
        self.values = torch.cat(self._parts[: 2 if self.size <= SPLIT_VALUES else 1], 1)
        self._factors: tuple[Tensor, Tensor, Tensor] | None = None

    def factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return two matrices whose row products are those of the vectors in float32 accuracy, and squared norms.

        Of the nine products of three parts with three, six are significant in float32.
        """
        if self._factors is None:
            a, b, c = self._parts
            with torch.inference_mode(False):
                norms = self._centred.double().square().sum(1).float()
                self._factors = torch.cat([a, a, b, b, a, c], 1), torch.cat([a, b, a, b, c, a], 1), norms
        return self._factors


_tables: WeakKeyDictionary[Reconstruction, VectorTable] = WeakKeyDictionary()


def table_of(reconstruction: Reconstruction) -> VectorTable:
    """Return the table of a reconstruction on its device, cached."""
    found = _tables.get(reconstruction)
    if found is None:
        with torch.inference_mode(False):  # a later step may need it for gradients
            found = _tables[reconstruction] = VectorTable(reconstruction.centred)
    return found


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Compute a @ b in float32, whatever the dtype of the factors."""
    return product(a, b, out) if a.is_cuda else torch.mm(a.float(), b.float(), out=out)


def _whole_rows(matrix: Tensor) -> Tensor:
    """Return a matrix with padded rows."""
    stride = matrix.stride(0)
    return matrix.as_strided((len(matrix), stride), (stride, 1))


def _delta(reconstruction: Reconstruction) -> float:
    return float(reconstruction.delta) if isinstance(reconstruction, Huber) else 0.0


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _aligned(number: int, step: int) -> int:
    return -(-number // step) * step
