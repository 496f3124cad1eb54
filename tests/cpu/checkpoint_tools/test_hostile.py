"""Small files that would take all memory or all time, run something, or write on a terminal; damaged safetensors.

Each ends as other damage does: a line on standard error and exit code 2, or a problem in the list of verify.
"""

import hashlib
import io
import json
import math
import os
import pickle
import pickletools
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.checkpoint_tools.limited import Limited, Ran, limited
from tests.checkpoint_tools.saves import DOWN, FUSED, RULES, WITH_FUSED, entry_of, save
from tests.checkpoint_tools.tool import assert_one_line, made, names, run
from tests.loading import edit_metadata
from tests.tiers import every_nth

FAMILY = "[source]\nhf = ''\na = ''\n[[name]]\na = '{name}'\nhf = 'new.{name}'\n"
COMMANDS = """
inspect @checkpoint
inspect @checkpoint --json
verify @checkpoint --data --finite
diff @checkpoint @checkpoint
split @checkpoint @split --rules @rules.toml --dry-run
convert @checkpoint @converted --dry-run
merge @checkpoint @merged --rules @rules.toml --dry-run
convert @checkpoint @made.pt --to torch
rename @checkpoint @renamed --family @own.toml --from a --to hf
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[Limited]:
    with limited() as process:
        yield process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "own.toml").write_text(FAMILY)
    return save(tmp_path / "checkpoint", WITH_FUSED)


def all_end(tool: Limited, folder: Path) -> list[Ran]:
    """Every command ends as it should; what they say."""
    commands = COMMANDS.replace("@", f"{folder.parent}/").strip().splitlines()
    runs = [ended(tool, *command.split()) for command in commands]
    (folder.parent / "made.pt").unlink(missing_ok=True)
    shutil.rmtree(folder.parent / "renamed", ignore_errors=True)
    return runs


def ended(tool: Limited, *command: object, code: int | None = None) -> Ran:
    """It ends as it should, and with this code."""
    ran = tool.run(*command)
    assert ran.code in ((0, 1, 2) if code is None else (code,)), ran
    assert not any(text in ran.output for text in ("error: unexpected", "not enough memory", "Traceback")), ran
    assert not any(letter < " " and letter != "\n" for letter in ran.output), ran
    assert ran.code != 2 or len(ran.output.splitlines()) == 1, ran
    return ran


# Metadata ------------------------------------------------------------------------------------------------------------


def laughs() -> list[Any]:
    """A list that is small, and whose text would be longer than any disk."""
    found: list[Any] = []
    for _ in range(90):
        found = [found, found]
    return found


PLACES = [
    *("version", "planner_data", "storage_data", "state_dict_metadata", "path.of_fused", "entries.more", "chunk.sizes"),
    *("info.relative_path", "info.offset", "info.length", "info.transform_descriptors", "entry.size", "entry.chunks"),
    *("entry.properties", "storage.modules", "storage.save_id"),
]
VALUES: list[Any] = [
    *(laughs(), [laughs()], 10**400, 10**5000, 10**18, -1, (2**62,) * 64, None),
    *("a\0b", "a\udc80b", "\x1b]0;title\x07\x1b[2J", "x" * 100_000),
]


@contextmanager
def edited(folder: Path, edit: Callable[[Metadata], object]) -> Iterator[None]:
    """For so long, its metadata are these."""
    original = (folder / ".metadata").read_bytes()
    edit_metadata(folder, edit)
    try:
        yield
    finally:
        (folder / ".metadata").write_bytes(original)


def put(metadata: Metadata, place: str, value: Any) -> None:
    owner, _, name = place.rpartition(".")
    entry, info = entry_of(metadata, f"model.{FUSED}"), next(iter(metadata.storage_data.values()))
    owners = {"": metadata, "info": info, "entry": entry, "chunk": entry.chunks[0], "storage": metadata.storage_meta}
    if owner == "path":
        metadata.planner_data[f"model.{FUSED}"] = value
    elif owner == "entries":
        metadata.state_dict_metadata[name] = value
    else:
        setattr(owners[owner], name, value)


@pytest.mark.parametrize("place", every_nth(map(pytest.param, PLACES), 3))
def test_values_where_none_of_their_kind_belongs(tool: Limited, folder: Path, place: str) -> None:
    for value in VALUES:
        with edited(folder, lambda metadata, value=value: put(metadata, place, value)):
            all_end(tool, folder)


def test_keys_of_all_kinds(tool: Limited, folder: Path) -> None:
    keys = ("a\0b", "a\udc80b", "\x1b[31mred", "9" * 5000, "\u202egnp", "x" * 100_000, "", "x\ny")
    edit_metadata(folder, lambda metadata: [add_key(metadata, key) for key in keys])
    inspected, *_ = all_end(tool, folder)
    assert inspected.code == 0
    assert "\\x1b[31mred" in inspected.output
    assert "\\u202egnp" in inspected.output
    assert "\nx\\ny  " in inspected.output  # in one row


def add_key(metadata: Metadata, name: str) -> None:
    """A key that is the same tensor as another."""
    if name not in metadata.state_dict_metadata:
        metadata.state_dict_metadata[name] = entry_of(metadata, f"model.{FUSED}")
        place = MetadataIndex(f"model.{FUSED}", (0, 0))
        metadata.storage_data[MetadataIndex(name, (0, 0))] = metadata.storage_data[place]


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(*words: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in words)


def name(module: str, *attribute: str) -> bytes:
    """A name, in the opcodes of protocol 4, which also takes names with dots."""
    return text(module, ".".join(attribute)) + b"\x93"


METADATA = name("torch.distributed.checkpoint.metadata", "Metadata")
HOSTILE = {
    "a Size of bytes, again and again": pickled(
        b"]\x94" + name("torch", "Size") + b"\x94B" + struct.pack("<I", 1 << 20) + bytes(1 << 20),
        b"\x94h\x00(" + b"h\x01h\x02\x85R" * 5000 + b"e",
    ),
    "a memo of 2^31 places": pickled(b"Nr\xff\xff\xff\x7f"),
    "a deep key": pickled(b"})", b"\x85" * 1_000_000, b"K\x00s"),
    "a deep set": pickled(b"\x8f()", b"\x85" * 1_000_000, b"\x90"),
    "long arguments, again and again": pickled(
        b"(" + b"K\x01" * 500_000 + b"t\x94" + METADATA + b"\x94]\x94(" + b"h\x01h\x00\x81" * 20_000 + b"e"
    ),
    "a byte array of 2^60": pickled(b"\x96" + struct.pack("<Q", 1 << 60)),
    "a text of 2^60": pickled(b"\x8d" + struct.pack("<Q", 1 << 60)),
    "a number of 2^31 bytes": pickled(b"\x8b" + struct.pack("<I", (1 << 31) - 1)),
    "copies of an OrderedDict": pickled(
        name("collections", "OrderedDict") + b"\x94]\x94(" + b"K\x01K\x02\x86" * 1000 + b"e\x940]",
        b"(" + b"h\x00h\x01\x85R" * 5000 + b"e",
    ),
}


@pytest.mark.parametrize("case", every_nth(map(pytest.param, HOSTILE), 3))
def test_pickles(tool: Limited, folder: Path, case: str) -> None:
    (folder / ".metadata").write_bytes(HOSTILE[case])
    for ran in all_end(tool, folder):
        assert ran.code == 2
        assert "cannot be read as the metadata of a checkpoint" in ran.output


def test_names_are_not_run(folder: Path) -> None:
    trap = folder / "trap"
    dcp = "torch.distributed.checkpoint"
    for module, attribute in (
        *(("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("torch", "load")),
        *((f"torch{inside}", "os.system") for inside in ("", ".serialization", ".distributed.checkpoint.metadata")),
        *((f"{dcp}.filesystem", "FileSystemWriter"), (f"{dcp}.planner", "LoadPlan")),
        *(("copyreg", "_reconstructor"), ("pathlib", "Path.write_text")),
    ):
        (folder / ".metadata").write_bytes(pickled(name(module, attribute) + text(f"touch {trap}") + b"\x85R"))
        assert_one_line(run("inspect", folder), f"asks for {module}.{attribute}, which the metadata")
    assert not trap.exists()
    # What is allowed gives nothing: getattr(Metadata, "__init__") is not called; BUILD changes neither class.
    state = b"N}" + text("get") + name("torch", "Size") + b"s\x86b"
    for content, message in {
        name("builtins", "getattr") + METADATA + text("__init__") + b"\x86R)R": "not callable",
        METADATA + state: "a type gets a state",
        name("torch", "Size") + state: "a type gets a state",
    }.items():
        (folder / ".metadata").write_bytes(pickled(content))
        assert_one_line(run("inspect", folder), message)
    assert run("inspect", save(folder.parent / "another", WITH_FUSED)).returncode == 0


# Items, files of torch.save, and files beside the data ---------------------------------------------------------------


def archive(pickle_size: int, content: bytes = b"") -> bytes:
    """As torch.save makes it; if it is to be large, compressed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if pickle_size else zipfile.ZIP_STORED) as made:
        with made.open("archive/data.pkl", "w") as stream:
            stream.write(content)
            for _ in range(pickle_size >> 20):
                stream.write(bytes(1 << 20))
        made.writestr("archive/version", "3\n")
    return buffer.getvalue()


