"""Checked loads on two ranks: what one of them refuses changes nothing on any, and nobody waits in vain."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_offload.checkpoint import LoadPlanner, load
from tests.distributed.launch import mesh, spawn_cases, this_device
from tests.loading import edit_metadata, refused

pytestmark = pytest.mark.distributed

WHOLE = torch.arange(20.0).view(5, 4)


def hole(folder: Path) -> list[str]:
    dcp.save({"whole": sharded(WHOLE), "other": sharded(WHOLE)}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        edit_metadata(folder, lambda metadata: metadata.state_dict_metadata["whole"].chunks.pop(1))
    dist.barrier()
    loaded = {"whole": sharded(WHOLE * 0), "other": sharded(WHOLE * 0)}
    refused(loaded, folder, r"whole \(0 of the 8 elements", on={1})
    return []


def lost_file(folder: Path, lose: Callable[[Path], None]) -> list[str]:
    """The second rank's part is in a file of its own."""
    dcp.save({"whole": sharded(WHOLE)}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        lose(folder / "__1_0.distcp")
    dist.barrier()
    refused({"whole": sharded(WHOLE * 0)}, folder, r"__1_0\.distcp", on={1})
    return []


def own_keys(folder: Path) -> Iterator[str]:
    """As pipeline stages: what the other requests is not extra, also without a wrapper, and what neither does is."""
    key = f"layer{dist.get_rank()}"
    own = WHOLE + dist.get_rank()
    dcp.save({"model": {f"{key}._orig_mod.up": own, key: own, "shared": WHOLE}}, checkpoint_id=folder)
    loaded = {"model": {f"{key}.up": torch.zeros(5, 4), key: torch.zeros(5, 4), "shared": torch.zeros(5, 4)}}
    load(loaded, checkpoint_id=folder)
    if not all(torch.equal(value, own) for name, value in loaded["model"].items() if name != "shared"):
        yield f"{loaded}"
    del loaded["model"]["shared"]
    refused(loaded, folder, r"1 in the checkpoint, but not requested: model\.shared")
    load(loaded, checkpoint_id=folder, planner=LoadPlanner(allow_extra=["*.shared"]))


def interleaved_rows(folder: Path) -> list[str]:
    """DCP takes them for one rectangle of as many rows; with chunks they load (``test_ragged_checkpoints.py``)."""
    dcp.save({"whole": WHOLE}, checkpoint_id=folder)
    rows = _StridedShard(0, split_factor=2)
    local = rows._split_tensor(WHOLE * 0, 2, with_padding=False)[0][dist.get_rank()].clone().to(this_device())
    of_rows = DTensor.from_local(local, mesh(2), [rows], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())
    refused({"whole": of_rows}, folder, "1 that DCP cannot load into correctly: whole", on={0, 1})
    return []


CASES: dict[str, Callable[[Path], Iterable[str]]] = {
    "a hole on one rank": hole,
    "a file that one rank needs is gone": partial(lost_file, lose=os.remove),
    "a file that one rank needs is cut short": partial(lost_file, lose=partial(os.truncate, length=100)),
    "every rank its own keys": own_keys,
    "interleaved rows": interleaved_rows,
}


def test_checked_loads(tmp_path: Path):
    spawn_cases({name: partial(case, tmp_path / name) for name, case in CASES.items()}, 2, tmp_path)


def sharded(whole: Tensor) -> DTensor:
    return distribute_tensor(whole.clone().to(this_device()), mesh(2), [Shard(0)], src_data_rank=None)
