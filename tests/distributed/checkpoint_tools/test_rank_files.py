"""Files that each rank of FSDP wrote with ``torch.save``, as verl and SkyRL do, become a checkpoint with all state."""

import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.checkpoint_tools.saves import Opaque, Trap, edit_file, flip_bit, same_bits
from tests.checkpoint_tools.tool import assert_one_line, made, names, run, shown, values_of, with_names
from tests.distributed.launch import spawn

pytestmark = [pytest.mark.distributed, pytest.mark.gloo]

KINDS = {  # ranks, and how the model is wrapped
    "FSDP2": (2, {}),
    "FSDP2, replicated": (4, {"replicas": 2}),
    "FSDP1": (2, {"is_first": True}),
    "FSDP1, replicated": (4, {"is_first": True, "replicas": 2}),
    "FSDP1, without a mesh": (2, {"is_first": True, "has_mesh": False}),
    "FSDP1, use_orig_params": (2, {"is_first": True, "use_orig_params": True}),
    "FSDP2, a tied weight": (2, {"is_tied": True}),
    "FSDP1, a tied weight": (2, {"is_first": True, "is_tied": True}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.norm(x))


class Model(nn.Module):
    """Of sizes that no two ranks share evenly, with a scalar and a buffer; ``head`` is another name of ``embed``."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.register_buffer("seen", torch.arange(3))
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def write(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    is_first: bool = False,
    replicas: int = 1,
    has_mesh: bool = True,
    use_orig_params: bool = False,
    frozen: str = "",
    is_tied: bool = False,
) -> None:
    """As verl's ``FSDPCheckpointManager`` writes them; and what torch gathers, for the test."""
    warnings.simplefilter("ignore")  # of FSDP1, that it is old
    torch.manual_seed(0)
    model: Any = Model(is_tied=is_tied)
    for name, param in model.named_parameters():
        param.requires_grad_(not re.search(frozen, name) if frozen else True)
    shape, dims = ((replicas, world_size // replicas), ("ddp", "fsdp")) if replicas > 1 else ((world_size,), ("fsdp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    if is_first:
        options: dict[str, Any] = {"device_mesh": mesh} if has_mesh else {}
        if replicas > 1:
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        device = torch.device("cpu")
        options |= {"use_orig_params": use_orig_params, "auto_wrap_policy": ModuleWrapPolicy({Block})}
        model = FullyShardedDataParallel(model, device_id=device, **options)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    else:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for step in range(3):
        model(torch.tensor([[rank % shape[-1], step, 6]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    end = f"world_size_{world_size}_rank_{rank}.pt"
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / f"model_{end}")
    torch.save(optimizer.state_dict(), folder / f"optim_{end}")
    torch.save({"lr_scheduler": {"last_epoch": 3}, "rng": rank}, folder / f"extra_state_{end}")
    full = StateDictOptions(full_state_dict=True)
    state, optim = get_state_dict(model, optimizer, options=full)
    if rank == 0:
        (folder / "huggingface").mkdir()
        (folder / "huggingface" / "config.json").write_text("{}")
        torch.save({"model": state, "optimizer": optim}, folder.with_suffix(".expected"))
    dist.barrier()


Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder of a kind."""
    root = tmp_path_factory.mktemp("ranks")

    def folder_of(kind: str) -> Path:
        if not (root / f"{kind}.expected").exists():
            world_size, options = KINDS[kind]
            spawn(_write, world_size, root, root / kind, options)
        return root / kind

    return folder_of


def _write(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> None:
    write(rank, world_size, folder, **options)


def assert_is(folder: Path, expected: dict[str, Any]) -> None:
    """Plain DCP reads what torch has gathered, under its names: every tensor, counter and option."""
    found = values_of(folder)
    wanted = {f"model.{name}": value for name, value in expected["model"].items()}
    for name, entries in expected["optimizer"]["state"].items():
        wanted.update({f"optimizer.state.{name}.{entry}": value for entry, value in entries.items()})
    groups = expected["optimizer"]["param_groups"]
    for number, group in enumerate(groups):
        listed = found.pop(f"optimizer.param_groups.{number}.params")
        assert sorted(listed) == sorted(group["params"])
        wanted.update({f"optimizer.param_groups.{number}.{k}": v for k, v in group.items() if k != "params"})
    assert found.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not same_bits(value, found[key])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_plain_dcp_reads_what_torch_gathers(kind: str, written: Written, tmp_path: Path) -> None:
    folder = written(kind)
    expected = torch.load(folder.with_suffix(".expected"))
    assert_is(made("convert", folder, tmp_path / "dcp"), expected)
    assert (tmp_path / "dcp" / f"extra_state_world_size_{KINDS[kind][0]}_rank_1.pt").exists()
    # Safetensors at once, and back: what it was.
    made("convert", folder, tmp_path / "safetensors", "--to", "safetensors")
    assert (tmp_path / "safetensors" / "config.json").read_text() == "{}"
    made("convert", tmp_path / "safetensors", tmp_path / "back")
    assert_is(tmp_path / "back", expected)
    assert shown("verify", folder, "--data").startswith(f"{folder}: whole")
    assert "the same: " in shown("diff", folder, tmp_path / "back")
    assert f"model.{next(iter(expected['model']))}" in shown("inspect", folder)


def test_other_commands_say_what_works(written: Written, tmp_path: Path) -> None:
    folder = written("FSDP2")
    works = f"{folder} has a file for each rank, as verl and SkyRL write them: checkpoint-tools convert {folder} DST"
    assert_one_line(run("split", folder, tmp_path / "new", "--preset", "hf-qkv"), works)
    assert_one_line(run("convert", folder / "model_world_size_2_rank_0.pt", tmp_path / "new"), works)
    assert_one_line(run("convert", folder, tmp_path / "new", "--key-prefix", "x."), "--key-prefix is not for files of")
    assert_one_line(run("seal", folder), works)


# What lies, lacks or traps --------------------------------------------------------------------------------------------


def edited(path: Path, edit: Callable[[bytes], bytes]) -> None:
    """Edit the pickle of a file of torch.save, with the checksum that fits."""
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in records.items():
            new.writestr(name, edit(content) if name.endswith("data.pkl") else content)


def _replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def edit(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new)

    return edit


SHAPE = b"K\x07K\x06"  # of embed: 7 × 6
MODEL, OPTIM = "model_world_size_2_rank_{}.pt", "optim_world_size_2_rank_{}.pt"


def _share(folder: Path) -> None:
    for rank in range(2):
        edited(folder / MODEL.format(rank), _replace(SHAPE, b"K\x09K\x06"))


def _give_again(folder: Path) -> None:
    shutil.copy(folder / MODEL.format(0), folder / MODEL.format(1))


def _edit(edit: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: edit_file(folder / OPTIM.format(1), edit)


def _save(value: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda folder: torch.save(value(folder), folder / OPTIM.format(1))


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {  # kind, what is done to the folder, what is said
    "a rank is missing": ("FSDP2", lambda f: (f / MODEL.format(1)).unlink(), "has no model_world_size_2_rank_1.pt"),
    "its state is": ("FSDP2", lambda f: (f / OPTIM.format(0)).unlink(), "has no optim_world_size_2_rank_0.pt; every"),
    "the rest is": ("FSDP2", lambda f: (f / "extra_state_world_size_2_rank_1.pt").unlink(), "rank_1.pt; every rank's"),
    "two saves": ("FSDP2", lambda f: shutil.copy(f / MODEL.format(1), f / "model_world_size_3_rank_1.pt"), "[2, 3]"),
    "one rank's file twice": ("FSDP2", _give_again, "its mesh does not have rank 1 at (0,)"),
    "one shard twice": ("FSDP1, without a mesh", _give_again, "it is of rank 0, and not of 1"),
    "another shape": ("FSDP2", _share, "a part is torch.float32 of (4, 6), and torch.float32 of (5, 6) is expected"),
    "another shape on one rank": (
        "FSDP1, without a mesh",
        lambda f: edited(f / MODEL.format(1), _replace(SHAPE, b"K\x09K\x06")),
        "model.embed.weight differs between ranks 0 and 1",
    ),
    "rows in no file": (
        "FSDP1, without a mesh",
        lambda f: [_share(f), *((f / OPTIM.format(rank)).unlink() for rank in range(2))],
        "model.embed.weight: 12 of 54 elements are in no chunk",
    ),
    "a placement": (
        "FSDP2",
        lambda f: edited(f / MODEL.format(0), _replace(b"types\nShard\n", b"types\nPartial\n")),
        "placed as Partial",
    ),
    "another count": (
        "FSDP2",
        _edit(lambda state: state["state"][0]["step"].add_(1)),
        "optimizer.state.embed.weight.step differs between ranks 0 and 1",
    ),
    "other options": (
        "FSDP2",
        _edit(lambda state: state["param_groups"][0].update(lr=0.5)),
        "optimizer.param_groups.0.lr differs between ranks 0 and 1",
    ),
    "a flipped bit": ("FSDP1", lambda f: flip_bit(f / OPTIM.format(1)), "optim_world_size_2_rank_1.pt cannot be"),
    "something to run": ("FSDP2", _save(lambda f: {"state": {0: {"step": Trap(f / "ran")}}}), "asks for posix.system"),
    "a class": ("FSDP2", _save(lambda _: {"state": {}, "param_groups": [Opaque()]}), "saves.Opaque, which was not run"),
    "no optimizer": ("FSDP2", _save(lambda _: {"state": 5}), "cannot be understood"),
    "no dict": ("FSDP2", _save(lambda _: [1]), "it is no state dict"),
    "elements again and again": (
        "FSDP2",
        _save(lambda _: {"state": {0: {"exp_avg": torch.zeros(1).expand(1 << 40)}}, "param_groups": []}),
        "optim_world_size_2_rank_1.pt cannot be understood",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_before_anything_is_written(case: str, written: Written, tmp_path: Path) -> None:
    kind, spoil, said = REFUSED[case]
    folder = Path(shutil.copytree(written(kind), tmp_path / "source"))
    spoil(folder)
    assert_one_line(run("convert", folder, tmp_path / "new"), said)
    assert names(tmp_path) == ["source"]
    assert not (folder / "ran").exists()


def test_a_layout_of_older_torch_is_read(written: Written, tmp_path: Path) -> None:
    """Before torch 2.9 a mesh was a tensor of ranks, and DTensor had another module."""
    folder = Path(shutil.copytree(written("FSDP2"), tmp_path / "source"))
    expected = torch.load(written("FSDP2").with_suffix(".expected"))
    for path in folder.glob("[mo]*.pt"):
        edited(path, _replace(b"ctorch.distributed.tensor\nDTensor\n", b"ctorch.distributed._tensor.api\nDTensor\n"))
        edited(path, _replace(b"X\x09\x00\x00\x00_rank_map", b"X\x04\x00\x00\x00mesh"))
        old, new = b"X\x11\x00\x00\x00_flatten_rank_map", b"X\x12\x00\x00\x00_flatten_mesh_list"
        edited(path, _replace(old, new))
    assert_is(made("convert", folder, tmp_path / "dcp"), expected)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_names_that_fit_twice_are_asked_for(tmp_path: Path) -> None:
    """Of three alike layers one is frozen: its state is of either, until the user says of which."""
    spawn(_write, 2, tmp_path, tmp_path / "source", {"frozen": "layers.1"})
    source, expected = tmp_path / "source", torch.load(tmp_path / "source.expected")
    refused = run("convert", source, tmp_path / "new")
    assert_one_line(refused, "parameters by number, 12 of them in groups of [12], and several ways to name them fit")
    trained = [name for name in expected["model"] if "layers.1" not in name and name != "seen"]
    for number, given in enumerate((trained, [trained])):
        made("convert", source, tmp_path / f"{number}", *with_names(tmp_path, given))
        assert_is(tmp_path / f"{number}", expected)
    for given, said in (
        ([[*reversed(trained)]], "the model's names and shapes do not fit"),
        ([trained[:-1]], "the model's names and shapes do not fit"),
        ([*trained, "layers.9.proj.bias"], "--names has layers.9.proj.bias, and"),
        ([*trained, trained[0]], "does not name parameters"),
        ({"embed.weight": 0}, "does not name parameters"),
    ):
        assert_one_line(run("convert", source, tmp_path / "new", *with_names(tmp_path, given)), said)
    assert not os.path.lexists(tmp_path / "new")


def test_modules_of_other_sizes_are_asked_for(written: Written, tmp_path: Path) -> None:
    """FSDP1 whose blocks are no layers: the names of each flat parameter have to be given."""
    folder, out = written("FSDP1"), tmp_path / "new"
    expected = torch.load(folder.with_suffix(".expected"))
    layers = [[name for name in expected["model"] if f"layers.{n}." in name] for n in range(3)]
    rest = [name for name in expected["model"] if "layers" not in name and name != "seen"]
    assert_is(made("convert", folder, out, *with_names(tmp_path, [rest, *layers])), expected)
    too_few = with_names(tmp_path, [rest, layers[0] + layers[1], layers[2]])
    said = "4 flat parameters of FSDP1 do not have the sizes of 3 modules; give --names FILE"
    assert_one_line(run("convert", folder, tmp_path / "other", *too_few), said)