def item_with(folder: Path, content: bytes) -> None:
    """The first object's item is this."""
    (folder / "other.distcp").write_bytes(content)

    def edit(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if "params" in index.fqn:
                info.relative_path, info.offset, info.length = "other.distcp", 0, len(content)

    edit_metadata(folder, edit)


@pytest.mark.parametrize(
    "case", ["deep", *(pytest.param(each, marks=pytest.mark.long) for each in ("laughs", "large"))]
)
def test_objects(tool: Limited, folder: Path, case: str) -> None:
    if case == "large":
        item_with(folder, archive((2 << 30) - (1 << 20)))
        assert (folder / "other.distcp").stat().st_size < 3 << 20
    else:
        item_with(folder, archive(0, HOSTILE["a deep key"] if case == "deep" else pickle.dumps(laughs(), 2)))
    runs = all_end(tool, folder)
    if case == "large":
        assert [ran.code for ran in runs] == [0, 0, 1, 0, 2, 2, 2, 2, 2]
        assert "is compressed or encrypted, and torch.save does neither" in runs[2].output
    assert ended(tool, "diff", folder, save(folder.parent / "another", WITH_FUSED)).code in (1, 2)


def test_elements_that_are_stored_once(tool: Limited, tmp_path: Path) -> None:
    """As many as there are numbers: no item is made that large, and no object; one of another kind is not compared."""
    folder = save(tmp_path / "checkpoint", {"x": torch.ones(8), "w": torch.ones(1)})
    place = folder / "other.distcp"
    torch.save(torch.ones(1).expand(1 << 33), place)

    def edit(metadata: Metadata) -> None:
        entry = entry_of(metadata, "x")
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 33])
        info = metadata.storage_data[MetadataIndex("x", (0,))]
        info.relative_path, info.offset, info.length = place.name, 0, place.stat().st_size

    edit_metadata(folder, edit)
    assert "is smaller than the tensor in it" in ended(tool, "verify", folder, "--finite", code=1).output
    ended(tool, "convert", folder, tmp_path / "made", code=2)
    for name, one in {"large": torch.ones(1).expand(1 << 33), "sparse": torch.eye(2).to_sparse()}.items():
        a, b = (save(tmp_path / f"{name}{n}", {"o": (one * 1 if n and name == "sparse" else one, n)}) for n in (0, 1))
        assert "their bytes differ; they cannot be looked into" in ended(tool, "diff", a, b, code=1).output


