"""Megatron's ``torch_dist``, made by hand, as split ``fsdp_dtensor``: all of it, bit by bit, or a refusal by name."""

import argparse
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools.convert import fsdp_dtensor
from tests.checkpoint_tools.saves import Trap, flip_bit, same_bits, save
from tests.checkpoint_tools.tool import assert_one_line, chunks_of, load, made, run, shown, values_of, with_names

LAYERS, EXPERTS = 2, 3
GATED, DENSE, TOWER = (
    "decoder.layers.mlp.experts.experts.linear_fc1.weight",
    "mtp.layers.0.transformer_layer.mlp",
    "vit",
)
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.word_embeddings.weight": (6, 4),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, 8, 4),
    "decoder.layers.self_attention.linear_qkv.bias": (LAYERS, 8),
    GATED: (LAYERS, EXPERTS, 10, 4),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, 4, 5),
    f"{DENSE}.linear_fc1.weight": (6, 4),
    f"{DENSE}.linear_fc2.weight": (4, 3),
    f"{TOWER}.layers.0.mlp.linear_fc1.weight": (8, 4),  # without a gate
    f"{TOWER}.layers.0.mlp.linear_fc2.weight": (4, 8),
}
FROZEN = "vit.pos.weight"
GROUPS: list[dict[str, Any]] = [
    {"wd_mult": wd, "is_expert_parallel": expert, "lr": 0.5 + wd, "betas": (0.9, 0.95), "min_lr": None, "step": 7}
    for expert in (False, True)
    for wd in (1.0, 0.0)
]


class Backend(enum.Enum):
    auto = 5


