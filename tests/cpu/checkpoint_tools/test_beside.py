"""What is beside the data: the record of a split, values of the config, other files, objects that nobody looks into."""

import argparse
import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import preset, preset_names, seal
from checkpoint_tools.core.text import CheckpointError
from tests.checkpoint_tools import tool
from tests.checkpoint_tools.saves import WITH_FUSED, Opaque, Trap, flip_bit, rule, save

RECORD = "split_record.json"

# The record of a split -----------------------------------------------------------------------------------------------

PARTS = {"0.gate.weight": torch.ones(2, 3), "0.up.weight": torch.zeros(2, 3)}
WHOLE = {"1.gate_up.weight": torch.arange(24.0).view(8, 3)}


def test_splits_are_undone(tmp_path: Path) -> None:
    """Two of them one after the other; also through safetensors, without a model, and with rules."""
    first, second = rule(), rule(fused="{p}up.weight", parts=("{p}a.weight", "{p}b.weight"))
    source = save(tmp_path / "source", WHOLE)
    twice = tool.made("split", tool.made("split", source, tmp_path / "1", first), tmp_path / "2", second)
    record = json.loads((twice / RECORD).read_text())["splits"]
    assert [each["fused"] for each in record] == [["1.gate_up.weight"], ["1.up.weight"]]
    back = tool.made("merge", twice, tmp_path / "3")
    assert set(tool.values_of(back)) == {"1.gate.weight", "1.up.weight"}
    tool.assert_same(tool.made("merge", back, tmp_path / "4"), source)
    of_state = {"state": {key: {"exp_avg": value} for key, value in (PARTS | WHOLE).items()}}
    for name, state in {"model": PARTS | WHOLE, "optim": of_state}.items():
        source = save(tmp_path / name, {name: state})
        found = tool.made("split", source, tmp_path / f"{name}-split", rule())
        for step in ("safetensors", "back"):
            found = tool.made("convert", found, tmp_path / f"{name}-{step}")
        for n, rules in enumerate(([], [rule()])):  # with rules too, only what was fused is merged
            tool.assert_same(tool.made("merge", found, tmp_path / f"{name}-merged-{n}", *rules), source)


def test_the_values_of_a_split_hold_whatever_the_config_has(tmp_path: Path) -> None:
    """Merging by the config's put the rows in another order, and said nothing."""
    own = rule(layout="grouped", groups="tp_size")
    source = save(tmp_path / "source", WHOLE | {"0.gate_up.weight": torch.arange(16.0)})
    (source / "config.json").write_text('{"tp_size": 4}')
    split = tool.made("split", source, tmp_path / "split", own, "--value", "tp_size=2")
    for n, rules in enumerate(([], [own], [own, "--value", "tp_size=2"])):
        tool.assert_same(tool.made("merge", split, tmp_path / f"{n}", *rules), source)
    told = tool.shown("merge", split, tmp_path / "4", "--value", "tp_size=4", "--dry-run")
    assert "note: tp_size = 4 as given; split_record.json has 2\n" in told
    once = tool.made("split", source, tmp_path / "once", own, "--value", "tp_size=2", "--only", "0.*")
    twice = tool.made("split", once, tmp_path / "twice", own, "--value", "tp_size=4", "--only", "1.*")
    with pytest.raises(CheckpointError, match=r"split_record.json has several values of tp_size; give the one with"):
        tool.made("merge", twice, tmp_path / "5", own)