def test_numbers_that_are_too_large(tool: Limited, folder: Path) -> None:
    """In a manifest and in a record whose checksums are right, and in a config."""
    body = json.dumps({"metadata": {"nbytes": 1, "sha256": ""}, "files": {"a": [[math.inf, 1, 1]]}})
    head = {"format": "fsdp_offload checksums 2", "sha256": hashlib.sha256(body.encode()).hexdigest()}
    (folder / ".checksums").write_text(f"{json.dumps(head)}\n{body}\n")
    assert ".checksums is damaged" in ended(tool, "verify", folder, code=1).output
    (folder / ".checksums").unlink()
    rule = {"fused": "gate_up", "parts": [f"mlp.{part}.weight" for part in ("gate", "up")], "sizes": [10**4300 - 1] * 2}
    splits = [{"rules": [rule], "values": {}, "fused": ["gate_up"]}]
    record = {"format": "checkpoint_tools split 1", "crc32": zlib.crc32(json.dumps(splits).encode()), "splits": splits}
    split = save(folder.parent / "split", {part: torch.ones(4, 3) for part in rule["parts"]})
    (split / "split_record.json").write_text(json.dumps(record))
    (split / "config.json").write_text('{"num_experts": 1000000000000}')
    rename = ("rename", split, folder.parent / "new", "--family", "qwen3-moe", "--from", "hf", "--to", "torchtitan")
    assert "num_experts is 1,000,000,000,000, and a tensor" in ended(tool, *rename, code=2).output
    assert "cannot be evaluated" in ended(tool, "merge", split, folder.parent / "merged", code=2).output


