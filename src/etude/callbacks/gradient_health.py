"""Judging gradients: which layers vanish, explode, are dead or not finite, in words and with a remedy."""

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from etude.callbacks.gradient_norms import ParameterNumbers
from etude.checkpoint import check_kind, record_of

Kind = Literal["unused", "dead", "vanishing", "exploding", "non-finite"]

FAR_BELOW = 1e-4
"""A layer vanishes if its gradient is smaller than this share of the median of the layers."""
FAR_ABOVE = 100.0
"""A layer explodes if its gradient is so many times its own usual one, and not small (`exploding` / FAR_ABOVE)."""
HISTORY = 15
"""Checks over which the usual norm of a layer, a median, is taken; judged by it only when there are five of them."""
SCALED_PATIENCE = 10
"""Under a loss scale (fp16) gradients overflow until the scale has adapted: more than so many in a row are news."""
MAX_NAMES = 3
Words = Callable[[Sequence[str]], str]
"""Says of some layers what is wrong with them."""

_PAST = {"history": dict[str, list[float]], "zero_streak": dict[str, int], "bad_streak": int, "found": dict[str, int]}
_STATE = record_of("Judge", _PAST)


@dataclass(frozen=True, slots=True)
class LayerHealth:
    """One layer: a module with parameters of its own that can be trained."""

    grad_norm: float | None
    """Norm of the gradient of the averaged loss before clipping; None if there is no gradient at all."""
    weight_norm: float
    zero_fraction: float
    """Share of the gradient's elements that are exactly zero."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, in words."""

    kind: Kind
    layers: tuple[str, ...]
    """Layers, or parameters for the kind `unused`; for `non-finite` in the order of the backward pass."""
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class GradientHealth:
    """The gradients of one step."""

    step: int
    layers: dict[str, LayerHealth]
    parameters: dict[str, float | None]
    """Gradient norm of every parameter."""
    findings: list[Finding] = field(default_factory=list)
    """All that is wrong in this step."""
    warnings: list[Finding] = field(default_factory=list)
    """What of it is to be reported: each layer and kind when found first, then when it was found 10, 100 … times."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or f"the gradients of {len(self.layers)} layers are healthy"


class Judge:
    """Compares the layers with thresholds, with each other and with their own past, which it remembers."""

    def __init__(self, *, vanishing: float, exploding: float, patience: int) -> None:
        self.vanishing = vanishing
        self.exploding = exploding
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        """Forget the past."""
        self._history: dict[str, list[float]] = {}
        self._zero_streak: dict[str, int] = {}
        self._bad_streak = 0
        self._found: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the past as plain numbers."""
        return copy.deepcopy({name: getattr(self, f"_{name}") for name in _PAST})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the past."""
        check_kind(_STATE, state, "judge")
        for name in _PAST:
            setattr(self, f"_{name}", copy.deepcopy(state[name]))

    def judge(self, step: int, numbers: Sequence[ParameterNumbers], *, is_scaled: bool = False) -> GradientHealth:
        """Return the health of the layers, and remember them."""
        layers = by_layer(numbers)
        health = GradientHealth(step, layers, {one.name: one.grad_norm for one in numbers})
        norms = {name: layer.grad_norm for name, layer in layers.items() if layer.grad_norm is not None}
        if bad := [name for name, norm in reversed(norms.items()) if not math.isfinite(norm)]:
            self._bad_streak += 1
            if not is_scaled or self._bad_streak > SCALED_PATIENCE:
                health.findings.append(Finding("non-finite", tuple(bad), _nonfinite(bad, norms)))
                health.warnings.extend(health.findings if self._is_due("non-finite") else ())  # one for all layers
            return health
        self._bad_streak = 0
        unused = self._persisting([one.name for one in numbers if one.grad_norm is None], "unused")
        self._report(health, "unused", unused, _unused)
        dead = self._persisting([name for name, norm in norms.items() if norm == 0], "dead")
        self._report(health, "dead", dead, lambda names: _dead(names, self.patience))
        norms = {name: norm for name, norm in norms.items() if norm > 0}
        if not norms:
            return health
        median = statistics.median(norms.values())
        faint = [name for name, norm in norms.items() if norm < max(self.vanishing, FAR_BELOW * median)]
        self._report(health, "vanishing", faint, lambda names: _vanishing(names, norms, median, len(layers)))
        usual = {name: self._usual(name) for name in norms}
        loud = [name for name, norm in norms.items() if self._is_loud(norm, usual[name])]
        self._report(health, "exploding", loud, lambda names: _exploding(names, norms, median, usual))
        for name, norm in norms.items():
            self._history.setdefault(name, []).append(norm)
            del self._history[name][:-HISTORY]
        return health

    def _usual(self, layer: str) -> float | None:
        past = self._history.get(layer, [])
        return statistics.median(past) if len(past) >= 5 else None

    def _is_loud(self, norm: float, usual: float | None) -> bool:
        # Near the minimum of the loss one hard batch is a hundred times the others and does no harm.
        spike = usual is not None and norm > max(FAR_ABOVE * usual, self.exploding / FAR_ABOVE)
        return norm > self.exploding or spike

    def _persisting(self, names: Iterable[str], kind: str) -> list[str]:
        """Return those of `names` that were among them in each of the last checks."""
        names = list(names)
        keys = {f"{kind} {name}" for name in names}
        others = {key: n for key, n in self._zero_streak.items() if key.partition(" ")[0] != kind}
        self._zero_streak = others | {key: self._zero_streak.get(key, 0) + 1 for key in sorted(keys)}
        return [name for name in names if self._zero_streak[f"{kind} {name}"] >= self.patience]

    def _report(self, health: GradientHealth, kind: Kind, names: list[str], words: Words) -> None:
        """Add a finding about all `names`, and a warning about those of them that are due to be reported."""
        if not names:
            return
        health.findings.append(Finding(kind, tuple(names), words(names)))
        if due := [name for name in names if self._is_due(f"{kind} {name}")]:
            health.warnings.append(Finding(kind, tuple(due), words(due)))

    def _is_due(self, key: str) -> bool:
        """Count a finding; True the first time, the 10th, the 100th …"""
        count = self._found[key] = self._found.get(key, 0) + 1
        return str(count).rstrip("0") == "1"


def by_layer(numbers: Sequence[ParameterNumbers]) -> dict[str, LayerHealth]:
    """Return the layers in the order of the model: parameters of one module taken together."""
    groups: dict[str, list[ParameterNumbers]] = {}
    for one in numbers:
        groups.setdefault(layer_of(one.name), []).append(one)
    return {name: _layer(group) for name, group in groups.items()}


def layer_of(parameter: str) -> str:
    """Return the module that a parameter belongs to; a parameter of the whole model is a layer of its own.

    >>> layer_of("blocks.3.mlp.fc1.weight"), layer_of("positions")
    ('blocks.3.mlp.fc1', 'positions')
    """
    return parameter.rpartition(".")[0] or parameter


def _layer(group: list[ParameterNumbers]) -> LayerHealth:
    norms = [one.grad_norm for one in group if one.grad_norm is not None]
    with_gradient = [one for one in group if one.grad_norm is not None]
    numel = sum(one.numel for one in with_gradient)
    return LayerHealth(
        grad_norm=math.hypot(*norms) if norms else None,
        weight_norm=math.hypot(*(one.weight_norm for one in group)),
        zero_fraction=sum(one.zeros for one in with_gradient) / numel if numel else 0.0,
    )


# --- words


def _unused(names: Sequence[str]) -> str:
    one = len(names) == 1
    return (
        f"{_some('parameter', names)} {'has' if one else 'have'} no gradient: no part in the loss; use "
        f"{'it' if one else 'them'} in the forward pass, or freeze {'it' if one else 'them'} by requires_grad_(False)"
    )


def _dead(names: Sequence[str], patience: int) -> str:
    checks = "in this check" if patience == 1 else f"in the last {patience} checks"
    return (
        f"{_some('layer', names)}: the gradient is exactly zero {checks}: dead units (lower the learning rate, or use "
        f"a leaky activation), or an output that is masked or not used"
    )


def _vanishing(names: Sequence[str], norms: Mapping[str, float], median: float, num_layers: int) -> str:
    if len(names) > num_layers / 2:
        return (
            f"{_some('layer', names)}: the gradient vanishes ({_range(names, norms)}) in {len(names)} of {num_layers} "
            f"layers: if the loss has not come to rest, check initialisation, normalisation and saturated activations"
        )
    return (
        f"{_some('layer', names)}: the gradient vanishes ({_range(names, norms)}, median of layers {median:.1e}): "
        f"check normalisation and initialisation, or use residual connections"
    )


def _exploding(
    names: Sequence[str], norms: Mapping[str, float], median: float, usual: Mapping[str, float | None]
) -> str:
    compared = f"median of layers {median:.1e}"
    if len(names) == 1 and (before := usual[names[0]]) and norms[names[0]] > FAR_ABOVE * before:
        compared = f"usually {before:.1e}"
    return (
        f"{_some('layer', names)}: the gradient explodes ({_range(names, norms)}, {compared}): lower the learning "
        f"rate, warm it up, clip (training.gradient_clip_norm), or check initialisation and the scale of the data"
    )


def _nonfinite(names: Sequence[str], norms: Mapping[str, float]) -> str:
    what = "NaN" if any(math.isnan(norms[name]) for name in names) else "infinite"
    if len(names) == len(norms) > 1:
        return (
            f"the gradients of all {len(names)} layers are {what}, so the loss is too: look for NaN in the data, or "
            f"lower the learning rate"
        )
    first = (
        f", the first of {len(names)} such layers (of {len(norms)}) in the backward pass" if len(names) > 1 else ""
    )
    return (
        f"layer {names[0]}: the gradient is {what}{first}: look for a division, square root or logarithm of zero "
        f"between it and the next layer, or lower the learning rate"
    )


def _some(word: str, names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{word}{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMES])}{rest}"


def _range(names: Sequence[str], norms: Mapping[str, float]) -> str:
    low, high = min(norms[name] for name in names), max(norms[name] for name in names)
    return f"norm {low:.1e}" if len(names) == 1 else f"norms {low:.1e} to {high:.1e}"
