"""Small files that would take all memory or all time, and names that no terminal should see.

Each ends as other damage does: a line on standard error and exit code 2, or a problem in the list of verify.
"""

import io
import os
import pickle
import pickletools
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from checkpoint_tools.core.tables import Table
from checkpoint_tools.core.text import natural_order, parse_bytes
from tests.checkpoint_tools.checkpoints import ROOT, save
from tests.checkpoint_tools.converted import safetensors_file
from tests.checkpoint_tools.limited import Limited, Ran, limited
from tests.checkpoint_tools.offline import DOWN, FUSED
from tests.loading import edit_metadata
from tests.tiers import every_nth

STATE = {
    "model": {FUSED: torch.arange(24.0).view(8, 3), DOWN: torch.ones(3, 4)},
    "optim": {"state": {FUSED: {"exp_avg": torch.ones(8, 3)}}, "param_groups": [{"params": [FUSED, DOWN]}]},
}
RULES = """
[[rule]]
fused = '{p}gate_up.weight'
parts = ['{p}gate.weight', '{p}up.weight']
"""


FAMILY = """
[source]
hf = ''
a = ''
[[name]]
a = '{name}'
hf = 'new.{name}'
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[Limited]:
    with limited() as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "own.toml").write_text(FAMILY)
    return save(tmp_path / "checkpoint", STATE)


def commands(folder: Path) -> Iterator[tuple[object, ...]]:
    yield "inspect", folder
    yield "inspect", folder, "--json"
    yield "verify", folder, "--data", "--finite"
    yield "diff", folder, folder
    yield "split", folder, folder.parent / "split", "--rules", folder.parent / "rules.toml", "--dry-run"
    yield "convert", folder, folder.parent / "converted", "--dry-run"
    yield "merge", folder, folder.parent / "merged", "--rules", folder.parent / "rules.toml", "--dry-run"
    yield "convert", folder, folder.parent / "made.pt", "--to", "torch"
    yield (
        "rename",
        folder,
        folder.parent / "renamed",
        "--family",
        folder.parent / "own.toml",
        "--from",
        "a",
        "--to",
        "hf",
    )


def all_end(tool: Limited, folder: Path) -> list[Ran]:
    """Every command ends as it should; what they say."""
    runs = [tool.run(*command) for command in commands(folder)]
    (folder.parent / "made.pt").unlink(missing_ok=True)
    shutil.rmtree(folder.parent / "renamed", ignore_errors=True)
    for run in runs:
        assert run.code in (0, 1, 2), run
        assert "error: unexpected" not in run.output, run
        assert "not enough memory" not in run.output, run
        assert "Traceback" not in run.output, run
        assert not any(letter < " " and letter != "\n" for letter in run.output), run
        assert run.code != 2 or len(run.output.splitlines()) == 1, run
    return runs


# Metadata ------------------------------------------------------------------------------------------------------------


def laughs() -> list[Any]:
    """A list that is small, and whose text would be longer than any disk."""
    found: list[Any] = []
    for _ in range(90):
        found = [found, found]
    return found


def deep() -> Any:
    """A tuple in a tuple in a tuple."""
    found: Any = ()
    for _ in range(200_000):
        found = (found,)
    return found


def index_of(metadata: Metadata) -> MetadataIndex:
    return next(iter(metadata.storage_data))


def entry_of(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata[f"model.{FUSED}"]


def info_of(metadata: Metadata) -> Any:
    return metadata.storage_data[index_of(metadata)]


PLACES: dict[str, Callable[[Metadata, Any], object]] = {
    "path": lambda metadata, value: setattr(info_of(metadata), "relative_path", value),
    "offset": lambda metadata, value: setattr(info_of(metadata), "offset", value),
    "length": lambda metadata, value: setattr(info_of(metadata), "length", value),
    "extensions": lambda metadata, value: setattr(info_of(metadata), "transform_descriptors", value),
    "version": lambda metadata, value: setattr(metadata, "version", value),
    "size": lambda metadata, value: setattr(entry_of(metadata), "size", value),
    "chunks": lambda metadata, value: setattr(entry_of(metadata), "chunks", value),
    "chunk": lambda metadata, value: entry_of(metadata).chunks.append(value),
    "chunk size": lambda metadata, value: setattr(entry_of(metadata).chunks[0], "sizes", value),
    "properties": lambda metadata, value: setattr(entry_of(metadata), "properties", value),
    "entry": lambda metadata, value: metadata.state_dict_metadata.update({"more": value}),
    "planner's data": lambda metadata, value: setattr(metadata, "planner_data", value),
    "planner's path": lambda metadata, value: metadata.planner_data.update({f"model.{FUSED}": value}),
    "modules": lambda metadata, value: setattr(metadata.storage_meta, "modules", value),
    "save": lambda metadata, value: setattr(metadata.storage_meta, "save_id", value),
    "storage": lambda metadata, value: setattr(metadata, "storage_data", value),
    "keys": lambda metadata, value: setattr(metadata, "state_dict_metadata", value),
}
VALUES: dict[str, Any] = {
    "laughs": laughs(),
    "10^400": 10**400,
    "10^5000": 10**5000,
    "10^18": 10**18,
    "negative": -1,
    "NUL": "a\0b",
    "surrogate": "a\udc80b",
    "escape": "\x1b]0;title\x07\x1b[2J",
    "long": "x" * 100_000,
    "many": (2**62,) * 64,
    "nothing": None,
}


@pytest.mark.parametrize("place", every_nth(map(pytest.param, PLACES), 3))
def test_values_where_none_of_their_kind_belongs(tool: Limited, folder: Path, place: str) -> None:
    original = (folder / ".metadata").read_bytes()
    for value in VALUES.values():
        edit_metadata(folder, lambda metadata, value=value: PLACES[place](metadata, value))
        all_end(tool, folder)
        (folder / ".metadata").write_bytes(original)


def test_keys_of_all_kinds(tool: Limited, folder: Path) -> None:
    def edit(metadata: Metadata) -> None:
        for name in ("a\0b", "a\udc80b", "\x1b[31mred", "9" * 5000, "\u202egnp", "x" * 100_000, ""):
            add_key(metadata, name)

    edit_metadata(folder, edit)
    inspected, *_ = all_end(tool, folder)
    assert inspected.code == 0
    assert "\\x1b[31mred" in inspected.output
    assert "\\u202egnp" in inspected.output


def add_key(metadata: Metadata, name: str) -> None:
    """A key that is the same tensor as another."""
    if name not in metadata.state_dict_metadata:
        metadata.state_dict_metadata[name] = entry_of(metadata)
        place = MetadataIndex(f"model.{FUSED}", (0, 0))
        metadata.storage_data[MetadataIndex(name, (0, 0))] = metadata.storage_data[place]


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


SIZE = b"\x8c\x05torch\x8c\x04Size\x93\x94"
HOSTILE = {
    "a Size of bytes, again and again": pickled(
        b"]\x94",
        SIZE,
        b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20),
        b"\x94",
        b"h\x00(",
        b"h\x01h\x02\x85R" * 5000,
        b"e",
    ),
    "a memo of 2^31 places": pickled(b"Nr\xff\xff\xff\x7f"),
    "a deep key": pickled(b"})", b"\x85" * 1_000_000, b"Ks"),
    "a deep set": pickled(b"\x8f()", b"\x85" * 1_000_000, b"\x90"),
    "long arguments, again and again": pickled(
        b"(" + b"K\x01" * 500_000 + b"t\x94",
        b"\x8c\x29torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93\x94".replace(b"\x29", bytes([37])),
        b"]\x94(" + b"h\x01h\x00\x81" * 20_000 + b"e",
    ),
    "a byte array of 2^60": pickled(b"\x96" + struct.pack("<Q", 1 << 60)),
    "a text of 2^60": pickled(b"\x8d" + struct.pack("<Q", 1 << 60)),
    "a number of 2^31 bytes": pickled(b"\x8b" + struct.pack("<I", (1 << 31) - 1)),
    "copies of an OrderedDict": pickled(
        b"\x8c\x0bcollections\x8c\x0bOrderedDict\x93\x94]\x94(",
        b"".join(b"K\x01K\x02\x86" for _ in range(1000)),
        b"e\x94",
    ),
}


@pytest.mark.parametrize("name", every_nth(map(pytest.param, HOSTILE), 3))
def test_pickles(tool: Limited, folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(HOSTILE[name])
    for run in all_end(tool, folder):
        assert run.code == 2
        assert "cannot be read as the metadata of a checkpoint" in run.output


# Items ---------------------------------------------------------------------------------------------------------------


def item_with(folder: Path, content: bytes) -> None:
    """The first object's item is this."""
    (folder / "other.distcp").write_bytes(content)

    def edit(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if "params" in index.fqn:
                info.relative_path, info.offset, info.length = "other.distcp", 0, len(content)

    edit_metadata(folder, edit)


def archive(pickle_size: int, content: bytes | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        with made.open("archive/data.pkl", "w") as stream:
            if content is not None:
                stream.write(content)
            for _ in range(pickle_size >> 20):
                stream.write(bytes(1 << 20))
        made.writestr("archive/version", "3\n")
    return buffer.getvalue()


@pytest.mark.long
def test_a_pickle_that_is_inflated(tool: Limited, folder: Path) -> None:
    item_with(folder, archive((2 << 30) - (1 << 20)))
    assert (folder / "other.distcp").stat().st_size < 3 << 20
    runs = all_end(tool, folder)
    assert [run.code for run in runs] == [0, 0, 1, 0, 2, 2, 2, 2, 2]
    assert "it would be inflated to 2,146,435," in runs[2].output


@pytest.mark.parametrize("name", [pytest.param("laughs", marks=pytest.mark.long), "deep"])
def test_objects(tool: Limited, folder: Path, name: str) -> None:
    value = {"laughs": pickle.dumps(laughs(), 2), "deep": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ks."}[name]
    item_with(folder, archive(0, value))
    all_end(tool, folder)
    other = save(folder.parent / "another", STATE)
    run = tool.run("diff", folder, other)
    assert run.code in (1, 2)
    assert "error: unexpected" not in run.output


def test_headers_of_safetensors(tool: Limited, tmp_path: Path) -> None:
    for number, (shape, offsets) in enumerate(
        [([10**400], [0, 4]), ([0, 10**400], [0, 0]), ([1] * 5000, [0, 4]), ([1], [0, 10**400]), (["x" * 9999], [0, 4])]
    ):
        header = {"x\x1b[2J": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
        file = safetensors_file(tmp_path / f"{number}" / "model.safetensors", header, bytes(4))
        for command in ("inspect", "verify"):
            run = tool.run(command, file)
            assert run.code == 2
            assert len(run.output.splitlines()) == 1
            assert len(run.output) < 1000
            assert "\x1b" not in run.output
    long = safetensors_file(tmp_path / "long" / "model.safetensors", b'{"x": ' + b"9" * 5000 + b"}", bytes(4))
    assert tool.run("verify", long).code == 2


# Files of torch.save, and files beside the data ----------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_in_a_file_of_torch_save(tool: Limited, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.pt").write_bytes(archive(0, HOSTILE[name]))
    run = tool.run("convert", tmp_path / "model.pt", tmp_path / "made")
    assert run.code == 2
    assert len(run.output.splitlines()) == 1
    assert "error: unexpected" not in run.output
    assert "not enough memory" not in run.output


def test_values_that_are_larger_than_their_file(tool: Limited, tmp_path: Path) -> None:
    values = {
        "laughs": (laughs(), "has more than 10,000,000 values"),
        "expanded": (torch.ones(1).expand(1 << 40), "has a tensor of 4.0 TiB in 4 bytes"),
    }
    for name, (value, message) in values.items():
        torch.save({"a\x1b[2J": value}, tmp_path / f"{name}.pt")
        run = tool.run("convert", tmp_path / f"{name}.pt", tmp_path / "made")
        assert run.code == 2
        assert message in run.output
        assert "\x1b" not in run.output
    assert not (tmp_path / "made").exists()


def test_two_values_in_one_place_of_a_state_dict(tool: Limited, folder: Path) -> None:
    inside = ("model", FUSED)
    for path in (inside, (*inside, "deeper"), ("model",)):
        original = (folder / ".metadata").read_bytes()
        edit_metadata(folder, lambda metadata, path=path: metadata.planner_data.update({f"model.{DOWN}": path}))
        run = tool.run("convert", folder, folder.parent / "made.pt", "--to", "torch")
        assert run.code == 2
        assert "by its path in the state dict; one of the two names is damaged" in run.output
        (folder / ".metadata").write_bytes(original)


def test_files_beside_the_data(tool: Limited, folder: Path) -> None:
    """That say what is merged, and with which values; none of them is read if it is too large, or waited for."""
    for name in ("config.json", "metadata.json", "split_record.json", "common.pt"):
        file = folder / name
        for content in (
            b"[" * 1_000_000,
            b'{"format": "' + b"\x1b[2J" * 10_000 + b'"}',
            b'{"tp_size": ' + b"9" * 4000 + b"}",
        ):
            file.write_bytes(content)
            all_end(tool, folder)
        with file.open("wb") as stream:
            stream.truncate(1 << 40)
        all_end(tool, folder)
        file.unlink()
        os.mkfifo(file)
        all_end(tool, folder)
        file.unlink()


# Any metadata --------------------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(sorted(PLACES)), value=plain, names=st.lists(st.text()))
def test_any_metadata(tool: Limited, folder: Path, place: str, value: Any, names: list[str]) -> None:
    original = (folder / ".metadata").read_bytes()

    def edit(metadata: Metadata) -> None:
        for name in names:
            add_key(metadata, name)
        PLACES[place](metadata, value)

    edit_metadata(folder, edit)
    try:
        all_end(tool, folder)
    finally:
        (folder / ".metadata").write_bytes(original)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_opcodes(tool: Limited, folder: Path, data: st.DataObject) -> None:
    """Bytes of the metadata are exchanged for others, opcodes among them."""
    original = (folder / ".metadata").read_bytes()
    content = bytearray(original)
    opcodes = st.sampled_from([ord(opcode.code) for opcode in pickletools.opcodes])
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255) | opcodes)
    (folder / ".metadata").write_bytes(content)
    try:
        all_end(tool, folder)
    finally:
        (folder / ".metadata").write_bytes(original)


# Output and signals --------------------------------------------------------------------------------------------------


def test_an_output_of_ascii(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "checkpoint_tools", "inspect", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert b"8 x 3" in run.stdout


def test_help_and_wrong_options_do_not_wait_for_torch(folder: Path, tmp_path: Path) -> None:
    """With a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise AssertionError('rich is imported')")
    cases: dict[tuple[object, ...], tuple[int, str]] = {
        ("--help",): (0, "Usage"),
        ("split", "--help"): (0, "Usage"),
        ("--version",): (0, "checkpoint_tools of fsdp-offload"),
        ("verify",): (2, "Missing argument"),
        ("verify", folder, "--no-such-option"): (2, "No such option"),
        ("verify", folder, "--max-memory", "much"): (2, "error: 'much' is not a size"),
        ("diff", folder, folder, "--max-memory", "9" * 5000): (2, "is not a size"),
        ("split", folder, "x", "--value", "tp_size=two"): (2, "--value is NAME=NUMBER"),
        ("convert", folder, "x", "--what", "else"): (2, "--what is model"),
        ("convert", folder, "x", "--dtype", "int4"): (2, "--dtype is fp32, bf16, fp16, fp64, not int4"),
        ("convert", folder, "x.pt", "--to", "torch", "--what", "model"): (2, "all is taken as it is"),
        ("convert", "x.pt", "x", "--exclude", "*"): (2, "--exclude is not for files of torch.save"),
        ("merge", "--help"): (0, "Usage"),
        ("merge", folder, "x", "--only", "*", "--value", "tp_size=two"): (2, "--value is NAME=NUMBER"),
        ("merge", folder, "x", "--yes", "--json"): (2, "--json is for --dry-run"),
        ("rename", "--help"): (0, "Usage"),
        ("rename", folder, "x"): (2, "Missing option"),
        ("rename", folder, "x", "--family", "llama", "--from", "hf", "--to", "megatron", "--value", "n=two"): (
            2,
            "--value is NAME=NUMBER",
        ),
    }
    for arguments, (code, text) in cases.items():
        run = subprocess.run(
            [sys.executable, "-m", "checkpoint_tools", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == code, run
        assert text in " ".join((run.stdout + run.stderr).split()), run


@pytest.mark.usefixtures("interrupts_reach_children")
def test_ctrl_c_while_modules_are_imported(folder: Path, tmp_path: Path) -> None:
    for module in ("torch", "typer"):
        place = tmp_path / module
        place.mkdir()
        (place / f"{module}.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass")
        run = subprocess.run(
            [sys.executable, "-m", "checkpoint_tools", "verify", folder],
            env={**os.environ, "PYTHONPATH": f"{place}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (run.returncode, run.stdout, run.stderr) == (128 + signal.SIGINT, "", ""), module


def test_what_should_not_happen_is_a_line_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, checkpoint_tools.stored.opening as o; o.open_checkpoint = None; import runpy; sys.argv[0] = 'x'; "
    )
    code += "runpy.run_module('checkpoint_tools', None, '__main__')"
    run = subprocess.run(
        [sys.executable, "-c", code, "inspect", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: unexpected TypeError")
    assert len(run.stderr.splitlines()) == 1
    monkeypatch.setenv("CHECKPOINT_TOOLS_TRACEBACK", "1")
    run = subprocess.run(
        [sys.executable, "-c", code, "inspect", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Traceback" in run.stderr


def test_completion() -> None:
    """As the shell asks for it; --show-completion looks at which shell has started it, and a test's is no shell."""
    run = subprocess.run(
        [sys.executable, "-c", "from checkpoint_tools.__main__ import main; main()"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "_CHECKPOINT_TOOLS_COMPLETE": "source_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_checkpoint_tools_completion()" in run.stdout


def test_sizes_and_orders_of_long_digits() -> None:
    keys = ["x." + "9" * 5000, "x.10", "x.9", "x.010", "x"]
    assert sorted(keys, key=natural_order) == ["x", "x.9", "x.10", "x.010", "x." + "9" * 5000]
    assert parse_bytes("2GiB") == 2 << 30


def test_a_key_of_two_lines_is_one_row() -> None:
    table = Table("key", numbers=["size"])
    table.add_row("x\ny", "1")
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert console.file.getvalue() == "key   size\nx\\ny     1\n"  # type: ignore[attr-defined]
