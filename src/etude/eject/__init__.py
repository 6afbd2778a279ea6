"""`etude eject`: an experiment as one file of plain PyTorch that trains to the same weights."""

from typing import TYPE_CHECKING

from etude.lazy import load_late

if TYPE_CHECKING:
    from etude.eject.ejection import Ejected as Ejected, eject as eject, ejected as ejected


__getattr__ = load_late(__name__, __file__)
