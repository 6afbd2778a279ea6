"""Losses that use the meaning of tokens: expected values of codebooks or bin centres, beside cross entropy."""

from etude.multimodal.loss.combined import combined_loss
from etude.multimodal.loss.hl_gauss import bin_edges
from etude.multimodal.loss.kinds import make_reconstruction
from etude.multimodal.loss.reconstruction import KindName, Reconstruction
from etude.multimodal.loss.strategy import MeaningfulLoss
from etude.multimodal.loss.terms import make_reconstructions, meaningful_terms

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
