"""Comparisons: one model for all tasks with one model per task, and several weightings; `etude compare`."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.multitask.compare.runs import compare_weightings as compare_weightings
    from etude.multitask.compare.tables import Comparison as Comparison
    from etude.multitask.compare.tasks import compare_tasks as compare_tasks


__getattr__ = load_late(__name__, __file__)
