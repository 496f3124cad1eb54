"""Files beside the data, and objects that nobody looks into, are in the new checkpoint as they were."""

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_tools import preset
from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.fuse.request import RECORD_FILE
from checkpoint_tools.integrity.seal import seal
from checkpoint_tools.look.diff import all_keys, diff
from checkpoint_tools.rewrite.rewrite import MAX_BYTES, notes_on, open_whole
from checkpoint_tools.stored.items import ItemReader
from checkpoint_tools.stored.metadata import MANIFEST_FILE
from checkpoint_tools.stored.reading import open_checkpoint
from tests.checkpoint_tools.checkpoints import Opaque, Trap, assert_one_line, run_here, save
from tests.checkpoint_tools.offline import STATE, converted, rewritten, rule, tensor_of, told

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


OWN = (".metadata", MANIFEST_FILE, RECORD_FILE)


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def beside(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".distcp")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.name not in OWN}


def test_files_beside_the_data_are_copied_and_other_data_are_not(tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    put(source, COPIED | LEFT)
    rewritten("split", source, tmp_path / "split", rule())
    rewritten("split", source, f"file://{tmp_path}/remote", rule())
    converted(source, tmp_path / "safetensors")
    converted(tmp_path / "safetensors", tmp_path / "back")
    assert beside(tmp_path / "split") == COPIED
    assert beside(tmp_path / "remote") == COPIED
    assert beside(tmp_path / "safetensors").items() >= COPIED.items()
    assert not beside(tmp_path / "safetensors").keys() & LEFT.keys()
    assert beside(tmp_path / "back") == COPIED


def test_what_is_too_much_is_left(tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    seal(source)
    put(source, {"a.json": b"{}", "z.json": b"{}"} | {f"many/{number}.txt": b"" for number in range(1001)})
    put(source, {"1/2/3/4/deep.txt": b"", ".hidden": b""})
    with (source / "large.log").open("wb") as stream:
        stream.truncate(MAX_BYTES)
    checkpoint, found = open_whole(str(source), 1)
    assert found.files == ("a.json", "z.json")
    assert found.left == (".hidden", "1/", "large.log", "many/")  # and not the manifest of checksums
    assert ".hidden does not belong to the checkpoint, and is not copied" in notes_on(checkpoint, found)
    assert notes_on(checkpoint, found)[0] == "copied as they are: a.json, z.json"


def test_a_file_of_torch_save_that_is_damaged_is_not_copied(tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    torch.save({"lr": torch.ones(50_000)}, source / "common.pt")
    content = bytearray((source / "common.pt").read_bytes())
    content[100_000] ^= 1
    (source / "common.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"common.pt is not what torch.save writes .* would be copied as it is"):
        rewritten("split", source, tmp_path / "split", rule())
    assert not (tmp_path / "split").exists()


def test_objects_of_more_than_plain_values_pass_through_safetensors(tmp_path: Path) -> None:
    """Such as Megatron's ``args`` and Transformer Engine's ``_extra_state``. Nothing of them is run."""
    trap = tmp_path / "trap"
    objects = {"a._extra_state": io.BytesIO(b"x"), "thing": Opaque(), "trap": Trap(trap), "plain": (1, 2)}
    source = save(tmp_path / "source", {"model": {"a": torch.ones(2)}, **objects})
    made = converted(source, tmp_path / "made")
    back = converted(tmp_path / "made", tmp_path / "back")
    before = open_checkpoint(source)
    old, new = ItemReader(before), ItemReader(back)
    for key in objects.keys() - {"plain"}:
        assert new.view(back.objects[key]) == old.view(before.objects[key])
    assert new.read_object(back.objects["plain"]) == (1, 2)
    assert made.objects.keys() == back.objects.keys() == before.objects.keys()
    assert not trap.exists()


def test_values_come_from_args_in_the_checkpoint(tmp_path: Path) -> None:
    """As Megatron's ``fsdp_dtensor`` has them, of which nothing else is run; or from ``config.json``."""
    args = argparse.Namespace(tensor_model_parallel_size=2, trap=Trap(tmp_path / "trap"), other=Opaque())
    source = save(tmp_path / "source", {**experts_and_dense(), "args": args})
    values, notes = told(open_checkpoint(source), preset("megatron-swiglu"), {})
    assert (values, notes) == ({"tp_size": 2}, ["tp_size = 2, from args in the object args"])
    given, said = told(open_checkpoint(source), preset("megatron-swiglu"), {"tp_size": 4})
    assert (given, said) == ({"tp_size": 4}, ["tp_size = 4 as given; args in the object args has 2"])
    rewritten("split", source, tmp_path / "split", *preset("megatron-swiglu"))
    assert not (tmp_path / "trap").exists()
    put(source, {"config.json": b'{"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 4}'})
    values, _ = told(open_checkpoint(source), preset("hf-qkv"), {})
    assert values == {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}


EXPERTS = {"grouped": "experts.linear_fc1.weight0", "sequential": "experts.local_experts.0.linear_fc1.weight"}


def experts_and_dense(**args: int) -> dict[str, Any]:
    """Every linear_fc1 is ``gate, up`` of as many tensor-parallel ranks as a test takes it for."""
    fused = [*EXPERTS.values(), "linear_fc1.weight", "shared_experts.linear_fc1.weight", "experts.linear_fc1.bias0"]
    whole = {key: torch.arange(8.0) + 10 * n for n, key in enumerate(fused)}
    model = {
        f"mlp.{key}": value if "bias" in key else value[:, None].expand(8, 3).clone() for key, value in whole.items()
    }
    model |= {key.replace("fc1", "fc2"): torch.ones(3, 4) for key in model if "weight" in key}
    return {"model": model, **({"args": argparse.Namespace(**args)} if args else {})}


@pytest.mark.parametrize(
    ("args", "values", "ranks"),
    [
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, {}, (2, 1)),
        ({"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 4}, {}, (1, 4)),
        ({"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": None}, {}, (4, 4)),
        ({"tensor_model_parallel_size": 2}, {"etp_size": 1}, (2, 1)),
        ({}, {"tp_size": 2, "etp_size": 4}, (2, 4)),
        ({}, {"tp_size": 2}, (2, 2)),
    ],
)
def test_experts_are_divided_by_their_own_ranks(
    args: dict[str, int], values: dict[str, float], ranks: tuple[int, int], tmp_path: Path
) -> None:
    rules, state = preset("megatron-swiglu"), experts_and_dense(**args)
    source = save(tmp_path / "source", state)
    split = rewritten("split", source, tmp_path / "split", *rules, values=values)
    for key, whole in state["model"].items():
        if "fc1" in key:
            is_expert = ".experts." in key
            parts = [part.chunk(2) for part in whole.chunk(ranks[is_expert])]
            for half, suffix in enumerate(("_w", "_v")):
                expected = torch.cat([part[half] for part in parts])
                assert torch.equal(tensor_of(split, f"model.{key}{suffix}"), expected)
    merged = rewritten("merge", tmp_path / "split", tmp_path / "merged", *rules, values=values)
    assert not diff(open_checkpoint(source), merged, all_keys(open_checkpoint(source), merged))


def test_the_experts_ranks_are_told_and_not_contradicted(tmp_path: Path) -> None:
    source = save(tmp_path / "source", experts_and_dense(tensor_model_parallel_size=2, expert_tensor_parallel_size=1))
    options = (tmp_path / "new", "--preset", "megatron-swiglu", "--dry-run")
    assert "etp_size = 1, from args in the object args" in run_here("split", source, *options).stdout
    wrong = run_here("split", source, *options, "--value", "etp_size=2")
    assert_one_line(wrong, "--value etp_size=2, but it is 1 here (args in the object args)")
    bare = save(tmp_path / "bare", experts_and_dense())
    shown = run_here("split", bare, *options, "--value", "tp_size=2")
    assert "etp_size = 2, as tp_size: the default" in shown.stdout
