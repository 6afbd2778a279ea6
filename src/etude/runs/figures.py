"""Curves as a picture in a file, drawn by matplotlib (extra `plot`)."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from etude.core.errors import ConfigError
from etude.monitor.series import Series, smoothed

FORMATS = (".png", ".svg", ".pdf")
FEW = 50
"""Points up to which they are marked, so that one between gaps is seen."""


def check_figure(out: Path) -> None:
    """Raise ConfigError if a figure cannot have this name, or without matplotlib."""
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"--out {out}: the name must end in {', '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--out needs matplotlib: pip install 'etude[plot]'")


def save_figure(
    curves: Sequence[Series],
    names: Sequence[str],
    out: Path,
    *,
    x_label: str,
    log: bool = False,
    smooth: float = 0.0,
    log_x: bool = False,
) -> None:
    """Write curves of one metric to a file; raise ConfigError without matplotlib, or if it cannot be written."""
    figure = _figure(out, 1)
    axes = figure.add_subplot()
    _draw(axes, curves, names, x_label, log=log, smooth=smooth)
    if log_x:
        axes.set_xscale("log")
    _save(figure, out)


def save_panels(panels: Sequence[Sequence[Series]], out: Path, *, x_label: str) -> None:
    """Write several panels of curves, one below the other, to a file; raises as `save_figure` does."""
    figure = _figure(out, len(panels))
    for place, curves in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, place)
        _draw(axes, curves, [curve.name for curve in curves], x_label if place == len(panels) else "")
    _save(figure, out)


def _figure(out: Path, num_panels: int) -> Any:
    check_figure(out)
    from matplotlib.figure import Figure

    return Figure(figsize=(8, 2 + 2.5 * num_panels), layout="constrained")


def _draw(
    axes: Any, curves: Sequence[Series], names: Sequence[str], x_label: str, *, log: bool = False, smooth: float = 0.0
) -> None:
    for place, (curve, name) in enumerate(zip(curves, names, strict=True)):
        color, mark = f"C{place % 10}", "." if len(curve.x) <= FEW else ""
        if smooth:
            axes.plot(curve.x, curve.y, color=color, alpha=0.3, linewidth=1)
        # a name that begins with an underscore would be left out of the legend, and $ begins a formula
        axes.plot(curve.x, smoothed(curve.y, smooth), marker=mark, color=color, label=" " + _plain(name))
    axes.set_xlabel(x_label)
    axes.set_ylabel(_plain(curves[0].name))
    axes.grid(alpha=0.3)
    if log:
        axes.set_yscale("log")
    if len(curves) > 1:
        axes.legend()


def _save(figure: Any, out: Path) -> None:
    try:
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def _plain(name: str) -> str:
    return name.replace("$", r"\$")
