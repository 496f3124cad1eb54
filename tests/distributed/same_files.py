"""A checkpoint of an offloaded run is the one that the same run without offload writes: either resumes from either.

Each case trains the same model with and without offload, saves both, compares what the files say about themselves, and
then lets each side resume from the files of the other.
"""

import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torch_get
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torch_set

from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from tests.distributed import models
from tests.distributed.launch import agree
from tests.distributed.test_sharded_checkpoints import TINY, MakeOptimizer, adamw, compared, new_run, train
from tests.parity import Run

# Saving and loading, by whoever --------------------------------------------------------------------------------------


def state_of(run: Run, *, flat: bool, for_load: bool = False) -> dict[str, Any]:
    """What goes into a checkpoint: through our functions if the run is offloaded, through torch's if it is not."""
    if run.is_offloaded:
        optimizer = get_optimizer_state_dict(
            run.model, run.optimizer, for_load=for_load, flatten_optimizer_state_dict=flat
        )
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        optimizer = torch_get(run.model, run.optimizer, options=options)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer}


def save(run: Run, folder: Path, *, flat: bool) -> None:
    dcp.save(state_of(run, flat=flat), checkpoint_id=folder)


def load(run: Run, folder: Path, *, flat: bool) -> None:
    """Into a fresh process, as far as the run is concerned."""
    state = state_of(run, flat=flat, for_load=True)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(run.model, state["model"])
    if run.is_offloaded:
        set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        torch_set(run.model, run.optimizer, state["optimizer"], options=options)


# What the files say about themselves ---------------------------------------------------------------------------------


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.distcp"))}


def metadata_differences(*folders: Path) -> Iterator[str]:
    """``.metadata``, byte by byte but for what names one save: its path, its id, and whether its memory was pinned."""
    plain, ours = (dcp.FileSystemReader(folder).read_metadata() for folder in folders)
    for metadata in (plain, ours):
        metadata.storage_meta = None
        for entry in metadata.state_dict_metadata.values():
            if isinstance(entry, TensorStorageMetadata):
                entry.properties.pin_memory = False
    wanted, found = plain.state_dict_metadata, ours.state_dict_metadata
    if len(wanted) < 20 or not any("exp_avg_sq" in key for key in wanted):
        yield f"a checkpoint with hardly anything in it: {list(wanted)}"
    if pickle.dumps(plain) != pickle.dumps(ours):
        others = [key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)]
        yield f".metadata has other bytes; it describes otherwise: {others}"


# Cases ---------------------------------------------------------------------------------------------------------------


def either_resumes_from_either(
    folder: Path, shard: models.ShardNet, *, flat: bool, make_optimizer: MakeOptimizer = adamw
) -> Iterator[str]:
    plain, offloaded = (new_run(shard, make_optimizer, policy) for policy in (None, TINY))
    for run, name in ((plain, "plain"), (offloaded, "offloaded")):
        train(run, 0, 3)
        save(run, folder / name, flat=flat)
    yield from agree(metadata_differences(folder / "plain", folder / "offloaded"))
    wanted = digests(folder / "plain")
    if len(wanted) != dist.get_world_size() or digests(folder / "offloaded") != wanted:
        yield "the offloaded run's files have other bytes"
    resumed = {
        "plain from the offloaded run's files": (new_run(shard, make_optimizer, None, seed=1), "offloaded"),
        "offloaded from the plain run's files": (new_run(shard, make_optimizer, TINY, seed=1), "plain"),
        "offloaded from its own files": (new_run(shard, make_optimizer, TINY, seed=1), "offloaded"),
    }
    for what, (run, name) in resumed.items():
        load(run, folder / name, flat=flat)
        save(run, folder / what, flat=flat)
        if digests(folder / what) != wanted:
            yield f"{what}: saved again, the same state has other bytes"
    never_stopped = plain
    for last in (3, 6):
        train(never_stopped, 3, last)
        for what, (run, _) in resumed.items():
            train(run, 3, last)
            yield from compared(never_stopped, run, f"{what}, after {last} steps")
