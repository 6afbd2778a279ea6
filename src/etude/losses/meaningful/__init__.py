"""Losses that know what tokens mean: expected values of a modality's codebook or bin centres, beside cross entropy."""

from etude.losses.meaningful.combined import combined_loss, make_reconstructions, meaningful_terms
from etude.losses.meaningful.hl_gauss import bin_edges
from etude.losses.meaningful.kinds import make_reconstruction
from etude.losses.meaningful.reconstruction import KindName, Reconstruction
from etude.losses.meaningful.strategy import MeaningfulLoss

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