def test_without_a_record_a_person_has_to_say(tmp_path: Path) -> None:
    source = save(tmp_path / "source", PARTS | {f"1{key[1:]}": value for key, value in PARTS.items()})
    text = '{"rule": [{"fused": "{p}gate_up.weight", "parts": ["{p}gate.weight", "{p}up.weight"]}]}'
    (tmp_path / "rules.json").write_text(text)
    command = ("merge", source, tmp_path / "new", "--rules", tmp_path / "rules.json")
    tool.assert_one_line(
        tool.run(*command),
        f"{source} has no split_record.json",
        "would be: 0.gate_up.weight, 1.gate_up.weight. Look at it with --dry-run, and pass --yes, or --only PATTERN",
    )
    assert not (tmp_path / "new").exists()
    assert "2 tensors and 0 state tensors merged" in tool.shown(*command, "--dry-run")
    tool.assert_one_line(tool.run("merge", source, tmp_path / "new"), "no rules, and", "has no split_record.json; give")
    tool.assert_one_line(tool.run(*command, "--only", "0.*", "--only", "7.*"), "--only that matches nothing: 7.*")
    some = tool.made("merge", source, tmp_path / "new", rule(), "--only", "0.*")
    assert set(tool.values_of(some)) == {"0.gate_up.weight", "1.gate.weight", "1.up.weight"}
    everything = tool.made("merge", source, tmp_path / "all", rule(), "--yes")
    assert set(tool.values_of(everything)) == {"0.gate_up.weight", "1.gate_up.weight"}


UNBOUNDED = ("{p:(a+)+}", "{p:(a|aa)*}", "{p:a*a*a*a*a*}", "{p:.*.*.*}", "{p:(?=.*)a?}", "{p}{q}{r}")
BOUNDED = ("{p}.{q:weight|weight\\d+|}", "{p:.*a\\.}")


def test_records_that_are_none_or_that_somebody_else_has_written(tmp_path: Path) -> None:
    """No pattern that could take forever is tried: matching a name of thirty letters with the first takes minutes."""
    source = save(tmp_path / "source", PARTS)
    for content in ("[]", "{", '{"format": 2}', '{"format": "checkpoint_tools split 1", "splits": [{"rules": [1]}]}'):
        (source / RECORD).write_text(content)
        with pytest.raises(CheckpointError, match="is not what split leaves"):
            tool.made("merge", source, tmp_path / "new", rule())
    whole = save(tmp_path / "whole", {"b.gate_up.weight": torch.ones(4, 2)})
    split = tool.made("split", whole, tmp_path / "split", rule())
    for placeholders in (*UNBOUNDED, *BOUNDED):
        text = "".join(f"{{{name}}}" for name in "pqr" if f"{{{name}" in placeholders)
        own = rule(fused=f"{placeholders}gate_up", parts=(f"{text}gate", f"{text}up"))
        assert own.is_bounded == (placeholders in BOUNDED)
        if not own.is_bounded:
            written_with(split / RECORD, own)
            with pytest.raises(CheckpointError, match="has a rule of its own"):
                tool.made("merge", split, tmp_path / "new")


def written_with(record: Path, other: Any) -> None:
    """Exchange the rule, as somebody would who knows how the record is sealed."""
    found = json.loads(record.read_text())
    found["splits"][0]["rules"][0] |= {"fused": other.fused, "parts": list(other.parts)}
    found["crc32"] = zlib.crc32(json.dumps(found["splits"]).encode())
    record.write_text(json.dumps(found))


def test_the_presets_are_bounded_and_long_keys_are_matched_by_none() -> None:
    for name in preset_names():
        for own in preset(name):
            assert own.expanded({own.each: 2}).is_bounded
            assert own.match("a." * 5000 + "weight") is None
    (first, *_) = preset("megatron-swiglu")
    assert first.match("a." * 300 + "linear_fc1.weight") is not None
    assert first.match("a." * 600 + "linear_fc1.weight") is None


# Files beside the data -----------------------------------------------------------------------------------------------

