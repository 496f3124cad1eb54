"""Checkpoints that the real megatron-core writes as ``torch_dist``: looked into, rewritten, loaded and trained on."""

import argparse
import functools
import json
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from checkpoint_tools import preset
from tests.checkpoint_tools.megatron import BUCKETS, LAYERS, SINGLETON, SIZES, STACKED, Training, cpu_for_cuda
from tests.checkpoint_tools.saves import same_bits, save
from tests.checkpoint_tools.tool import assert_one_line, assert_same, made, run, shapes_of, shown, values_of
from tests.distributed.launch import spawn

pytestmark = pytest.mark.distributed

SWIGLU, QKV = preset("megatron-swiglu"), preset("megatron-qkv")
FORMS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # name → training, and how it is saved
    "layers": ({}, LAYERS),
    "by hand": ({}, SINGLETON),
    "stacked": ({}, STACKED),
    "buckets": ({}, BUCKETS | {"non_homogeneous_layers": True}),
    "plain": ({"is_distributed": False}, {"non_homogeneous_layers": True}),
    "experts": ({"experts": 3}, LAYERS),
}


def args(tp: int) -> argparse.Namespace:
    """Megatron's have more than plain values."""
    from megatron.core.transformer.enums import AttnBackend

    own = {"attention_backend": AttnBackend.auto, "params_dtype": torch.float32, "seed": 0, "moe_grouped_gemm": False}
    return argparse.Namespace(**SIZES, **own, tensor_model_parallel_size=tp, group_query_attention=True)


def write(rank: int, world_size: int, folder: Path, tp: int) -> None:
    """All forms, and the losses of the steps that come after each."""
    del world_size
    losses = {}
    with cpu_for_cuda():
        for name, (options, metadata) in FORMS.items():
            if tp > 1 and "experts" in options:
                continue  # Megatron trains them only with sequence parallelism then
            training = Training(tp, **options)
            training.steps(1)
            training.save(folder / name, metadata, args=args(tp), iteration=2)
            losses[name] = training.steps(3)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


Write = Callable[[int, int], Path]


@pytest.fixture(scope="module")
def write_once(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """The folder of the checkpoints of so many ranks, so many of them for tensor parallelism."""

    @functools.cache
    def write_all(world_size: int, tp: int) -> Path:
        folder = tmp_path_factory.mktemp("megatron")
        spawn(write, world_size, folder, folder, tp)
        return folder

    return write_all


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 1), id="one rank"),
        pytest.param((2, 1), id="two ranks", marks=pytest.mark.long),
        pytest.param((2, 2), id="tensor parallel", marks=pytest.mark.long),
    ],
)
def written(request: pytest.FixtureRequest, write_once: Write) -> tuple[Path, int, int]:
    """That folder, and on how many ranks they were written."""
    return write_once(*request.param), *request.param


@pytest.fixture(scope="module")
def one_rank(write_once: Write) -> Path:
    return write_once(1, 1)


# Rewritten -----------------------------------------------------------------------------------------------------------


def test_the_split_is_megatrons_own(written: tuple[Path, int, int], tmp_path: Path) -> None:
    """Gate and up as Megatron itself saves them apart, with ``singleton_local_shards``: every key, bit by bit."""
    folder, _, _ = written
    shown("diff", made("split", folder / "layers", tmp_path / "split", *SWIGLU), folder / "by hand")
    for file in ("common.pt", "metadata.json"):
        assert (tmp_path / "split" / file).read_bytes() == (folder / "layers" / file).read_bytes()


@pytest.mark.parametrize("form", ["stacked", "experts"])
def test_what_is_stacked_in_front_is_split_along_the_rows(form: str, one_rank: Path, tmp_path: Path) -> None:
    split = made("split", one_rank / form, tmp_path / "split", *SWIGLU, *QKV)
    before, after = values_of(one_rank / form), values_of(split)
    fused = [key for key in before if key.endswith("linear_fc1.weight")]
    assert len(fused) == (4 if form == "stacked" else 8)  # of the model, and three of state
    for key in fused:
        gate, up = before[key].chunk(2, -2)
        assert same_bits(after.pop(f"{key}_w"), gate)
        assert same_bits(after.pop(f"{key}_v"), up)
    for key in [key for key in before if key.endswith("linear_qkv.weight")]:
        groups = before[key].unflatten(-2, (2, 4, 4))  # of each: two heads of queries, one of keys, one of values
        prefix = key.removesuffix("linear_qkv.weight")
        assert same_bits(after.pop(f"{prefix}linear_q.weight"), groups[..., :2, :, :].flatten(-4, -2))
        assert same_bits(after.pop(f"{prefix}linear_k.weight"), groups[..., 2, :, :].flatten(-3, -2))
        assert same_bits(after.pop(f"{prefix}linear_v.weight"), groups[..., 3, :, :].flatten(-3, -2))
    assert all(same_bits(value, before[key]) for key, value in after.items())
    assert_same(made("merge", split, tmp_path / "merged", *SWIGLU, *QKV), one_rank / form)


