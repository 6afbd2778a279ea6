"""Losses that use the meaning of tokens: expected values of codebooks or bin centres, beside cross entropy."""

from etude.multimodal.loss.combined import combined_loss as combined_loss
from etude.multimodal.loss.kinds import bin_edges as bin_edges, make_reconstruction as make_reconstruction
from etude.multimodal.loss.reconstruction import KindName as KindName, Reconstruction as Reconstruction
from etude.multimodal.loss.strategy import MeaningfulLoss as MeaningfulLoss
from etude.multimodal.loss.terms import (
    make_reconstructions as make_reconstructions,
    meaningful_terms as meaningful_terms,
)