COPIED = {
    "config.json": b"{}",
    "common.pt": b"state of a scheduler",
    "rng_state_0.pth": b"random",
    "training_args.bin": b"arguments",
    "tokenizer.model": b"words",
    "tokenizer/vocab.json": b"{}",
    "tokenizer/deep/merges.txt": b"a b",
}
LEFT = {
    "__9_0.distcp": b"of another checkpoint",
    "model-00001-of-00002.safetensors": b"other weights",
    "pytorch_model.bin": b"other weights",
    "iter_2/.metadata": b"another checkpoint",
    "iter_2/common.pt": b"its state",
    ".hidden": b"",
}


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def beside(folder: Path) -> dict[str, bytes]:
    own = (".metadata", ".checksums", RECORD)
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".distcp" and path.name not in own]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_files_beside_the_data_are_copied_and_other_data_are_not(tmp_path: Path) -> None:
    source = save(tmp_path / "source", WITH_FUSED)
    put(source, COPIED | LEFT)
    tool.made("split", source, f"file://{tmp_path}/remote", rule())
    assert beside(tmp_path / "remote") == beside(tool.made("split", source, tmp_path / "split", rule())) == COPIED
    safetensors = tool.made("convert", source, tmp_path / "safetensors")
    assert beside(safetensors).items() >= COPIED.items()
    assert not beside(safetensors).keys() & LEFT.keys()
    assert beside(tool.made("convert", safetensors, tmp_path / "back")) == COPIED


def test_what_is_too_much_is_left_and_what_is_damaged_not_copied(tmp_path: Path) -> None:
    source = save(tmp_path / "source", WITH_FUSED)
    seal(source)
    put(source, {"a.json": b"{}", "z.json": b"{}"} | {f"many/{number}.txt": b"" for number in range(1001)})
    put(source, {"1/2/3/4/deep.txt": b"", ".hidden": b""})
    with (source / "large.log").open("wb") as stream:
        stream.truncate(256 << 20)
    told = tool.shown("convert", source, tmp_path / "new", "--dry-run")
    assert "note: copied: 1/2/3/4/deep.txt, a.json, z.json\n" in told
    assert "note: not copied, as not of the checkpoint: .hidden, large.log, many/\n" in told
    torch.save({"lr": torch.ones(50_000)}, source / "common.pt")
    flip_bit(source / "common.pt", 100_000)
    with pytest.raises(CheckpointError, match=r"common.pt is not what torch.save writes .* would be copied as it is"):
        tool.made("split", source, tmp_path / "split", rule())
    assert not (tmp_path / "split").exists()