class Source:
    """What is saved, to be changed before it is."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.values: dict[str, Any] = {FROZEN: torch.randn(3, 4)}
        for key, shape in SHAPES.items():
            main = torch.randn(shape)
            self.values[key] = main.bfloat16()
            found = {"param": main, "exp_avg": torch.randn(shape).bfloat16(), "exp_avg_sq": torch.rand(shape)}
            self.values.update({f"optimizer.state.{kind}.{key}": value for kind, value in found.items()})
        for name in ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_2", "rng_state/shard_0.0_1.1"):
            self.values[name] = {"some": "thing"}
        self.args: Any = argparse.Namespace(num_layers=LAYERS, dtype=torch.bfloat16, sizes=[1, (2.5, "a")], none=None)
        self.common: dict[str, Any] = {
            "optimizer": {"optimizer": {"param_groups": GROUPS}, "grad_scaler": {"scale": torch.tensor([4.0])}},
            "args": self.args,
            "iteration": 7,
            "opt_param_scheduler": {"num_steps": 70, "max_lr": 0.1, "nested": [{"a": 1}, {"b": torch.ones(2)}]},
            "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
        }

    def save(self, folder: Path) -> Path:
        save(folder, self.values)
        torch.save(self.common, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        (folder / "tokenizer.model").write_text("words")
        return folder


@pytest.fixture
def source() -> Source:
    return Source()


def expected(source: Source) -> dict[str, Any]:
    """All keys of the new checkpoint, by what Megatron-FSDP names its parameters."""
    found: dict[str, Any] = {f"model.module.{FROZEN}": source.values[FROZEN]}
    for key, shape in SHAPES.items():
        layers = [f"layers.{n}." for n in range(LAYERS)] if shape[0] == LAYERS else [""]
        for at, layer in enumerate(layers):
            name = key.replace("layers.", layer) if layer else key
            experts = range(EXPERTS) if "experts" in key else [None]
            for expert in experts:
                index = ((at,) if layer else ()) + (() if expert is None else (expert,))
                module = name.replace("experts.experts.", "experts.") + ("" if expert is None else str(expert))
                is_gated = key in (GATED, f"{DENSE}.linear_fc1.weight")
                rows = shape[len(index)] // 2
                halves = {"_w": slice(0, rows), "_v": slice(rows, None)} if is_gated else {"": slice(None)}
                for end, half in halves.items():
                    found[f"model.module.{module}{end}"] = source.values[f"optimizer.state.param.{key}"][index][half]
                    own = f"optimizer.state.module.module.module.{module}{end}"
                    for kind in ("exp_avg", "exp_avg_sq"):
                        found[f"{own}.{kind}"] = source.values[f"optimizer.state.{kind}.{key}"][index][half]
                    found[f"{own}.step"] = torch.tensor(7.0)
                group = GROUPS[2 * (expert is not None) + (key.endswith("bias"))]
                meta = f"optimizer.param_to_group_meta.module.module.module.{module}"
                found.update({f"{meta}.{option}": value for option, value in group.items()})
    found |= {"args": source.args, "iteration": 7, "checkpoint_version": 3.0}
    found["optimizer.grad_scaler.scale"] = torch.tensor([4.0])
    lead = "opt_param_scheduler"
    nested = {f"{lead}.nested.0.a": 1, f"{lead}.nested.1.b": torch.ones(2)}
    return {**found, f"{lead}.num_steps": 70, f"{lead}.max_lr": 0.1, **nested}


def test_every_tensor_counter_and_option_is_there(source: Source, tmp_path: Path) -> None:
    folder = source.save(tmp_path / "source")
    text = shown("convert", folder, tmp_path / "new", "--to", "fsdp_dtensor")
    assert "left out: _extra_state, rng_state, content_metadata\n" in text
    assert "9 weights from the fp32 mains" in text
    found, wanted = values_of(tmp_path / "new"), expected(source)
    assert found.keys() == wanted.keys()
    assert found.pop("args") == wanted.pop("args")
    assert [key for key, value in wanted.items() if not same_bits(value, found[key])] == []
    weight = {"model.module.embedding.word_embeddings.weight": torch.empty(6, 4, dtype=torch.bfloat16)}
    load(weight, tmp_path / "new")  # into the model's dtype
    assert same_bits(*weight.values(), source.values["embedding.word_embeddings.weight"])
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert files == {"__0_0.distcp", ".metadata", ".checksums", "tokenizer.model"}  # by which Megatron tells the format


def test_parts_of_in_proj_stay_apart_and_are_told_of(source: Source, tmp_path: Path) -> None:
    """Their options are those of the one parameter that they are of; so those of gate and up, if they are apart."""
    apart = ["decoder.layers.0.mixer.in_proj.weight.query", "decoder.layers.1.mlp.linear_fc1.weight_v"]
    source.values = {key: torch.ones(2, 3) for key in apart}
    source.values |= {f"optimizer.state.exp_avg.{key}": torch.ones(2, 3) for key in apart}
    folder = source.save(tmp_path / "source")
    text = shown("convert", folder, tmp_path / "new", "--to", "fsdp_dtensor")
    assert "note: 1 part of in_proj and conv1d left apart" in text
    keys = {key for key in values_of(tmp_path / "new") if key.endswith((".exp_avg", ".lr"))}
    lead = "optimizer.{}.module.module.module.decoder.layers."
    assert keys == {f"{lead.format('state')}{key.removeprefix('decoder.layers.')}.exp_avg" for key in apart} | {
        f"{lead.format('param_to_group_meta')}{key}.lr" for key in ("0.mixer.in_proj.weight", "1.mlp.linear_fc1.weight")
    }


def test_large_tensors_are_read_and_written_in_pieces(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_dtensor, "LARGEST_PIECE_BYTES", 16)
    options = ("--to", "fsdp_dtensor", "--shard-size", 2048)
    found = values_of(made("convert", source.save(tmp_path / "source"), tmp_path / "new", *options))
    wanted = expected(source)
    assert [key for key, value in wanted.items() if key != "args" and not same_bits(value, found[key])] == []
    numbers = [len(values) for values in chunks_of(tmp_path / "new").values()]
    assert max(numbers) > 3
    nbytes = sum(value.nbytes for value in found.values() if isinstance(value, torch.Tensor))
    assert len(list((tmp_path / "new").glob("*.distcp"))) == pytest.approx(nbytes / 2048, abs=1)


def test_counters_that_torchs_optimizers_have(source: Source, tmp_path: Path) -> None:
    """Beside their groups, and in a chain; both have made so many steps as they say themselves."""
    groups = [{option: value for option, value in group.items() if option != "step"} for group in GROUPS]
    state = {"common_step": torch.tensor(3.0)}
    source.common["optimizer"] = {
        0: {"optimizer": {"param_groups": groups[:2], "state": state}},
        1: {"optimizer": {"param_groups": groups[2:], "state": {"common_step": torch.tensor(5.0)}}},
    }
    found = values_of(made("convert", source.save(tmp_path / "source"), tmp_path / "new", "--to", "fsdp_dtensor"))
    for name, step in (("embedding.word_embeddings.weight", 3), ("decoder.layers.0.mlp.experts.linear_fc2.weight1", 5)):
        assert same_bits(found[f"optimizer.param_to_group_meta.module.module.module.{name}.step"], step)
        assert same_bits(found[f"optimizer.state.module.module.module.{name}.step"], torch.tensor(float(step)))


def test_layernorms_of_qwen3_next_that_decay(source: Source, tmp_path: Path) -> None:
    key = "decoder.layers.0.self_attention.q_layernorm.weight"
    source.values |= {key: torch.ones(4), f"optimizer.state.exp_avg.{key}": torch.ones(4)}
    for is_set, decay in ((False, 0.0), (True, 1.0)):
        source.args.apply_wd_to_qk_layernorm = is_set
        folder = source.save(tmp_path / f"{is_set}")
        found = values_of(made("convert", folder, tmp_path / f"{is_set} new", "--to", "fsdp_dtensor"))
        assert found[f"optimizer.param_to_group_meta.module.module.module.{key}.wd_mult"] == decay


def test_groups_that_are_not_megatrons_own_are_asked_for(source: Source, tmp_path: Path) -> None:
    source.common["optimizer"]["optimizer"]["param_groups"] = [GROUPS[0], GROUPS[0] | {"lr": 0.125}]
    folder = source.save(tmp_path / "source")
    command = ("convert", folder, tmp_path / "new", "--to", "fsdp_dtensor")
    assert_one_line(
        run(*command), "which of 2 param groups ", "give --names FILE, a JSON list with a list of the names"
    )
    lead = "optimizer.param_to_group_meta.module.module.module."
    names = {key.removeprefix(lead).removesuffix(".lr") for key in expected(source) if key.startswith(lead)}
    names = {name for name in names if not name.endswith((".step", ".betas", "_mult", "parallel", "_lr"))}
    wrong = with_names(tmp_path, [sorted(n for n in names if "vit" not in n), [f"{TOWER}.no"]])
    assert_one_line(run(*command, *wrong), "which of 2 param groups vit.layers.0")
    apart = [sorted(name for name in names if ("vit" in name) == is_tower) for is_tower in (False, True)]
    found = values_of(made(*command, *with_names(tmp_path, apart)))
    assert {found[f"{lead}{name}.lr"] for name in apart[0]} == {1.5}
    assert {found[f"{lead}{name}.lr"] for name in apart[1]} == {0.125}


# Refused --------------------------------------------------------------------------------------------------------------

Edit = Callable[[Source, Path], object]
STATE, MAIN = f"optimizer.state.exp_avg.{GATED}", torch.ones(LAYERS, EXPERTS, 10, 4, dtype=torch.int16)


def _put(key: str, value: Any) -> Edit:
    return lambda source, _: source.values.update({key: value})


def _common(**values: Any) -> Edit:
    return lambda source, _: source.common.update(values)


REFUSED: dict[str, tuple[Edit, str]] = {
    "state of another shape": (_put(STATE, torch.ones(LAYERS, EXPERTS, 8, 5)), "is no state of"),
    "state of nothing": (_put("optimizer.state.exp_avg.head.weight", torch.ones(2)), "is no state of head.weight"),
    "a remainder for a main": (_put(STATE.replace("exp_avg", "param"), MAIN), "a main that is not fp32"),
    "another number of layers": (_put("decoder.layers.norm.weight", torch.ones(3, 4)), "and others 2 in front"),
    "stacks of nothing": (_put("more.layers.norm.weight", torch.ones(0, 4)), "no model has such layers"),
    "a stack without rows": (_put("more.layers.norm.weight", torch.tensor(1.0)), "no model has such layers"),
    "a layer twice": (_put("decoder.layers.0.self_attention.linear_qkv.bias", torch.ones(8)), "twice: alone, and"),
    "another gate": (_put("mtp.layers.0.mlp.linear_fc1.weight", torch.ones(6, 4)), "which is not there"),
    "buckets": (_put("optimizer.distributed.dp_group_idx_0.exp_avg", torch.ones(9)), "--dist-ckpt-optim-fully-resh"),
    "state that is no parameter's": (_put("optimizer.mean", torch.ones(9)), "--dist-ckpt-optim-fully-resh"),
    "no groups": (_common(optimizer={"state": {}}), "the optimizer in "),
    "no optimizer": (lambda source, _: source.common.pop("optimizer"), "the optimizer in "),
    "groups of anything": (_common(optimizer={"param_groups": [{"wd_mult": []}, {"wd_mult": 1}]}), "of 2 param groups"),
    "a tensor in args": (lambda source, _: setattr(source.args, "x", [torch.ones(2)]), "args has a tensor"),
    "a tensor in a tuple": (_common(other=(1, torch.ones(2))), "other has a tensor"),
    "half a step": (_common(optimizer={"param_groups": [{"step": 0.5}]}), "its step is 0.5"),
    "options of a class": (_common(optimizer={"param_groups": [{"lr": Backend.auto}]}), "it asks for tests."),
    "a hostile option": (lambda source, at: source.common.update(optimizer=Trap(at)), "system, which was not run"),
    "hostile args": (lambda source, at: setattr(source.args, "x", [Trap(at)]), "system, which was not run"),
    "a hostile value": (lambda source, at: source.common.update(other={"a": Trap(at)}), "system, which was not run"),
    "args of a class": (lambda source, _: setattr(source.args, "x", Backend.auto), "it asks for tests."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lies_is_refused(name: str, source: Source, tmp_path: Path) -> None:
    edit, message = REFUSED[name]
    edit(source, tmp_path / "trap")
    folder = source.save(tmp_path / "source")
    assert_one_line(run("convert", folder, tmp_path / "new", "--to", "fsdp_dtensor"), message)
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "trap").exists()


def test_a_damaged_common_file_and_other_folders_are_refused(source: Source, tmp_path: Path) -> None:
    folder = source.save(tmp_path / "source")
    command = ("convert", folder, tmp_path / "new", "--to", "fsdp_dtensor")
    assert_one_line(run(*command, "--dtype", "bf16"), "--dtype and --key-prefix are not for fsdp_dtensor")
    flip_bit(folder / "common.pt", (folder / "common.pt").read_bytes().index(b"num_steps"))
    assert_one_line(run(*command), "common.pt cannot be understood", "another CRC-32")
    (folder / "common.pt").unlink()
    assert_one_line(run(*command), "has no common.pt, in which torch_dist has its options; fetch it")
    (folder / "metadata.json").unlink()
    assert_one_line(run(*command), "is no torch_dist of Megatron")


def test_buckets_without_the_optimizer(source: Source, tmp_path: Path) -> None:
    source.values["optimizer.distributed.dp_group_idx_0.exp_avg"] = torch.ones(9)
    folder = source.save(tmp_path / "source")
    options = ("--to", "fsdp_dtensor", "--exclude", "*optimizer.*")
    found = values_of(made("convert", folder, tmp_path / "new", *options))
    assert {key.partition(".")[0] for key in found} == {
        "model", "args", "iteration", "checkpoint_version", "opt_param_scheduler",
    }  # fmt: skip
    assert found["model.module.embedding.word_embeddings.weight"].dtype == torch.bfloat16
