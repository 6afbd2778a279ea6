"""Muon: orthogonal steps for the hidden matrices of a model, AdamW for all its other parameters."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Unpack

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from etude.config.registry import register
from etude.core.errors import ConfigError
from etude.core.spelling import listed, names_matching
from etude.distributed.matrices import Matrices, largest_part, layout_of
from etude.distributed.shards import model_param
from etude.optim.device import DeviceOptimizer, add_scaled, decay_weights
from etude.optim.groups import NamedParams, named_params
from etude.optim.kernels import ALIASES, Common, Decay, Fraction, ParamsT, Rate, arguments
from etude.optim.optimizers import AdamW
from etude.optim.several import Optimizers

AdjustRate = Literal["match_rms_adamw", "original"]
Precision = Literal["auto", "bfloat16", "float32"]
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the polynomial a·x + b·x³ + c·x⁵ that brings singular values close to 1 fast (Jordan et al., 2024)."""
LARGEST_STACK = 2**28
"""Elements of matrices that are orthogonalized in one call."""
NEURON_BETA = 0.95
_OF_GROUPS = ("params", "name", "lr", "learning_rate", "weight_decay")
"""Keys of a group: the settings that Muon and AdamW, which may both have a part of it, share."""
_OUTER = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|cls_token|lm_head|heads?|classifier|score)(\.|$)")
"""Names of embeddings and output layers that are not torch's modules."""


def orthogonalize(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Bring the singular values of every matrix of (B, rows, columns) close to 1, by Newton–Schulz iterations.

    >>> found = orthogonalize(torch.diag(torch.tensor([1.0, 0.5, 0.1]))[None])
    >>> bool((torch.linalg.svdvals(found) - 1).abs().max() < 0.35)
    True
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    found: Tensor = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = found.mT @ found if is_tall else found @ found.mT
        change = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, *((found, change) if is_tall else (change, found)), beta=a)
    return found


class MatrixMuon(DeviceOptimizer):
    """Muon for parameters that are all matrices; convolution kernels count as (out, rest). See `Muon`.

    Where processes divide a model, each of them orthogonalizes a share of its matrices.
    """

    whole_states = frozenset({"neuron_sq"})

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        weight_decay: Decay = 0.1,
        momentum: Fraction = 0.95,
        nesterov: bool = True,
        adjust_lr: AdjustRate = "match_rms_adamw",
        ns_steps: int = 5,
        precision: Precision = "auto",
        cautious: bool = False,
        normuon: bool = False,
        **common: Unpack[Common],
    ) -> None:
        how = {"nesterov": nesterov, "adjust_lr": adjust_lr, "ns_steps": ns_steps, "precision": precision}
        settings = {"momentum": momentum, **how, "cautious": cautious, "normuon": normuon}
        super().__init__(self._grouped(params, lr, **common), {"lr": lr, "weight_decay": weight_decay, **settings})

    def together(self, group: dict[str, Any], params: list[Tensor]) -> Iterable[list[Tensor]]:
        """Return lists of matrices of equal shape, in the same order on all processes."""
        found: dict[Any, list[Tensor]] = {}
        for param in params:
            found.setdefault((param.device, param.dtype, layout_of(param)), []).append(param)
        for same in found.values():
            most = max(1, LARGEST_STACK // largest_part(same[0])) if group["foreach"] else 1
            yield from (same[start : start + most] for start in range(0, len(same), most))

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], numbers: Any) -> None:  # noqa: ARG002
        """Step by the orthogonalized momentum of these matrices."""
        beta, rate, first = group["momentum"], group["lr"], params[0]
        momenta = self.states("momentum_buffer", params, torch.zeros_like)
        torch._foreach_lerp_(momenta, grads, 1 - beta)
        ahead = list(torch._foreach_lerp(grads, momenta, beta)) if group["nesterov"] else momenta
        is_half = group["precision"] == "bfloat16" or (group["precision"] == "auto" and first.is_cuda)
        stacked = torch.stack(ahead).flatten(2).to(torch.bfloat16 if is_half else _at_least_float32(first.dtype))
        matrices = Matrices(first, len(params))
        steps = orthogonalize(matrices.shares(stacked), group["ns_steps"])
        if group["normuon"]:
            steps = self._normalized(params, steps.to(first.dtype), matrices)
        moves = [part.view_as(first) for part in matrices.parts(steps).to(first.dtype).unbind()]
        if group["cautious"] and group["weight_decay"]:
            self._decay_cautiously(params, moves, rate * group["weight_decay"])
        else:
            decay_weights(params, rate, group["weight_decay"])
        add_scaled(params, moves, -rate * _adjustment(steps, group["adjust_lr"]))

    def _normalized(self, params: list[Tensor], steps: Tensor, matrices: Matrices) -> Tensor:
        """Divide the step of every neuron by the root of its mean square so far; keep the norm of the whole step."""
        kept = self.states("neuron_sq", params, lambda one: one.new_zeros(model_param(one).size(0), 1))
        squares = matrices.share_of(torch.stack(kept)).lerp(steps.square().mean(-1, keepdim=True), 1 - NEURON_BETA)
        torch._foreach_copy_(kept, list(matrices.copies(squares).unbind()))
        found = steps / squares.sqrt_().clamp_(min=1e-8)
        before, after = (torch.linalg.matrix_norm(one, keepdim=True) for one in (steps, found))
        return found.mul_(before / after.clamp(min=1e-8))

    def _decay_cautiously(self, params: list[Tensor], moves: list[Tensor], decay: Tensor | float) -> None:
        """Shrink only the weights that the step shrinks too."""
        agree = torch._foreach_mul(params, moves)
        torch._foreach_sign_(agree)
        torch._foreach_clamp_min_(agree, 0.0)
        torch._foreach_mul_(agree, params)
        add_scaled(params, list(agree), -decay)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _adjustment(matrices: Tensor, how: AdjustRate) -> float:
    """Return the factor of the rate for the shape of matrices."""
    rows, columns = matrices.shape[1:]
    return math.sqrt(max(1, rows / columns)) if how == "original" else 0.2 * math.sqrt(max(rows, columns))


