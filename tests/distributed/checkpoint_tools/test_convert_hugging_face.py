"""Between the real libraries: transformers, safetensors, torch's HuggingFaceStorageWriter, optimizers."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers as hf
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.look.diff import all_keys, diff
from checkpoint_tools.look.inspect import as_json, summarize
from checkpoint_tools.look.verify import check_structure
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import FUSED, save
from tests.checkpoint_tools.offline import converted, values_of
from tests.cpu.checkpoint_tools.test_formats_transformers import SMALL
from tests.distributed.launch import mesh, spawn

# transformers --------------------------------------------------------------------------------------------------------


def test_what_transformers_has_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, attn_implementation="eager")).eval()
    for size in ("20KB", "1GB"):  # with an index, and one file without
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        converted(tmp_path / size, tmp_path / f"made-{size}", key_prefix="model.")
        loaded: dict[str, Any] = {"model": {key: torch.zeros_like(t) for key, t in model.state_dict().items()}}
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            dcp.load(loaded, checkpoint_id=tmp_path / f"made-{size}", no_dist=True)
        assert all(torch.equal(loaded["model"][key], value) for key, value in model.state_dict().items())


# torch's own writer --------------------------------------------------------------------------------------------------


def save_sharded(rank: int, world_size: int, tmp_path: Path) -> None:
    device_mesh = mesh(world_size)
    for name, dim in (("rows", 0), ("columns", 1)):
        state = {"fused": distribute_tensor(FUSED.clone(), device_mesh, [Shard(dim)]), "all": torch.ones(3)}
        state["tiny"] = distribute_tensor(torch.arange(4.0).view(2, 2), device_mesh, [Shard(0)])
        writer = HuggingFaceStorageWriter(str(tmp_path / name), save_distributed=True)
        dcp.save(state, storage_writer=writer)
    whole = HuggingFaceStorageWriter(str(tmp_path / "whole"), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=whole)
    dist.barrier()


@pytest.mark.distributed
def test_parts_of_tensors_as_ranks_have_written_them(tmp_path: Path) -> None:
    """An empty part tells where a tensor ends; what nobody can know is noted."""
    spawn(save_sharded, 3, tmp_path, tmp_path)
    for name in ("rows", "columns"):
        made = converted(tmp_path / name, tmp_path / f"{name}-made", max_memory_bytes=128)
        assert len(made.tensors["fused"].chunks) == 3
        assert torch.equal(values_of(made)["fused"], FUSED)
    whole = converted(tmp_path / "whole", tmp_path / "whole-made", key_prefix="")
    assert diff(made, whole, all_keys(made, whole)) == []
    # The first rank's file is missing: of the columns' tensor, it had the beginning.
    (tmp_path / "columns" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"fused: 14 of 42 elements are in no chunk"):
        converted(tmp_path / "columns", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "rows" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path / "rows")
    problems, files = check_structure(checkpoint)
    assert ("tiny", "2 of 4 elements are in no chunk") in problems
    missing = "there is no shard-00002-*.safetensors: nothing was to be written there, or it is missing"
    assert files.notes[1:] == (missing,)
    assert as_json(summarize(checkpoint))["notes"] == list(files.notes)
    state, mapping = {"a": torch.ones(2), "b": torch.ones(3)}, {"a": 1, "b": 3, "other": 5}
    writer = HuggingFaceStorageWriter(str(tmp_path / "mapped"), mapping, save_distributed=True)
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(state, storage_writer=writer, no_dist=True)
    notes = check_structure(open_checkpoint(tmp_path / "mapped"))[1].notes
    assert notes[1].startswith("there is no *-model-00002-of-*.safetensors and 2 more like it: nothing was to be")


def test_the_index_is_that_of_hugging_face_and_elements_are_aligned(tmp_path: Path) -> None:
    model = {"a": torch.ones(4), "b": torch.zeros(2, dtype=torch.int64), "c": torch.ones(5, dtype=torch.bool)}
    source = save(tmp_path / "source", {"model": model, "odd": torch.ones(1).bfloat16()})
    made = converted(source, tmp_path / "made", shard_bytes=21)
    for tensor in made.tensors.values():
        assert tensor.chunks[0].offset_bytes % tensor.dtype.itemsize == 0
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    assert index == {
        "metadata": {"total_size": 37, "key_prefix": "model."},
        "weight_map": {"a": first, "b": second, "c": second},
    }
    assert load_file(tmp_path / "made" / second)["b"].tolist() == [0, 0]
    shutil.rmtree(source)
    assert open_checkpoint(converted(tmp_path / "made", tmp_path / "back").path).version == "1.0.0"
