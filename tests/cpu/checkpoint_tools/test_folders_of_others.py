"""Folders of other tools are named, with the subfolder or the command that works; no optimizer is left behind."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.checkpoint_tools import tool
from tests.checkpoint_tools.saves import Opaque, save

WEIGHTS = {"wte.weight": torch.arange(12.0).view(3, 4), "out.bias": torch.ones(5)}
ADAM = {
    "state": {0: {"exp_avg": torch.ones(3, 4)}, 1: {"exp_avg": torch.ones(5)}},
    "param_groups": [{"params": [0, 1]}],
}


def put(folder: Path, *names: str, content: Any = ADAM) -> None:
    """Files of torch.save, or of safetensors, with the folders that they are in."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            save_file(WEIGHTS, path)
            continue
        if path.name == ".metadata":
            save(path.parent, {"model": WEIGHTS})
            continue
        with path.open("wb") as stream:
            torch.save(WEIGHTS if name.rpartition("/")[2].startswith("model_world") else content, stream)


VERL = [f"{what}_world_size_3_rank_{rank}.pt" for what in ("model", "optim", "extra_state") for rank in range(3)]
DEEPSPEED = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"]
ACCELERATE = [f"checkpoint_5/{name}/.metadata" for name in ("pytorch_model_fsdp_0", "optimizer_0")]
ACCELERATE += ["checkpoint_5/scheduler.bin", "checkpoint_5/random_states_0.pkl"]
CONVERT = "checkpoint-tools convert {} DST makes a checkpoint of DCP of it, with the optimizer's state"
ONE_OF = "give one of its subfolders:"

FOLDERS: dict[str, tuple[list[str], list[str]]] = {  # files, and what is said
    "verl, a step": (
        [f"actor/{name}" for name in VERL] + ["data.pt"],
        ["{}/actor has a file for each rank, as verl and SkyRL write them", CONVERT.format("{}/actor")],
    ),
    "DeepSpeed": (
        [*(f"global_step70/{name}" for name in DEEPSPEED), "latest", "zero_to_fp32.py"],
        ["is DeepSpeed's", "python {}/zero_to_fp32.py {} DST --safe_serialization", "not the optimizer's state"],
    ),
    "DeepSpeed, a step": (
        [f"70/{name}" for name in DEEPSPEED],
        ["is DeepSpeed's", "zero_to_fp32.py, in the folder above"],
    ),
    "DeepSpeed, universal": (
        ["zero/wte.weight/fp32.pt", "zero/wte.weight/exp_avg.pt", "mp_rank_00_model_states.pt"],
        ["is DeepSpeed's universal checkpoint", "load_universal"],
    ),
    "torch_checkpointing": (
        [f"{item}_{rank}.pt" for item in ("model", "optimizer") for rank in range(2)],
        [
            "{} has a file for each item and rank, as torch_checkpointing writes them",
            "CheckpointManager alone loads it",
        ],
    ),
    "torchtune": (["recipe_state.pt"], ["torchtune", "checkpoint-tools convert {}/recipe_state.pt DST"]),
    "torchtune, a run": (
        [*(f"epoch_{number}/model.safetensors" for number in (0, 10, 9)), "recipe_state/recipe_state.pt"],
        [f"{ONE_OF} epoch_0, epoch_9, epoch_10"],
    ),
    "Trainer, a run": (
        ["checkpoint-20/model.safetensors", "checkpoint-3/model.safetensors", "runs/events"],
        [f"{ONE_OF} checkpoint-3, checkpoint-20"],
    ),
    "accelerate": (ACCELERATE, [f"{ONE_OF} optimizer_0, pytorch_model_fsdp_0"]),
    "accelerate, two levels up": (
        ACCELERATE,
        [f"{ONE_OF} checkpoint_5/optimizer_0, checkpoint_5/pytorch_model_fsdp_0"],
    ),
    "a save that did not end, whatever is below it": ([*ACCELERATE, "__0_0.distcp"], ["or its save did not end"]),
    "files of torch.save": (
        ["pytorch_model.bin", "scheduler.pt"],
        ["checkpoint-tools convert {}/pytorch_model.bin DST"],
    ),
    "one of them": (["step.pth"], ["is one file of torch.save", "checkpoint-tools convert {}/step.pth DST"]),
}
GIVEN = {"DeepSpeed, a step": "/70", "accelerate": "/checkpoint_5", "one of them": "/step.pth"}
"""Paths within the folder that are given in its place."""


