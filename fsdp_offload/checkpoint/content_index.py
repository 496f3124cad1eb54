"""An index for DCP's plans that knows its chunk's content, so that a plain ``dcp.save`` finds experts that collide.

::

    rank: WriteItem(ContentIndex) ──DCP's gather──▶ DCP drops replicas, which compares indices
                                                       same content:  replicas, as always
                                                       another:       an error on all ranks, before the write
          plain MetadataIndex     ◀──DCP's scatter── DCP numbers the chunks, which makes new indices

DCP takes equal indices on two ranks for replicas of one chunk. Local experts have the same names on every rank, and so
would be. DTensors that carry chunks know their content where their mesh is not all ranks; plain tensors do not. Only
what tells different experts apart is compared, some elements of each chunk: a save is not to read all of the state
twice. :class:`~fsdp_offload.checkpoint.SavePlanner` compares all of it.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

_SAMPLED = 1024
"""Elements of a chunk that are compared, as far from each other as they can be."""


class ContentIndex(MetadataIndex):
    """A ``MetadataIndex`` that refuses to equal one of the same place with different content.

    What DCP makes of it, with ``dataclasses.replace``, is a plain ``MetadataIndex``: nothing of it gets into a file.
    """

    content: bytes

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102  # see the class
        return MetadataIndex(*args, **kwargs)

    @staticmethod
    def of(fqn: str, offset: Sequence[int], chunk: Tensor) -> "ContentIndex":
        """The index of ``chunk``, which is copied from wherever it is."""
        flat = chunk.detach().reshape(-1)
        sampled = flat[:: -(-flat.numel() // _SAMPLED)] if flat.numel() else flat
        known = hashlib.blake2b(repr((tuple(chunk.shape), chunk.dtype)).encode(), digest_size=16)
        known.update(sampled.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return _make(fqn, tuple(offset), known.digest())

    def __eq__(self, other: object) -> bool:
        """Return whether it is of the same place.

        Raises:
            ValueError: it is, and the content is different.
        """
        if not isinstance(other, MetadataIndex) or (self.fqn, self.offset) != (other.fqn, other.offset):
            return False
        if isinstance(other, ContentIndex) and self.content != other.content:
            raise ValueError(
                f"nothing has been written: two ranks would save different values under {self.fqn} at {self.offset}, "
                "and only those of one would be kept. Give them names of their own on each rank; experts have local "
                "numbers: renumber model and optimizer state with fsdp_offload.checkpoint.Experts. "
                "fsdp_offload.checkpoint.save lists all such keys"
            )
        return True

    __hash__ = MetadataIndex.__hash__

    def __reduce__(self) -> Any:
        return _make, (self.fqn, self.offset, self.content)


def _make(fqn: str, offset: Sequence[int], content: bytes) -> ContentIndex:
    made: ContentIndex = object.__new__(ContentIndex)
    MetadataIndex.__init__(made, fqn, offset)
    object.__setattr__(made, "content", content)
    return made
