"""Losses that know what tokens mean: expected values of a modality's codebook or bin centres, beside cross entropy."""

from etude.losses.meaningful.by_hand import combined_loss
from etude.losses.meaningful.hl_gauss import bin_edges
from etude.losses.meaningful.kinds import make_reconstruction
from etude.losses.meaningful.reconstruction import KindName, Reconstruction
from etude.losses.meaningful.strategy import MeaningfulLoss
from etude.losses.meaningful.terms import make_reconstructions, meaningful_terms

__all__ = [
    "KindName",
    "MeaningfulLoss",
    "Reconstruction",
    "bin_edges",
    "combined_loss",
    "make_reconstruction",
    "make_reconstructions",
    "meaningful_terms",
]