@pytest.mark.parametrize("case", FOLDERS)
def test_it_is_named_with_what_works(case: str, tmp_path: Path) -> None:
    files, said = FOLDERS[case]
    put(tmp_path / "own", *files)
    for command in (
        ("inspect",),
        ("verify",),
        ("split", tmp_path / "new"),
        ("diff", tmp_path / "own"),
        ("convert", tmp_path / "new"),
    ):
        if case == "one of them" and command[0] == "convert":
            continue  # that works
        source = f"{tmp_path}/own{GIVEN.get(case, '')}"
        ran = tool.run(command[0], source, *command[1:])
        tool.assert_one_line(ran, *(each.replace("{}", f"{tmp_path}/own") for each in said))
    assert tool.names(tmp_path) == ["own"]
    for number, command in enumerate(re.findall(r"checkpoint-tools convert (\S+) DST", ran.stderr)):
        tool.made("convert", command, tmp_path / f"{number}")
    for names in re.findall(r"give one of its subfolders: (.*?)(?:\.|$)", ran.stderr):
        assert all(tool.shown("inspect", f"{source}/{name}") for name in names.split(", "))


@pytest.mark.parametrize(
    ("state_file", "to", "works"),
    [
        ("optimizer.pt", None, "checkpoint-tools convert {}/optimizer.pt DST"),
        ("optimizer.bin", "torch", "checkpoint-tools convert {}/optimizer.bin DST"),
        ("recipe_state/recipe_state.pt", None, "checkpoint-tools convert {}/recipe_state/recipe_state.pt DST"),
        ("optimizer_0/.metadata", None, "{}/optimizer_0 is a checkpoint of its own"),
        ("global_step40/mp_rank_00_model_states.pt", "torch", "zero_to_fp32.py, in the folder above it, writes"),
    ],
)
def test_weights_are_not_converted_without_their_optimizer(
    tmp_path: Path, state_file: str, to: str | None, works: str
) -> None:
    """Leave out the state of Trainer, accelerate, torchtune, DeepSpeed only on request; inspect says where it is."""
    put(tmp_path / "step", "model.safetensors", "trainer_state.json")
    put(tmp_path / "step", state_file, content=ADAM)
    name = state_file.partition("/")[0] + "/" * ("/" in state_file)
    command = ["convert", tmp_path / "step", tmp_path / "new", *(["--to", to] if to else [])]
    assert f"note: {name} has the optimizer's state" in tool.shown("inspect", tmp_path / "step")
    works = works.replace("{}", f"{tmp_path}/step")
    tool.assert_one_line(tool.run(*command), f"{name} has the optimizer's state, ", works, f"--exclude {name}")
    assert not (tmp_path / "new").exists()
    tool.shown(*command, "--exclude", name)
    assert (tmp_path / "new").exists()
    if works.startswith("checkpoint-tools"):  # the other command that is named
        tool.shown(*works.split()[1:-1], tmp_path / "state")
        assert tool.values_of(tmp_path / "state")["state.0.exp_avg"].sum() == 12
    # A checkpoint that has state of its own is no such half.
    whole = save(tmp_path / "whole", {"model": WEIGHTS, "optim": {"state": {"out.bias": {"exp_avg": torch.ones(5)}}}})
    shutil.copytree(tmp_path / "step", whole, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    tool.shown("convert", whole, tmp_path / "both")


def test_one_ranks_file_is_a_part(tmp_path: Path, mesh: DeviceMesh) -> None:
    def of_ranks(local: Tensor, ranks: int) -> DTensor:
        shape = (len(local) * ranks, *local.shape[1:])
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=local.stride()
        )

    torch.save({"w": of_ranks(torch.ones(2, 3), 4), "n": 1}, tmp_path / "model_world_size_4_rank_1.pt")
    works = CONVERT.format(tmp_path)
    ran = tool.run("convert", tmp_path / "model_world_size_4_rank_1.pt", tmp_path / "new")
    tool.assert_one_line(ran, "has a part of w, as one rank of several has it", works)
    tool.assert_one_line(tool.run("inspect", tmp_path / "model_world_size_4_rank_1.pt"), works)
    torch.save({"w": of_ranks(torch.ones(2, 3), 1)}, tmp_path / "whole.pt")
    tool.shown("convert", tmp_path / "whole.pt", tmp_path / "new")
    assert tool.values_of(tmp_path / "new")["w"].equal(torch.ones(2, 3))


def test_to_torch_names_the_key_that_it_refuses(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"a": torch.ones(2), "rng": {"x": {"numpy": Opaque()}}, "fine": (1, 2)})
    told = ("rng.x.numpy: ", "has more than tensors and plain values", "leave it out with --exclude")
    tool.assert_one_line(tool.run("convert", source, tmp_path / "new.pt", "--to", "torch"), *told)
    tool.shown("convert", source, tmp_path / "new.pt", "--to", "torch", "--exclude", "rng.x.numpy")