def test_megatron_loads_what_is_made_of_its_checkpoints_and_trains_on(
    written: tuple[Path, int, int], tmp_path: Path
) -> None:
    folder, world_size, tp = written
    rules = (*SWIGLU, *QKV)
    loads: dict[str, tuple[str, Mapping[str, Any]]] = {}  # name → as what it was written, and how it is loaded
    for source in ("layers", "buckets", "plain"):
        made("split", folder / source, tmp_path / source, *SWIGLU)
        loads[source] = source, FORMS[source][1] | {"singleton_local_shards": True}
    for source in ("stacked", *(["experts"] if tp == 1 else [])):
        split = made("split", folder / source, tmp_path / f"{source} split", *rules)
        made("merge", split, tmp_path / f"{source} merged", *rules)
        loads[f"{source} merged"] = source, FORMS[source][1]
    made("convert", made("convert", folder / "stacked", tmp_path / "safetensors"), tmp_path / "converted")
    loads["converted"] = "stacked", STACKED
    spawn(train_on, world_size, tmp_path, folder, tmp_path, tp, loads)


def train_on(rank: int, world_size: int, written: Path, made_in: Path, tp: int, loads: Mapping[str, Any]) -> None:
    del rank, world_size
    expected = json.loads((written / "losses.json").read_text())
    with cpu_for_cuda():
        for name, (source, metadata) in loads.items():
            training = Training(tp, **FORMS[source][0], seed=7)
            common = training.load(made_in / name, metadata)
            assert common["iteration"] == 2
            assert training.steps(3) == expected[source], name
        training = Training(tp, seed=7)
        training.load(written / "by hand", SINGLETON)
        assert training.steps(3) == expected["layers"]


# Megatron-FSDP -------------------------------------------------------------------------------------------------------


def test_the_split_of_fsdp_dtensor_is_megatrons_own(tmp_path: Path) -> None:
    spawn(write_fsdp_dtensor, 2, tmp_path, tmp_path)
    options = (*SWIGLU, "--value", "tp_size=1")
    split = made("split", tmp_path / "fused", tmp_path / "split", *options)
    assert len([key for key in shapes_of(tmp_path / "own") if key.endswith("linear_fc1.weight_w.exp_avg")]) == 2
    shown("diff", split, tmp_path / "own")
    assert_same(made("merge", split, tmp_path / "merged", *options), tmp_path / "fused")


def write_fsdp_dtensor(rank: int, world_size: int, folder: Path) -> None:
    del rank, world_size
    with cpu_for_cuda():
        training = Training(1, is_fsdp=True)
        training.save_fsdp_dtensor(folder / "fused", split=False)
        training.save_fsdp_dtensor(folder / "own", split=True)


def test_state_of_any_ranks_becomes_that_of_fsdp_dtensor(written: tuple[Path, int, int], tmp_path: Path) -> None:
    folder, lead = written[0], "optimizer.state.exp_avg."
    before = values_of(folder / "layers")
    after = values_of(made("convert", folder / "layers", tmp_path / "new", "--to", "fsdp_dtensor"))
    names = [key.removeprefix(lead) for key in before if key.startswith(lead)]
    assert len(names) == 15
    for name in names:
        ends = ("_w", "_v") if name.endswith("linear_fc1.weight") else ("",)
        parts = [after[f"optimizer.state.module.module.module.{name}{end}.exp_avg"] for end in ends]
        assert same_bits(torch.cat(parts), before[f"{lead}{name}"]), name
        weights = [after[f"model.module.{name}{end}"] for end in ends]
        assert same_bits(torch.cat(weights), before[f"optimizer.state.param.{name}"]), name


def test_megatron_fsdp_loads_what_is_made_of_torch_dist_and_trains_on(one_rank: Path, tmp_path: Path) -> None:
    """Gate and up apart, layers and experts one by one, its fp32 weights, its state and its counter: as it goes on."""
    forms = ("stacked", "by hand", "experts", "plain")
    for name in forms:
        made("convert", one_rank / name, tmp_path / name, "--to", "fsdp_dtensor")
    spawn(train_fsdp_on, 1, tmp_path, one_rank, tmp_path, forms)


