"""Sweeps: many runs of one experiment with other settings, chosen by optuna; each trial is an ordinary run folder."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.sweep.folder import SweepFolder
    from etude.sweep.run import SweepOutcome, run_sweep

__all__ = ["SweepFolder", "SweepOutcome", "run_sweep"]

__getattr__ = load_late(__name__, __file__)
