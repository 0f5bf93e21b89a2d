"""Patterns: what is attended. Pure descriptions in numpy, composable with & | ~, each its own oracle."""

from gossamer.patterns import reordered as reordered
from gossamer.patterns.base import Pattern
from gossamer.patterns.block import BigBird, BlockMask
from gossamer.patterns.compose import PerBatch, PerHead
from gossamer.patterns.csr import CSR
from gossamer.patterns.dense import Causal, Dense
from gossamer.patterns.dilated import Dilated, PowerStrided, Strided
from gossamer.patterns.dilated_segments import DilatedSegment, LongNet
from gossamer.patterns.document import Document
from gossamer.patterns.neighborhood import Neighborhood
from gossamer.patterns.predicate import Predicate
from gossamer.patterns.tree import Tree
from gossamer.patterns.window import Local, Longformer, SlidingWindow

__all__ = [
    "CSR",
    "BigBird",
    "BlockMask",
    "Causal",
    "Dense",
    "Dilated",
    "DilatedSegment",
    "Document",
    "Local",
    "LongNet",
    "Longformer",
    "Neighborhood",
    "Pattern",
    "PerBatch",
    "PerHead",
    "PowerStrided",
    "Predicate",
    "SlidingWindow",
    "Strided",
    "Tree",
]