def test_a_key_of_many_words(tool: Limited, folder: Path) -> None:
    copy = save(folder.parent / "words", {**WITH_FUSED, "a." * 20_000: torch.ones(1)})
    ended(tool, "split", copy, folder.parent / "made", "--rules", folder.parent / "rules.toml", "--dry-run", code=0)


DEEP_MEMBER = pickled(b"}" + text("a") + name("builtins", "set") + b"](" + b")" + b"\x85" * 1_000_000 + b"e\x85Rs")


@pytest.mark.parametrize("case", [*HOSTILE, "a deep member of a set"])
def test_pickles_in_a_file_of_torch_save(tool: Limited, tmp_path: Path, case: str) -> None:
    (tmp_path / "model.pt").write_bytes(archive(0, HOSTILE.get(case, DEEP_MEMBER)))
    ended(tool, "convert", tmp_path / "model.pt", tmp_path / "made", code=2)


def test_values_that_are_larger_than_their_file(tool: Limited, tmp_path: Path) -> None:
    for value, message in (
        (laughs(), "has more than 10,000,000 values"),
        (torch.ones(1).expand(1 << 40), "has a tensor of 4.0 TiB in 4 bytes"),
    ):
        torch.save({"a\x1b[2J": value}, tmp_path / "model.pt")
        assert message in ended(tool, "convert", tmp_path / "model.pt", tmp_path / "made", code=2).output
    assert names(tmp_path) == ["model.pt"]


def test_two_values_in_one_place_of_a_state_dict(tool: Limited, folder: Path) -> None:
    inside = ("model", FUSED)
    for path in (inside, (*inside, "deeper"), ("model",)):
        with edited(folder, lambda metadata, path=path: metadata.planner_data.update({f"model.{DOWN}": path})):
            ran = ended(tool, "convert", folder, folder.parent / "made.pt", "--to", "torch", code=2)
        assert "by its path in the state dict; one of the two names is damaged" in ran.output


def test_files_beside_the_data(tool: Limited, folder: Path) -> None:
    """That say what is merged, and with which values; none of them is read if it is too large, or waited for."""
    contents = (b"[" * 1_000_000, b'{"format": "' + b"\x1b[2J" * 10_000 + b'"}', b'{"tp_size": ' + b"9" * 4000 + b"}")
    for file in (folder / name for name in ("config.json", "metadata.json", "split_record.json", "common.pt")):
        for content in contents:
            file.write_bytes(content)
            all_end(tool, folder)
        os.truncate(file, 1 << 40)
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
OPCODES = st.sampled_from([ord(opcode.code) for opcode in pickletools.opcodes])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_metadata(tool: Limited, folder: Path, data: st.DataObject) -> None:
    """Values of any kind anywhere, and keys; or bytes that are exchanged for others, opcodes among them."""
    place, value, names = (data.draw(each) for each in (st.sampled_from(PLACES), plain, st.lists(st.text())))

    def edit(metadata: Metadata) -> None:
        for name in names:
            add_key(metadata, name)
        put(metadata, place, value)

    are_bytes = data.draw(st.booleans())
    with edited(folder, edit if not are_bytes else lambda metadata: None):
        content = bytearray((folder / ".metadata").read_bytes())
        for _ in range(data.draw(st.integers(1, 5)) if are_bytes else 0):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255) | OPCODES)
        (folder / ".metadata").write_bytes(content)
        all_end(tool, folder)


# Safetensors ----------------------------------------------------------------------------------------------------------


