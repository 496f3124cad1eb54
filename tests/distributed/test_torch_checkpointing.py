"""torch_checkpointing, saved synchronously: plain training loads what an offloaded run saved, and the reverse."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torch_set

from checkpoint_tools.stored.foreign import described
from checkpoint_tools.stored.storage import open_folder
from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from tests.distributed.frameworks import POLICIES, batch, everything
from tests.distributed.launch import spawn_cases
from tests.distributed.models import build, decay_groups, shard_even
from tests.parity import same_bits

pytest.importorskip("torch_checkpointing")
pytestmark = pytest.mark.distributed


class Run:
    """A model and AdamW, offloaded or not."""

    def __init__(self, policy: OffloadPolicy | None) -> None:
        self.net = build(shard_even)
        self.optimizer = torch.optim.AdamW(decay_groups(self.net), lr=0.01)
        self.offloaded = policy is not None
        if policy is not None:
            offload_optimizer(self.optimizer, model=self.net, policy=policy)

    def train(self, steps: range) -> None:
        for step in steps:
            self.net(batch(step, dist.get_rank())).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def items(self, *, for_load: bool = False) -> dict[str, Any]:
        own = functools.partial(get_optimizer_state_dict, for_load=for_load)
        of_optimizer = (own if self.offloaded else torch_get)(self.net, self.optimizer)
        return {"model": get_model_state_dict(self.net), "optimizer": of_optimizer}

    def load(self, manager: Any, folder: Path) -> None:
        loaded = manager.load(str(folder), into=self.items(for_load=True))
        set_model_state_dict(self.net, loaded["model"])
        (set_optimizer_state_dict if self.offloaded else torch_set)(self.net, self.optimizer, loaded["optimizer"])

    def left(self) -> list[torch.Tensor]:
        return everything(self.net, [self.optimizer])


def saved_and_loaded(folder: Path, policy: str) -> Iterator[str]:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    unaligned = LocalFileSystemStorageConfig(use_direct_io=False)  # it writes as torch.save does, which ext4 refuses
    manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=unaligned).build()
    plain, moved = Run(None), Run(POLICIES[policy])
    for name, run in (("plain", plain), ("offloaded", moved)):
        run.train(range(3))
        manager.save(str(folder / name), run.items())
        run.train(range(3, 6))
    dist.barrier()
    for name, policy_of in (("offloaded", None), ("plain", POLICIES[policy])):
        resumed = Run(policy_of)
        resumed.load(manager, folder / name)
        resumed.train(range(3, 6))
        if not all(map(same_bits, plain.left(), resumed.left())):
            yield f"resumed from {name}: other tensors"
    if not all(map(same_bits, plain.left(), moved.left())):
        yield "the save changed the training"
    manager.close()
    if "as torch_checkpointing writes them" not in str(described(open_folder(str(folder / "plain")))):
        yield "the tools take its folder for another's"


def test_what_is_saved_loads_either_way(tmp_path: Path) -> None:
    spawn_cases({name: functools.partial(saved_and_loaded, tmp_path / name, name) for name in POLICIES}, 2, tmp_path)