@register("optimizer", "muon", aliases=ALIASES)
class Muon(Optimizers):
    """Muon (Jordan et al., 2024) for the hidden matrices, and AdamW for embeddings, output layers and vectors.

    Which is which is found from the modules and names of the model; `adamw` names more parameters for AdamW. With
    `adjust_lr="match_rms_adamw"` (Liu et al., 2025) a rate and a weight decay that fit AdamW fit all parameters;
    `adamw_lr` is another rate for those of AdamW. `cautious` decays only weights that the step shrinks too (Chen et
    al., 2025). `normuon` gives the neurons of a matrix steps of equal size (Li et al., 2025). Matrices of equal shape
    are orthogonalized together, in bfloat16 on CUDA and in float32 on the CPU, unless `precision` says otherwise.

    The numbers of its matrices are those of `torch.optim.Muon`.
    """

    @arguments
    def __init__(
        self,
        params: ParamsT,
        lr: Rate = 1e-3,
        momentum: Fraction = 0.95,
        weight_decay: Decay = 0.1,
        nesterov: bool = True,
        adjust_lr: AdjustRate = "match_rms_adamw",
        ns_steps: Annotated[int, Ge(1), Le(20)] = 5,
        precision: Precision = "auto",
        cautious: bool = False,
        normuon: bool = False,
        adamw: str | Sequence[str] = (),
        adamw_lr: Rate | None = None,
        betas: tuple[Fraction, Fraction] = (0.9, 0.95),
        eps: Decay = 1e-8,
        **common: Unpack[Common],
    ) -> None:
        if not isinstance(params, (nn.Module, NamedParams)):
            raise ConfigError("muon finds the hidden matrices in the model: pass the model, not its parameters")
        for place, key in (
            (place, key)
            for place, one in enumerate(common.get("groups", ()))
            if isinstance(one, Mapping)
            for key in one
        ):
            if key not in _OF_GROUPS:
                raise ConfigError(f"optimizer.groups.{place}.{key}: groups of muon can set only lr and weight_decay")
        given = named_params(params)
        hidden = _hidden(given, adamw)
        matrices, others = (_part(given, hidden, inside=inside) for inside in (True, False))
        if not matrices:
            raise ConfigError("muon: the model has no hidden matrices besides embeddings and its output; use adamw")
        others.frozen = frozenset()  # of groups that match nothing else only the first optimizer warns
        how = (nesterov, adjust_lr, ns_steps, precision, cautious, normuon)
        made: list[torch.optim.Optimizer] = [MatrixMuon(matrices, lr, weight_decay, momentum, *how, **common)]
        if others:
            made.append(AdamW(others, adamw_lr or lr, betas, eps, weight_decay, **common))
        super().__init__(made)
        self._announcement = "; ".join(map(_shares, made, ("Muon", "AdamW"), [given.names] * len(made)))

    def announcement(self) -> str:
        """Return a line that says which parameters are updated by Muon, and which by AdamW."""
        return self._announcement


def _shares(optimizer: torch.optim.Optimizer, label: str, names: Mapping[int, str]) -> str:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    size = sum(model_param(param).numel() for param in params)
    shown = listed([names[id(param)] for param in params], shorten=True)
    return f"{label} updates {len(params)} tensor{'s' * (len(params) > 1)} ({size:,} weights): {shown}"


def _hidden(given: NamedParams, adamw: str | Sequence[str]) -> set[int]:
    """Return the ids of the hidden matrices."""
    names = given.names
    chosen = set(names_matching(adamw, names.values(), "optimizer.adamw")) if adamw else set()
    params = [param for one in given for param in (one["params"] if isinstance(one, dict) else [one])]
    if lazy := [names[id(param)] for param in params if is_lazy(param)]:
        raise ConfigError(f"muon: {lazy[0]} has no shape yet; run the model on a batch before training")
    return {
        id(param)
        for param in params
        if param.dim() >= 2
        and 1 < model_param(param).size(0) < model_param(param).numel()
        and id(param) not in given.outer
        and not _OUTER.search(names[id(param)])
        and names[id(param)] not in chosen
    }


def _part(given: NamedParams, hidden: set[int], *, inside: bool) -> NamedParams:
    """Return the hidden matrices, or all other parameters; groups stay groups."""
    items: list[Any] = []
    for one in given:
        if not isinstance(one, dict):
            items += [one] if (id(one) in hidden) == inside else []
        elif kept := [param for param in one["params"] if (id(param) in hidden) == inside]:
            items.append({**one, "params": kept})
    return given.with_items(items)
