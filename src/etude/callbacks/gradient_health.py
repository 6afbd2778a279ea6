"""Diagnosing gradients: which layers vanish, explode, are dead or not finite, with a remedy."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from etude.checkpoint import record_of

Kind = Literal["unused", "dead", "vanishing", "exploding", "non-finite"]
Norms = dict[str, float | None]
"""Norms of gradients by name; None if there is no gradient at all."""

FAR_BELOW = 1e-4
"""A layer vanishes if its gradient norm is below this share of the median over layers."""
SCALED_PATIENCE = 10
"""A loss scale (fp16) overflows gradients until it has adapted: only more than this many in a row are reported."""
MAX_NAMES = 3

_REMEDIES: dict[Kind, str] = {
    "unused": "use it in the forward pass, or freeze it by requires_grad_(False)",
    "dead": "dead units (lower the learning rate, or use a leaky activation), or an output that is masked or not used",
    "vanishing": "check normalisation and initialisation, or use residual connections",
    "exploding": "lower the learning rate, warm it up, clip (training.gradient_clip_norm), or check initialisation and "
    "the scale of the data",
    "non-finite": "look for a division, square root or logarithm of zero between it and the next layer, or lower the "
    "learning rate",
}
_PAST = {"streaks": dict[str, int], "bad_streak": int, "found": dict[str, int]}
JUDGE = record_of("Judge", _PAST)


@dataclass(frozen=True, slots=True)
class GradientFinding:
    """One problem, as a message."""

    kind: Kind
    layers: tuple[str, ...]
    """Layers, or parameters for the kind `unused`; for `non-finite` in the order of the backward pass."""
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class GradientHealth:
    """The gradients of one step: norms of the averaged loss before clipping, and their problems."""

    step: int
    layers: Norms
    """For every module with trainable parameters of its own."""
    parameters: Norms
    findings: list[GradientFinding] = field(default_factory=list)
    """All problems of this step."""
    warnings: list[GradientFinding] = field(default_factory=list)
    """Problems to report: each layer and kind when first found, then after 10, 100 … occurrences."""

    @property
    def healthy(self) -> bool:
        """Whether there are no problems."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or f"the gradients of {len(self.layers)} layers are healthy"


class Judge:
    """Compares the layers with thresholds and with each other, and remembers how long a problem lasts."""

    def __init__(self, *, vanishing: float, exploding: float, patience: int) -> None:
        self.vanishing, self.exploding, self.patience = vanishing, exploding, patience
        self.reset()

    def reset(self) -> None:
        """Reset the history."""
        self.streaks: dict[str, int] = {}
        """Consecutive checks without a gradient, by kind and layer."""
        self.bad_streak = 0
        self.found: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain numbers."""
        return {"streaks": dict(self.streaks), "bad_streak": self.bad_streak, "found": dict(self.found)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history."""
        self.streaks, self.bad_streak, self.found = dict(state["streaks"]), state["bad_streak"], dict(state["found"])

    def judge(self, step: int, parameters: Norms, *, is_scaled: bool = False) -> GradientHealth:
        """Return the health of the layers from the norms of their parameters, in model order."""
        health = GradientHealth(step, by_layer(parameters), parameters)
        norms = {name: norm for name, norm in health.layers.items() if norm is not None}
        bad = [name for name in reversed(norms) if not math.isfinite(norms[name])]
        self.bad_streak = self.bad_streak + 1 if bad else 0
        if bad:
            if not is_scaled or self.bad_streak > SCALED_PATIENCE:
                finding = GradientFinding("non-finite", tuple(bad), _nonfinite(bad, norms))
                health.findings.append(finding)
                health.warnings.extend([finding] if self._is_due("non-finite") else [])  # one finding for all layers
            return health
        without = [f"unused {name}" for name, norm in parameters.items() if norm is None]
        without += [f"dead {name}" for name, norm in norms.items() if norm == 0]
        self.streaks = {key: self.streaks.get(key, 0) + 1 for key in without}
        lasting = [key.split(" ", 1) for key, count in self.streaks.items() if count >= self.patience]
        alive = {name: norm for name, norm in norms.items() if norm > 0}
        median = statistics.median(alive.values()) if alive else 0.0
        found: dict[Kind, list[str]] = {
            "unused": [name for kind, name in lasting if kind == "unused"],
            "dead": [name for kind, name in lasting if kind == "dead"],
            "vanishing": [name for name, norm in alive.items() if norm < max(self.vanishing, FAR_BELOW * median)],
            "exploding": [name for name, norm in alive.items() if norm > self.exploding],
        }
        for kind, names in found.items():
            due = [name for name in names if self._is_due(f"{kind} {name}")]
            for place, some in ((health.findings, names), (health.warnings, due)):
                if some:
                    place.append(GradientFinding(kind, tuple(some), self._words(kind, some, alive, median)))
        return health

    def _words(self, kind: Kind, names: Sequence[str], norms: Mapping[str, float], median: float) -> str:
        if kind in ("unused", "dead"):
            what = "there is no gradient" if kind == "unused" else "the gradient is exactly zero"
            what += f" in the last {self.patience} checks" if self.patience > 1 else ""
        else:
            low, high = min(norms[name] for name in names), max(norms[name] for name in names)
            shown = f"norm {low:.1e}" if len(names) == 1 else f"norms {low:.1e} to {high:.1e}"
            verb = "vanishes" if kind == "vanishing" else "explodes"
            what = f"the gradient {verb} ({shown}, median of layers {median:.1e})"
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        noun = "parameter" if kind == "unused" else "layer"
        some = f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMES])}{more}"
        return f"{some}: {what}: {_REMEDIES[kind]}"

    def _is_due(self, key: str) -> bool:
        """Count a finding; return True for the first, 10th, 100th … occurrence."""
        count = self.found[key] = self.found.get(key, 0) + 1
        return str(count).rstrip("0") == "1"


def by_layer(parameters: Norms) -> Norms:
    """Return norms per layer, combining the parameters of one module; a parameter of the model itself is a layer.

    >>> by_layer({"fc.weight": 3.0, "fc.bias": 4.0, "positions": 1.0, "spare.weight": None})
    {'fc': 5.0, 'positions': 1.0, 'spare': None}
    """
    groups: dict[str, list[float]] = {}
    for name, norm in parameters.items():
        groups.setdefault(name.rpartition(".")[0] or name, []).extend([] if norm is None else [norm])
    return {name: math.hypot(*norms) if norms else None for name, norms in groups.items()}


def _nonfinite(names: Sequence[str], norms: Mapping[str, float]) -> str:
    what = "NaN" if any(math.isnan(norms[name]) for name in names) else "infinite"
    if len(names) == len(norms) > 1:
        return (
            f"the gradients of all {len(names)} layers are {what}, so the loss is too; check the data for NaN, or "
            "lower the learning rate"
        )
    of = f", the first of {len(names)} such layers (of {len(norms)}) in the backward pass" if len(names) > 1 else ""
    return f"layer {names[0]}: the gradient is {what}{of}: {_REMEDIES['non-finite']}"