def test_objects_of_more_than_plain_values_pass_through_safetensors(tmp_path: Path) -> None:
    """Such as Megatron's ``args`` and Transformer Engine's ``_extra_state``. Nothing of them is run."""
    trap = tmp_path / "trap"
    objects = {"a._extra_state": io.BytesIO(b"x"), "thing": Opaque(), "trap": Trap(trap), "plain": (1, 2)}
    source = save(tmp_path / "source", {"model": {"a": torch.ones(2)}, **objects})
    safetensors = tool.made("convert", source, tmp_path / "made")
    back = tool.made("convert", safetensors, tmp_path / "back")
    stored = [
        {
            index.fqn: (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            for index, info in tool.metadata_of(folder).storage_data.items()
        }
        for folder in (source, back)
    ]
    assert all(stored[0][key] == stored[1][key] for key in objects.keys() - {"plain"})
    assert tool.shown("diff", source, back) == "the same: 5 keys, bit by bit\n"
    assert tool.shapes_of(safetensors) == tool.shapes_of(source)
    assert not trap.exists()


# Values of the config ------------------------------------------------------------------------------------------------


SIZES = ("tensor_model_parallel_size", "expert_tensor_parallel_size")


def experts_and_dense(**args: Any) -> dict[str, Any]:
    """Every linear_fc1 is ``gate, up`` of as many tensor-parallel ranks as a test takes it for."""
    grouped, sequential = "experts.linear_fc1.", "experts.local_experts.0.linear_fc1.weight"
    weights = [f"{grouped}weight0", sequential, "linear_fc1.weight", "shared_experts.linear_fc1.weight"]
    model = {f"mlp.{key}": torch.arange(24.0).view(3, 8).t() + 100 * n for n, key in enumerate(weights)}
    model[f"mlp.{grouped}bias0"] = torch.arange(8.0)
    model |= {key.replace("fc1", "fc2"): torch.ones(3, 4) for key in model if "weight" in key}
    return {"model": model, **({"args": argparse.Namespace(**args)} if args else {})}


def test_values_come_from_args_in_the_checkpoint(tmp_path: Path) -> None:
    """As Megatron's ``fsdp_dtensor`` has them, of which nothing else is run; or from ``config.json``."""
    trap = tmp_path / "trap"
    args = dict(zip(SIZES, (2, 1), strict=True)) | {"trap": Trap(trap), "other": Opaque()}
    source, bare = save(tmp_path / "source", experts_and_dense(**args)), save(tmp_path / "bare", experts_and_dense())
    command = ("split", source, tmp_path / "new", "--preset", "megatron-swiglu", "--dry-run")
    text = tool.shown(*command)
    assert "note: tp_size = 2, from args in the object args\n" in text
    assert "note: etp_size = 1, from args in the object args\n" in text
    assert "note: tp_size = 4 as given; args in the object args has 2\n" in tool.shown(*command, "--value", "tp_size=4")
    wrong = tool.run(*command, "--value", "etp_size=2")  # experts' ranks are not contradicted
    tool.assert_one_line(wrong, "--value etp_size=2, but it is 1 here (args in the object args)")
    text = tool.shown("split", bare, *command[2:], "--value", "tp_size=2")
    assert "etp_size = 2, as tp_size: the default" in text
    tool.shown(*command[:-1])
    assert not trap.exists()
    source = save(tmp_path / "hf", {"0.qkv_proj.weight": torch.ones(8, 4), "0.o_proj.weight": torch.ones(4, 4)})
    put(source, {"config.json": b'{"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 4}'})
    text = tool.shown("split", source, tmp_path / "other", "--preset", "hf-qkv", "--dry-run")
    for value in ("num_attention_heads = 2", "num_key_value_heads = 1", "head_dim = 2"):
        assert f"note: {value}, from config.json\n" in text


def test_ranks_in_a_common_file_do_not_say_how_rows_are_stored(tmp_path: Path) -> None:
    """It is Megatron's torch_dist, which stores them as one rank has them, if metadata.json says so."""
    source = save(tmp_path / "source", experts_and_dense())
    torch.save({"args": argparse.Namespace(tensor_model_parallel_size=2)}, source / "common.pt")
    command = ("split", source, tmp_path / "new", "--preset", "megatron-swiglu", "--dry-run")
    tool.assert_one_line(tool.run(*command), "Give --value tp_size=1 if they are [gate; up]")
    assert "tp_size = 1 as given" in tool.shown(*command, "--value", "tp_size=1")
    put(source, {"metadata.json": b'{"sharded_backend": "torch_dist"}'})
    assert "note: tp_size = 1, from torch_dist" in tool.shown(*command)


@pytest.mark.parametrize(
    ("args", "values", "ranks"),
    [
        *(((2, 1), "", (2, 1)), ((1, 4), "", (1, 4)), ((4, None), "", (4, 4)), ((2,), "etp_size=1", (2, 1))),
        *(((), "tp_size=2 etp_size=4", (2, 4)), ((), "tp_size=2", (2, 2))),
    ],
)
def test_experts_are_divided_by_their_own_ranks(
    args: tuple[int, ...], values: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    state = experts_and_dense(**dict(zip(SIZES, args, strict=False)))
    source = save(tmp_path / "source", state)
    options = [*preset("megatron-swiglu"), *(each for value in values.split() for each in ("--value", value))]
    split = tool.made("split", source, tmp_path / "split", *options)
    for key, whole in state["model"].items():
        if "fc1" in key:
            halves = [part.chunk(2) for part in whole.chunk(ranks[".experts." in key])]
            loaded = {f"model.{key}{suffix}": torch.empty(len(whole) // 2, *whole.shape[1:]) for suffix in ("_w", "_v")}
            tool.load(loaded, split)
            for half, found in enumerate(loaded.values()):
                assert torch.equal(found, torch.cat([part[half] for part in halves]))
    tool.shown("diff", source, tool.made("merge", split, tmp_path / "merged", *options))
