"""A single bit that is flipped anywhere in a checkpoint is noticed by everything that reads all of it.

Where it is sealed: anywhere at all. Elsewhere, in all that has a CRC-32. ``TRIALS=1000`` in the environment takes some
minutes.
"""

import io
import os
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_tools import seal, verify
from checkpoint_tools.core.text import CheckpointError
from checkpoint_tools.look.verify import check_whole
from fsdp_offload.checkpoint import ArenaStager
from tests.checkpoint_tools.saves import DOWN, FUSED, RULES, changed, full, rule, save, without_checksums
from tests.checkpoint_tools.tool import as_json, assert_one_line, made, metadata_of, names, place_of, run, shown
from tests.distributed.launch import mesh, spawn
from tests.process_groups import process_group

TRIALS = int(os.environ.get("TRIALS", "60"))
OTHER = "mlp.other.weight"
METADATA, MANIFEST = ".metadata", ".checksums"
BOTH = f"[[rule]]\nfused = '{{p}}both.weight'\nparts = ['{{p}}{FUSED}', '{{p}}{OTHER}']\n"
FAMILY = "[source]\nhf = ''\nours = ''\n[[name]]\nhf = '{n:mlp.*|empty}'\nours = 'new.{n:mlp.*|empty}'\n"


def state() -> dict[str, Any]:
    """Contents of all kinds: large, small, strided, without elements; and objects, one of them with a large tensor."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(256, 96, generator=generator)
    return {
        "model": {
            FUSED: fused,
            OTHER: fused * 2,
            DOWN: torch.randn(96, 128, generator=generator).bfloat16(),
            "empty": torch.empty(0, 3),
        },
        "optim": {
            "state": {
                FUSED: {"exp_avg": fused + 1, "step": torch.tensor(3.0)},
                OTHER: {"exp_avg": fused * 3, "step": torch.tensor(3.0)},
                DOWN: {"exp_avg": fused[:128, :96].t()},
            },
            "param_groups": [{"lr": 0.5, "params": [FUSED, OTHER, DOWN]}],
        },
        "rng": {"states": (torch.arange(40_000, dtype=torch.int32), 7)},  # a tuple is an object
    }


def save_sharded(rank: int, world_size: int, folder: Path) -> None:
    """Of a rank of several, with a file for each tensor."""
    device_mesh = mesh(world_size)
    found = state()
    for entries in (found["model"], found["optim"]["state"][FUSED]):
        entries |= {
            key: distribute_tensor(value, device_mesh, [Shard(0)])
            for key, value in entries.items()
            if value.dim() and value.numel()
        }
    dcp.save(found, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False))
    if rank == 0:
        seal(folder)
    dist.barrier()


READERS = {
    "verify --data": "verify {folder} --data",
    "split": "split {folder} {made}/new --rules {made}/rules.toml",
    "merge": "merge {folder} {made}/new --rules {made}/both.toml --yes",  # two that have as many columns
    "convert": "convert {folder} {made}/new",
    "to torch": "convert {folder} {made}/new.pt --to torch",
    "rename": "rename {folder} {made}/new --family {made}/own.toml --from hf --to ours",  # puts a word in front
}


def passes(command: str, folder: Path, made: Path) -> bool:
    """Whether the command takes the checkpoint for whole. What it writes is gone afterwards."""
    made.mkdir()
    for name, text in {"rules": RULES, "both": BOTH, "own": FAMILY}.items():
        (made / f"{name}.toml").write_text(text)
    try:
        ran = run(*command.format(folder=folder, made=made).split())
    finally:
        shutil.rmtree(made)
    assert ran.returncode in (0, 1, 2), ran
    assert "error: unexpected" not in ran.stderr, ran
    return ran.returncode == 0


class Flip(NamedTuple):
    """A bit of a byte of a file."""

    file: str
    at: int
    bit: int

    def apply(self, folder: Path) -> None:
        """Once flips it, and twice back."""
        with (folder / self.file).open("r+b") as stream, mmap(stream.fileno(), 0) as content:
            content[self.at] ^= 1 << self.bit


def random_flip(folder: Path, where: str, choose: random.Random) -> Flip:
    """In the data of a tensor, in what is around them, or in a file of metadata."""
    if where in (METADATA, MANIFEST):
        return Flip(where, choose.randrange((folder / where).stat().st_size), choose.randrange(8))
    item = choose.choice(list(metadata_of(folder).storage_data.values()))
    if where == "contents":
        at = choose.choice(contents_in(folder / item.relative_path, item.offset, item.length))
    elif where == "data":
        at = choose.randrange(item.length)
    else:  # the headers and small records of a tensor are within these ends
        at = choose.choice([*range(min(item.length, 800)), *range(max(item.length - 1000, 0), item.length)])
    return Flip(item.relative_path, item.offset + at, choose.randrange(8))


def contents_in(file: Path, offset: int, length: int) -> list[int]:
    """Where in an item the contents of the zip file are, which have a CRC-32."""
    content = file.read_bytes()[offset : offset + length]
    found: list[int] = []
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for record in archive.infolist():
            name, extra = struct.unpack_from("<2H", content, record.header_offset + 26)
            start = record.header_offset + 30 + name + extra
            found += range(start, start + record.file_size)
    return found


# Flips -------------------------------------------------------------------------------------------------------------

PLACES = {"sealed": ("data", "around", METADATA, MANIFEST), "without": ("contents",)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("saved")
    found = {name: folder / name for name in ("alone", "without", "sharded")}
    seal(save(found["alone"], state()))
    save(found["without"], state())
    spawn(save_sharded, 2, tmp_path_factory.mktemp("spawned"), found["sharded"])
    return found


@pytest.fixture
def copies(saved: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """In a folder of their own."""
    return {name: Path(shutil.copytree(folder, tmp_path / "copies" / name)) for name, folder in saved.items()}


@pytest.mark.distributed
def test_random_flips(saved: dict[str, Path], copies: dict[str, Path], tmp_path: Path) -> None:
    for folder in saved.values():
        assert all(passes(command, folder, tmp_path / "made") for command in READERS.values())
    choose, passed = random.Random(20), []
    for _ in range(TRIALS):
        name = choose.choice(list(copies))
        where = choose.choice(PLACES["without" if name == "without" else "sealed"])
        flip = random_flip(saved[name], where, choose)
        flip.apply(copies[name])
        passed += [
            (reader, name, where, flip)
            for reader, command in READERS.items()
            if passes(command, copies[name], tmp_path / "made")
        ]
        flip.apply(copies[name])
    assert not passed, passed


def test_random_flips_in_other_files(copies: dict[str, Path], tmp_path: Path) -> None:
    """Of torch.save, which torch maps without comparing anything; and beside the data, which says what is merged."""
    choose, source = random.Random(21), copies["without"]
    torch.save({"scheduler": torch.arange(50_000)}, source / "common.pt")
    torch.save(state(), tmp_path / "model.pt")
    made("split", source, tmp_path / "split", rule())
    merge, convert = "merge {folder}/split {made}/new", "convert {folder}/model.pt {made}/new"
    for file, command in (("split/split_record.json", merge), ("split/common.pt", merge), ("model.pt", convert)):
        size_bytes = (tmp_path / file).stat().st_size
        places = range(size_bytes) if file.endswith("json") else contents_in(tmp_path / file, 0, size_bytes)
        ends = [*places[:3000], *places[-3000:]]
        assert passes(command, tmp_path, tmp_path / "made")
        for number in range(TRIALS // 2):
            flip = Flip(file, choose.choice((places, ends)[number % 2]), choose.randrange(8))
            flip.apply(tmp_path)
            assert not passes(command, tmp_path, tmp_path / "made"), flip
            flip.apply(tmp_path)


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.long)])
def test_a_flip_in_every_bit_of_a_small_item(tmp_path: Path, every: int) -> None:
    """Names, sizes, times, paddings, versions: also where no reader of zip files looks."""
    folder = save(tmp_path / "small", {"step": torch.tensor(3.0)})
    seal(folder)
    assert verify(folder) == []
    unnoticed = []
    for number in range(0, 8 * (folder / "__0_0.distcp").stat().st_size, every):
        flip = Flip("__0_0.distcp", *divmod(number, 8))
        flip.apply(folder)
        unnoticed += [flip] * (not verify(folder))
        flip.apply(folder)
    assert not unnoticed, unnoticed


def test_files_without_checksums_are_taken_and_told_of(tmp_path: Path) -> None:
    with without_checksums():
        folder = save(tmp_path / "without", state())
    (tmp_path / "rules.toml").write_text(RULES)
    note = "note: the data of 12 items cannot be compared with checksums: torch.serialization.set_crc32_options(False)"
    assert note in shown("verify", folder, "--data")
    assert note in shown("split", folder, tmp_path / "split", "--rules", tmp_path / "rules.toml")
    assert seal(folder) == [note.removeprefix("note: ") + " was in force"]
    shown("convert", folder, tmp_path / "converted")
    again = shown("verify", tmp_path / "converted", "--data")
    assert "cannot be compared with checksums: safetensors have no checksums" in again


# Sealing -------------------------------------------------------------------------------------------------------------


def problems_of(folder: Path) -> list[str]:
    """Without a look at the data."""
    return [f"{where}: {text}" for where, text in verify(folder, data=False)]


def test_files_and_metadata_of_another_save(copies: dict[str, Path], saved: dict[str, Path], tmp_path: Path) -> None:
    """Of the same shapes: their checksums are right, and without a seal nothing tells."""
    values = state()
    values["model"][FUSED][0, 0] += 1
    other = save(tmp_path / "other", values)
    for name, expected in (("alone", 1), ("without", 0)):
        shutil.copy(other / "__0_0.distcp", copies[name])
        problems = problems_of(copies[name])
        assert len(problems) == expected
        assert all("another item than was saved" in problem for problem in problems)
        assert passes(READERS["split"], copies[name], tmp_path / "made") != bool(expected)
    mixed = Path(shutil.copytree(saved["alone"], tmp_path / "mixed"))
    shutil.copy(saved["without"] / METADATA, mixed)
    (text,) = problems_of(mixed)
    assert text.startswith(".metadata: it is not the one that .checksums was written for")
    # A save over a sealed checkpoint.
    save(mixed, state())
    assert not passes(READERS["verify --data"], mixed, tmp_path / "made")
    with pytest.raises(CheckpointError, match=r"is sealed: .* remove \.checksums and seal it again"):
        seal(mixed)
    (mixed / MANIFEST).unlink()
    seal(mixed)
    assert passes(READERS["verify --data"], mixed, tmp_path / "made")


def test_a_flip_before_the_seal(copies: dict[str, Path], tmp_path: Path) -> None:
    """In the data it is found, without a seal and as one after it; around them nothing is sealed."""
    folder = copies["without"]
    item = place_of(folder, f"model.{FUSED}")
    around, inside = (Flip(item.relative_path, item.offset + at, 3) for at in (0, item.length // 2))
    around.apply(folder)
    with pytest.raises(CheckpointError, match=r"is not whole: .*torch.save"):
        seal(folder)
    assert not (folder / MANIFEST).exists()
    around.apply(folder)
    inside.apply(folder)
    assert "not whether data are as written: see --data" in shown("verify", folder)
    told = "are damaged: their CRC-32 is not the one that was written with them"
    assert told in shown("verify", folder, "--finite", code=1)
    assert_one_line(run("convert", folder, tmp_path / "made"), told)
    seal(folder)
    assert len(verify(folder)) == 1


@pytest.mark.parametrize(
    "options",
    [{"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False}, "memory://test_bit_flips", "async"],
)
def test_ways_of_writing(tmp_path: Path, options: Any) -> None:
    url = options if "://" in options else str(tmp_path / "saved")
    if options == "async":
        with process_group():
            dcp.async_save(state(), checkpoint_id=url, async_stager=ArenaStager()).result()
    else:
        writer = FsspecWriter(url) if url == options else dcp.FileSystemWriter(url, **options)
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            dcp.save(state(), storage_writer=writer, no_dist=True)
    assert seal(url) == []
    assert verify(url) == []
    assert as_json("verify", url)["notes"] == []


def test_what_cannot_be_sealed(copies: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copies["without"]

    def through_an_extension(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd/1"]

    extended = changed(folder, "extended", through_an_extension)
    for command in (("seal", extended), ("convert", extended, tmp_path / "new")):
        assert_one_line(
            run(*command), "was written through an extension of DCP", "load it with DCP, and save it without"
        )
    assert_one_line(run("seal", folder.parent), "give one of its subfolders")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        assert_one_line(run("seal", folder), "No space left on device")
    assert names(folder) == [METADATA, "__0_0.distcp"]
    assert shown("seal", folder).startswith(f"{folder}: sealed (")
    assert names(folder) == [MANIFEST, METADATA, "__0_0.distcp"]
    assert_one_line(run("seal", folder), "is sealed: verify compares it with .checksums")
    shown("convert", folder, tmp_path / "converted")
    assert_one_line(run("seal", tmp_path / "converted"), "has safetensors, which have no checksums")
    (folder / MANIFEST).unlink()

    def saved_again(*args: Any) -> None:
        check_whole(*args)
        save(folder, {"a": torch.ones(3)})

    monkeypatch.setattr("checkpoint_tools.look.verify.check_whole", saved_again)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        seal(folder)
    assert not (folder / MANIFEST).exists()
