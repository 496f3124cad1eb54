"""Split state dicts through torch's own writers and converters: the parts are in what they write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpoint_tools import preset, split_state_dict
from checkpoint_tools.look import verify
from checkpoint_tools.stored.reading import open_checkpoint
from fsdp_offload.checkpoint import check_storage_writer

GATE_UP, GATE, UP = (f"mlp.{name}_proj.weight" for name in ("gate_up", "gate", "up"))
RULES = preset("hf-gate-up")


@pytest.fixture
def one(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"gate_up_proj": nn.Linear(4, 12, bias=False), "down_proj": nn.Linear(6, 4)})


def trained(device_mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    if device_mesh is not None:
        fully_shard(model, mesh=device_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for param in model.parameters():
        param.grad = torch.ones_like(param) * param
    optimizer.step()
    return model, optimizer


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_sound(folder: Path) -> None:
    problems, _ = verify.check_structure(open_checkpoint(folder))
    assert not problems


@pytest.mark.parametrize("is_flattened", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("single_file_per_rank", [False, True])
def test_file_system_writer(single_file_per_rank: bool, is_flattened: bool, one: DeviceMesh, tmp_path: Path) -> None:
    model, optimizer = trained(one)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flattened)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    parts, part_optim = split_state_dict(model_state, optim_state, RULES)
    writer = dcp.FileSystemWriter(tmp_path / "c", single_file_per_rank=single_file_per_rank)
    dcp.save({"model": parts, "optim": part_optim}, storage_writer=writer)
    assert_sound(tmp_path / "c")
    assert (len(list((tmp_path / "c").glob("*.distcp"))) == 1) == single_file_per_rank
    moment = f"state.{UP}.exp_avg"
    loaded: dict[str, Any] = {"model": {GATE: torch.zeros(6, 4), UP: torch.zeros(6, 4)}}
    loaded["optim"] = {moment: torch.zeros(6, 4)} if is_flattened else {"state": {UP: {"exp_avg": torch.zeros(6, 4)}}}
    dcp.load(loaded, checkpoint_id=tmp_path / "c")
    fused = whole(model_state[GATE_UP])
    assert torch.equal(torch.cat([loaded["model"][GATE], loaded["model"][UP]]), fused)
    state = optim_state[f"state.{GATE_UP}.exp_avg"] if is_flattened else optim_state["state"][GATE_UP]["exp_avg"]
    found = loaded["optim"][moment] if is_flattened else loaded["optim"]["state"][UP]["exp_avg"]
    assert torch.equal(found, whole(state)[6:])


def test_async_save(one: DeviceMesh, tmp_path: Path) -> None:
    """The staged copy has the parts as they were when the save began."""
    model, optimizer = trained(one)
    model_state, optim_state = get_state_dict(model, optimizer)
    before = whole(model_state[GATE_UP]).clone()
    parts, part_optim = split_state_dict(model_state, optim_state, RULES)
    saving = dcp.async_save({"model": parts, "optim": part_optim}, checkpoint_id=tmp_path / "c")
    model_state[GATE_UP].to_local().zero_()
    saving.result()
    assert_sound(tmp_path / "c")
    loaded = {"model": {GATE: torch.zeros(6, 4), UP: torch.zeros(6, 4)}}
    dcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert torch.equal(torch.cat([loaded["model"][GATE], loaded["model"][UP]]), before)


def test_hugging_face_writer_of_shards(one: DeviceMesh, tmp_path: Path) -> None:
    model, _ = trained(one)
    parts, _ = split_state_dict(dict(model.named_parameters()), None, RULES)
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"))
    check_storage_writer(parts, writer)
    dcp.save(parts, storage_writer=writer)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    written = load_file(file)
    assert torch.equal(torch.cat([written[GATE], written[UP]]), whole(model.get_parameter(GATE_UP)))
