"""Checked loads in one process: what all of their tests need."""

import itertools
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_offload.checkpoint import ShardTensor, chunks_of, with_chunks
from fsdp_offload.checkpoint.chunks import ShardChunks
from fsdp_offload.checkpoint.planners import load
from fsdp_offload.fsdp.dtensor import local_shard

WHOLE = torch.arange(24.0).view(6, 4)


def refused(
    loaded: dict[str, Any], checkpoint: Path | str | None, match: str, on: Collection[int] = (0,), **kwargs: Any
) -> str:
    """The text of the error of these ranks with which a load fails in planning; it has changed nothing on this one.

    ``.`` matches newlines.
    """
    if checkpoint is not None:
        kwargs["checkpoint_id"] = checkpoint
    tensors = dict(tensors_of(loaded))
    before = {key: (memory_of(t), memory_of(t).clone(), memory_of(t)._version) for key, t in tensors.items()}
    others = repr(without_tensors(loaded))
    with pytest.raises((ValueError, OSError, RuntimeError)) as caught:
        load(loaded, **kwargs)
    hidden = caught.value.__context__
    assert isinstance(hidden, CheckpointException)
    assert hidden.args[0] == "plan"
    assert hidden.failures.keys() == {*on}
    texts = [str(cause) for cause, _ in hidden.failures.values()]
    assert all(re.search(match, text, re.DOTALL) for text in texts), texts
    assert all(text in str(caught.value) or "No such file" in text for text in texts)
    assert str(caught.value).startswith(f"load: {checkpoint or ''}")
    after = dict(tensors_of(loaded))
    assert after.keys() == before.keys()
    for key, (memory, content, version) in before.items():
        assert after[key] is tensors[key], key
        assert memory_of(after[key]) is memory, key
        assert memory.is_meta or torch.equal(memory, content), key
        assert memory._version == version, f"{key} was written to"
    assert repr(without_tensors(loaded)) == others
    return texts[0]


def tensors_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix.removesuffix("."), value
    elif isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_of(item, f"{prefix}{key}.")


def without_tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: without_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_tensors(item) for item in value]
    return "tensor" if isinstance(value, Tensor) else value


def memory_of(tensor: Tensor) -> Tensor:
    local = local_shard(tensor)
    return local.local if isinstance(local, ShardTensor) else local


def sharded(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, [Shard(0)])


def ragged(whole: Tensor, mesh: DeviceMesh, *inner_bounds: int) -> Tensor:
    """All of ``whole``, in one flat buffer whose parts have chunks of their own."""
    bounds = [0, *inner_bounds, whole.numel()]
    chunks = []
    for begin, end in itertools.pairwise(bounds):
        part = chunks_of(tuple(whole.shape), (begin, end)).chunks
        chunks += [chunk._replace(local_start=begin + chunk.local_start) for chunk in part]
    carried = ShardChunks(tuple(whole.shape), (whole.numel(),), tuple(chunks))
    return with_chunks(sharded(whole, mesh), whole.flatten().clone(), carried)


def edit_metadata(folder: Path, edit: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