def tensor(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with whatever header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


NOT_WHOLE: dict[str, tuple[Any, ...]] = {
    "not-json": (b"{'a'", b""),
    "not-utf8": (b"\xff\xfe{}", b""),
    "nested": (b"[" * 100_000, b""),
    "repeated": (b'{"a": {}, "a": {}}', b""),
    "negative": ({"a": tensor(0, 8, [-2])}, b""),
    "unknown-dtype": ({"a": tensor(0, 8, dtype="F6_E2M3")}, bytes(8)),
    "overlapping": ({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)),
    "cut-short": ({"a": tensor(0, 8)}, bytes(7)),
    "too-long": ({"a": tensor(0, 8)}, bytes(9)),
    "10^400": ({"x\x1b[2J": tensor(0, 4, [10**400])}, bytes(4)),
    "5000 dimensions": ({"x\x1b[2J": tensor(0, 4, [1] * 5000)}, bytes(4)),
    "an offset of 10^400": ({"x\x1b[2J": tensor(0, 10**400, [1])}, bytes(4)),
    "a long text": ({"x\x1b[2J": tensor(0, 4, ["x" * 9999])}, bytes(4)),
    "many digits": (b'{"x": ' + b"9" * 5000 + b"}", bytes(4)),
    **{f"length {length}": ({}, b"", length) for length in (0, 1, 3, 10**8 + 1, 2**63)},
}
PARTS = {'{"a": {"saved_offsets": [0, 0]}}': "ValueError: offsets of other dimensions", "{}": "KeyError: 'a'"}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_headers_that_are_wrong(tool: Limited, tmp_path: Path, name: str) -> None:
    path = safetensors_file(tmp_path / "source" / "model.safetensors", *NOT_WHOLE[name])
    for command in (("convert", path, tmp_path / "new"), ("convert", path.parent, tmp_path / "new"), ("verify", path)):
        ran = ended(tool, *command, code=2)
        assert "model.safetensors is not a whole safetensors file" in ran.output
        assert len(ran.output) < 1000
    assert names(tmp_path) == ["source"]


def test_folders_that_are_wrong(tmp_path: Path) -> None:
    source = save(tmp_path / "source", WITH_FUSED)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index, objects, format_ = "model.safetensors.index.json", "optimizer.json", '{"format": "checkpoint_tools 2"'
    whole = made("convert", source, tmp_path / "whole", "--shard-size", 80)
    twice = {"copy.safetensors": (whole / first).read_bytes(), index: None}
    cases: list[tuple[dict[str, bytes | str | None], str]] = [  # files of it that are others, or gone
        ({second: None}, f"{second}: No such file"),
        (twice, "is in copy.safetensors and in model-00001-of-00002.safetensors"),
        ({index: None, f"a.{index}": "{}", f"b.{index}": "{}"}, f"has several indices (a.{index}, b.{index})"),
        ({index: "{}"}, "has no weight_map"),
        ({index: "{"}, f"{index} is no JSON"),
        ({index: '{"weight_map": {"a": "../made/x.safetensors"}}'}, "which is outside of the folder"),
        ({index: f'{{"weight_map": {{"lost": "{first}"}}}}'}, "does not have lost, which"),
        ({objects: "{}"}, f"{objects} is not what these tools write"),
        ({objects: format_ + "}"}, "optimizer.json is damaged (KeyError"),
        ({objects: format_ + ', "stored": {"a": "?"}, "paths": {}}'}, "optimizer.json is damaged (Error: "),
        ({objects: None}, ""),
    ]
    for number, (files, match) in enumerate(cases):
        folder = Path(shutil.copytree(whole, tmp_path / f"{number}"))
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content or b"")
            if content is None:
                (folder / name).unlink()
        if match:
            assert_one_line(run("convert", folder, tmp_path / "new"), match)
            assert not (tmp_path / "new").exists()
        else:
            made("convert", folder, tmp_path / "new")
    (tmp_path / "short.safetensors").write_bytes(b"\0\0")
    assert_one_line(run("convert", tmp_path / "short.safetensors", tmp_path / "other"), "is not a whole")
    for said, match in PARTS.items():
        header = {"__metadata__": {"DCP_SHARDING_INFO": said}, "a": tensor(0, 8)}
        path = safetensors_file(tmp_path / "model.safetensors", header, bytes(8))
        told = f"has DCP_SHARDING_INFO that do not fit ({match})"
        assert_one_line(run("convert", path, tmp_path / "other"), told)
