"""Exchanges as plain data: fused tensors, their parts, and everything that follows from these."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..core.parts import Comb
from .keys import Path

Shape = tuple[int, ...]


class Fusion(NamedTuple):
    """One fused tensor and its parts, of which one or the other is in the checkpoint.

    Attributes:
        fused: its key.
        parts: their keys, in the order in which they lie in the fused tensor.
        shape: of the fused tensor.
        dtype: of all.
        dim: the fused dimension, not negative.
        combs: where each part lies along it.
        is_flat: it is stored as one dimension of all of its elements.
    """

    fused: str
    parts: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    dim: int
    combs: tuple[Comb, ...]
    is_flat: bool = False


class Exchange(NamedTuple):
    """Fate of each key of a checkpoint; those that are not named here stay.

    Attributes:
        fusions: fused tensors that are split, or parts that are merged.
        copies: key → the keys under which its bytes are in the new checkpoint: several, one or none.
        objects: key → the bytes that are there instead.
        paths: new key → where the value is in the nested state dict, if that is known.
        parameters: how many of the fusions are tensors of a model; the others are state.
        matched: the fused tensors by the names that the rules know them by: of the model, or of state without one.
    """

    fusions: tuple[Fusion, ...]
    copies: Mapping[str, tuple[str, ...]]
    objects: Mapping[str, bytes]
    paths: Mapping[str, Path]
    parameters: int
    matched: tuple[str, ...] = ()