def train_fsdp_on(rank: int, world_size: int, written: Path, made_in: Path, forms: Sequence[str]) -> None:
    del rank, world_size
    expected = json.loads((written / "losses.json").read_text())
    expected["by hand"] = expected["layers"]
    with cpu_for_cuda():
        for name in forms:
            experts = {"experts": 3} if name == "experts" else {}
            training = Training(1, is_fsdp=True, seed=7, **experts)
            training.load_fsdp_dtensor(made_in / name, as_transformer_engine_names_it)
            steps = 2 if name == "plain" else 3  # torch's AdamW was its optimizer, which rounds otherwise in the end
            (first, *later), (wanted, *others) = training.steps(steps), expected[name][:steps]
            assert first == wanted, name
            # The two optimizers cut their buffers elsewhere, and torch's kernels for AVX-512 round the ends otherwise.
            rounds = torch.backends.cpu.get_cpu_capability() == "AVX512"
            assert later == (pytest.approx(others, rel=1e-6) if rounds else others), name
            assert [group["step"] for group in training.optimizer.optimizer.param_groups] == [2 + steps] * 2


def as_transformer_engine_names_it(key: str) -> str:
    """With the layernorms in the linear layers, and one module more around the model."""
    key = key.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    key = key.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return key.replace("module.module.", "module.module.module.")


# Values that the checkpoint tells ------------------------------------------------------------------------------------


def test_values_come_from_args_and_format(one_rank: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(one_rank / "layers", tmp_path / "source"))
    command = ("split", source, tmp_path / "new", "--preset", "megatron-swiglu", "--preset", "megatron-qkv")
    text = shown(*command, "--dry-run")
    for value in ("kv_channels = 4", "num_attention_heads = 4", "num_query_groups = 2"):
        assert f"note: {value}, from args in common.pt\n" in text
    for name in ("tp_size", "etp_size"):
        assert f"note: {name} = 1, from torch_dist, which stores gate and up as one rank has them\n" in text
    assert_one_line(run(*command, "--value", "tp_size=2"), "--value tp_size=2, but it is 1 here (torch_dist")
    (source / "metadata.json").unlink()
    zero = run(*command, "--value", "tp_size=0")
    assert_one_line(zero, "tp_size is 0; expected 1 or more, as many as it was divided into")


# Written by megatron-core before 0.16 ---------------------------------------------------------------------------------


def test_metadata_of_older_megatron_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of classes of its own, and with state that only it can read: that is refused."""
    module = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name, base in (("MCoreMetadata", Metadata), ("MCoreSavePlan", SavePlan)):
        setattr(module, name, type(name, (base,), {"__module__": module.__name__}))
    for end in range(1, module.__name__.count(".") + 1):
        parent = ".".join(module.__name__.split(".")[:end])
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    gate_and_up = {"mlp.linear_fc1.weight": torch.arange(24.0).view(8, 3), "mlp.linear_fc2.weight": torch.ones(3, 4)}
    gate_and_up["optimizer.state.exp_avg.mlp.linear_fc1.weight"] = torch.ones(8, 3)

    def by_older(name: str, mcore_data: dict[str, Any]) -> Path:
        folder = save(tmp_path / name, gate_and_up)
        found = pickle.loads((folder / ".metadata").read_bytes())
        old = module.MCoreMetadata(**vars(found))
        old.mcore_data, old.all_local_plans = mcore_data, [module.MCoreSavePlan([])]
        (folder / ".metadata").write_bytes(pickle.dumps(old))
        return folder

    fine = by_older("fine", {"mlp.linear_fc1.weight": {}})
    split = made("split", fine, tmp_path / "split", *SWIGLU, "--value", "tp_size=1")
    assert shapes_of(split)["mlp.linear_fc1.weight_w"] == [4, 3]
    flattened = by_older("flattened", {"mlp.linear_fc1.weight": {"nd_reformulated_orig_global_shape": (8, 3)}})
    result = run("split", flattened, tmp_path / "new", "--preset", "megatron-swiglu", "--value", "tp_size=1")
    assert_one_line(result, "flattened in the way of Megatron-Core before 0.16; save it there with")
    (flattened / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    result = run("convert", flattened, tmp_path / "new", "--to", "fsdp_dtensor")
    assert_one_line(result, "flattened in the way of Megatron-Core before 0.16; save it there with", "'*optimizer.*'")
