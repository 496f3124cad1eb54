"""A single bit that is flipped anywhere in a checkpoint is noticed by everything that reads all of it.

Where it is sealed: anywhere at all. Elsewhere, in all that has a CRC-32. ``TRIALS=1000`` in the environment takes some
minutes.
"""

import contextlib
import io
import json
import os
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_tools.convert import torch_files
from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.fuse.request import RECORD_FILE
from checkpoint_tools.integrity.seal import seal
from checkpoint_tools.look.verify import check_structure, verify
from checkpoint_tools.stored.checkpoint import Item
from checkpoint_tools.stored.items import ItemReader
from checkpoint_tools.stored.metadata import manifest_bytes
from checkpoint_tools.stored.reading import open_checkpoint
from fsdp_offload.checkpoint import ArenaStager
from tests.checkpoint_tools.checkpoints import assert_one_line, changed, run_here, save, without_checksums
from tests.checkpoint_tools.offline import DOWN, FUSED, RULES, rewritten, rule
from tests.distributed.launch import mesh, spawn

TRIALS = int(os.environ.get("TRIALS", "60"))
OTHER = "mlp.other.weight"
METADATA, MANIFEST = ".metadata", ".checksums"
BOTH = f"""
[[rule]]
fused = '{{p}}both.weight'
parts = ['{{p}}{FUSED}', '{{p}}{OTHER}']
"""
FAMILY = """
[source]
hf = ''
ours = ''
[[name]]
hf = '{name:mlp.*|empty}'
ours = 'new.{name:mlp.*|empty}'
"""


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


def passes(reader: str, folder: Path, made: Path) -> bool:
    """Whether the command takes the checkpoint for whole. What it writes is gone afterwards."""
    made.mkdir()
    for name, text in {"rules": RULES, "both": BOTH, "own": FAMILY}.items():
        (made / f"{name}.toml").write_text(text)
    try:
        run = run_here(*READERS[reader].format(folder=folder, made=made).split())
    finally:
        shutil.rmtree(made)
    assert run.returncode in (0, 1, 2), run
    assert "error: unexpected" not in run.stderr, run
    return run.returncode == 0


class Flip(NamedTuple):
    """A bit of a byte of a file."""

    file: str
    at: int
    bit: int

    def apply(self, folder: Path) -> None:
        """Once flips it, and twice back."""
        with (folder / self.file).open("r+b") as stream:
            stream.seek(self.at)
            (byte,) = stream.read(1)
            stream.seek(self.at)
            stream.write(bytes([byte ^ 1 << self.bit]))


def random_flip(folder: Path, where: str, choose: random.Random) -> Flip:
    """In the data of a tensor, in what is around them, or in a file of metadata."""
    if where in (METADATA, MANIFEST):
        return Flip(where, choose.randrange((folder / where).stat().st_size), choose.randrange(8))
    item = choose.choice([item for _, item in open_checkpoint(folder).items()])
    if where == "contents":
        at = choose.choice(contents_in(folder / item.file, item.offset_bytes, item.length_bytes))
    elif where == "data":
        at = choose.randrange(item.length_bytes)
    else:  # the headers and small records of a tensor are within these ends
        ends = [*range(min(item.length_bytes, 800)), *range(max(item.length_bytes - 1000, 0), item.length_bytes)]
        at = choose.choice(ends)
    return Flip(item.file, item.offset_bytes + at, choose.randrange(8))


def contents_in(file: Path, offset: int, length: int) -> list[int]:
    """Where in an item the contents of the zip file are, which have a CRC-32."""
    with file.open("rb") as stream:
        stream.seek(offset)
        content = stream.read(length)
    found: list[int] = []
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for record in archive.infolist():
            name, extra = struct.unpack_from("<2H", content, record.header_offset + 26)
            start = record.header_offset + 30 + name + extra
            found += range(start, start + record.file_size)
    return found


# At random ------------------------------------------------------------------------------------------------------------

PLACES = {"sealed": ("data", "around", METADATA, MANIFEST), "without": ("contents",)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("saved")
    found = {name: folder / name for name in ("alone", "without", "sharded")}
    seal(save(found["alone"], state()))
    save(found["without"], state())
    spawn(save_sharded, 2, tmp_path_factory.mktemp("spawned"), found["sharded"])
    return found


@pytest.mark.distributed
def test_random_flips(saved: dict[str, Path], tmp_path: Path) -> None:
    for folder in saved.values():
        assert all(passes(reader, folder, tmp_path / "made") for reader in READERS)
    choose = random.Random(20)
    folders = {name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in saved.items()}
    passed = []
    for _ in range(TRIALS):
        name = choose.choice(list(folders))
        where = choose.choice(PLACES["without" if name == "without" else "sealed"])
        flip = random_flip(saved[name], where, choose)
        flip.apply(folders[name])
        passed += [(each, name, where, flip) for each in READERS if passes(each, folders[name], tmp_path / "made")]
        flip.apply(folders[name])
    assert not passed, passed


def test_random_flips_in_other_files(saved: dict[str, Path], tmp_path: Path) -> None:
    """Of torch.save, which torch maps without comparing anything; and beside the data, which says what is merged."""
    choose = random.Random(21)
    source = Path(shutil.copytree(saved["without"], tmp_path / "source"))
    torch.save({"scheduler": torch.arange(50_000)}, source / "common.pt")
    torch.save(state(), tmp_path / "model.pt")
    rewritten("split", source, tmp_path / "split", rule())

    def merge() -> None:
        rewritten("merge", tmp_path / "split", tmp_path / "made")

    def to_dcp() -> None:
        torch_files.to_dcp(str(tmp_path / "model.pt"), str(tmp_path / "made"), 1 << 30)

    for file, read in ((f"split/{RECORD_FILE}", merge), ("split/common.pt", merge), ("model.pt", to_dcp)):
        size_bytes = (tmp_path / file).stat().st_size
        places = range(size_bytes) if file.endswith("json") else contents_in(tmp_path / file, 0, size_bytes)
        ends = [*places[:3000], *places[-3000:]]
        flips = [Flip(file, choose.choice((places, ends)[n % 2]), choose.randrange(8)) for n in range(TRIALS // 2)]
        assert [flip for flip in flips if is_taken(flip, tmp_path, read)] == []
        read()
        shutil.rmtree(tmp_path / "made")


def is_taken(flip: Flip, folder: Path, read: Callable[[], object]) -> bool:
    """Whether the flip passes without a word. What was made of it is gone afterwards."""
    flip.apply(folder)
    try:
        read()
    except CheckpointError:
        return False
    else:
        return True
    finally:
        flip.apply(folder)
        shutil.rmtree(folder / "made", ignore_errors=True)


# One by one ----------------------------------------------------------------------------------------------------------


def test_a_flip_in_every_bit_around_the_data_of_an_item(saved: dict[str, Path], tmp_path: Path) -> None:
    """Names, sizes, times, paddings, versions: also where no reader of zip files looks."""
    folder = Path(shutil.copytree(saved["alone"], tmp_path / "copy"))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.manifest is not None
    item = next(item for key, item in checkpoint.items() if key.endswith("step"))
    expected = Item(item.offset_bytes, item.length_bytes, 0)
    (crc,) = (each.around_crc for each in checkpoint.manifest[item.file] if each[:2] == expected[:2])
    unnoticed = []
    for at in range(item.offset_bytes, item.offset_bytes + item.length_bytes):
        for bit in range(8):
            flip = Flip(item.file, at, bit)
            flip.apply(folder)
            checkpoint.opened.clear()
            with contextlib.suppress(CheckpointError):
                ItemReader(checkpoint).check(item)
                unnoticed += [flip] * (checkpoint.opened[item.place].around_crc == crc)
            flip.apply(folder)
    assert not unnoticed, unnoticed


def test_commands_that_find_a_flip(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved["without"], tmp_path / "copy"))
    chunk = open_checkpoint(folder).tensors[f"model.{FUSED}"].chunks[0]
    Flip(chunk.file, chunk.offset_bytes + chunk.length_bytes // 2, 3).apply(folder)
    assert "not whether data are as written: see --data" in run_here("verify", folder).stdout
    run = run_here("verify", folder, "--finite")
    assert run.returncode == 1
    assert "are damaged: their CRC-32 is not the one that was written with them" in run.stdout
    for command in ("convert copy made", "convert copy made.pt --to torch"):
        assert_one_line(run_here(*command.split(), cwd=tmp_path), "are damaged: their CRC-32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


# Without checksums ---------------------------------------------------------------------------------------------------


def test_files_without_checksums_are_taken_and_told_of(tmp_path: Path) -> None:
    with without_checksums():
        folder = save(tmp_path / "without", state())
    (tmp_path / "rules.toml").write_text(RULES)
    run = run_here("verify", folder, "--data")
    split = run_here("split", folder, tmp_path / "split", "--rules", tmp_path / "rules.toml")
    note = "note: the data of 12 items cannot be compared with checksums: torch.serialization.set_crc32_options(False)"
    for each in (run, split):
        assert each.returncode == 0
        assert note in each.stdout
    assert seal(folder) == [note.removeprefix("note: ") + " was in force"]
    safetensors = run_here("convert", folder, tmp_path / "converted")
    assert safetensors.returncode == 0
    again = run_here("verify", tmp_path / "converted", "--data")
    assert (again.returncode, again.stderr) == (0, "")
    assert "cannot be compared with checksums: safetensors have no checksums" in again.stdout


# Manifests -----------------------------------------------------------------------------------------------------------


def problems_of(folder: Path) -> list[str]:
    return [f"{where}: {text}" for where, text in check_structure(open_checkpoint(folder), 1)[0]]


def test_files_of_another_checkpoint_of_the_same_shapes(saved: dict[str, Path], tmp_path: Path) -> None:
    """Their checksums are right, and without a manifest nothing tells. No data are read to see it."""
    other = tmp_path / "other"
    values = state()
    values["model"][FUSED][0, 0] += 1
    save(other, values)
    for name, expected in (("alone", 1), ("without", 0)):
        mixed = Path(shutil.copytree(saved[name], tmp_path / name))
        shutil.copy(other / "__0_0.distcp", mixed)
        problems = problems_of(mixed)
        assert len(problems) == expected
        assert all("another item than was saved" in problem for problem in problems)
        assert passes("split", mixed, tmp_path / "made") != bool(expected)


def test_metadata_of_another_save_and_items_that_it_does_not_know(saved: dict[str, Path], tmp_path: Path) -> None:
    mixed = Path(shutil.copytree(saved["alone"], tmp_path / "mixed"))
    shutil.copy(saved["without"] / METADATA, mixed)
    (text,) = problems_of(mixed)
    assert text.startswith(".metadata: it is not the one that .checksums was written for")
    head, body = (mixed / MANIFEST).read_bytes().splitlines()
    del head
    found = json.loads(body)
    found["files"]["__0_0.distcp"].pop()
    items = {file: [Item(*item) for item in items] for file, items in found["files"].items()}
    (mixed / MANIFEST).write_bytes(manifest_bytes((mixed / METADATA).read_bytes(), items))
    assert problems_of(mixed) == ["__0_0.distcp: .checksums tells of other items in it than the metadata"]


# Sealing -------------------------------------------------------------------------------------------------------------


def test_a_save_over_a_sealed_checkpoint(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved["alone"], tmp_path / "copy"))
    save(folder, state())
    assert not passes("verify --data", folder, tmp_path / "made")
    with pytest.raises(CheckpointError, match=r"is sealed: .* remove \.checksums and seal it again"):
        seal(folder)
    (folder / MANIFEST).unlink()
    seal(folder)
    assert passes("verify --data", folder, tmp_path / "made")


def test_a_flip_before_the_seal(saved: dict[str, Path], tmp_path: Path) -> None:
    """In the data it is found as one after it; around them nothing is sealed."""
    for at, is_sealed in ((0.5, True), (0.0, False)):
        folder = Path(shutil.copytree(saved["without"], tmp_path / f"at {at}"))
        chunk = open_checkpoint(folder).tensors[f"model.{FUSED}"].chunks[0]
        Flip(chunk.file, chunk.offset_bytes + int(chunk.length_bytes * at), 3).apply(folder)
        if is_sealed:
            seal(folder)
            assert len(verify(folder)) == 1
        else:
            with pytest.raises(CheckpointError, match=r"is not sealed, as it has 1 problem: .*torch.save"):
                seal(folder)
        assert (folder / MANIFEST).exists() == is_sealed


@pytest.mark.parametrize(
    "options",
    [{"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False}, "memory://test_bit_flips", "async"],
)
def test_ways_of_writing(tmp_path: Path, options: Any) -> None:
    url = options if "://" in options else str(tmp_path / "saved")
    if options == "async":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dcp.async_save(state(), checkpoint_id=url, async_stager=ArenaStager()).result()
        finally:
            dist.destroy_process_group()
    else:
        writer = FsspecWriter(url) if url == options else dcp.FileSystemWriter(url, **options)
        with warnings.catch_warnings(action="ignore"):  # that there is no process group
            dcp.save(state(), storage_writer=writer, no_dist=True)
    assert seal(url) == []
    checkpoint = open_checkpoint(url)
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.keys() == checkpoint.items_by_file().keys()
    problems, files = check_structure(checkpoint, 1)
    assert (problems, files.notes, verify(url)) == ([], (), [])


def test_what_cannot_be_sealed(saved: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved["without"], tmp_path / "copy"))
    sealed = run_here("seal", folder)
    assert sealed.returncode == 0
    assert sealed.stdout.startswith(f"{folder}: sealed (")
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, METADATA, "__0_0.distcp"]
    assert_one_line(run_here("seal", folder), "is sealed: verify compares it with .checksums")
    assert run_here("convert", folder, tmp_path / "converted").returncode == 0
    assert_one_line(run_here("seal", tmp_path / "converted"), "has safetensors, which have no checksums")

    def through_an_extension(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd/1"]

    extended = changed(saved["without"], "extended", through_an_extension)
    assert_one_line(run_here("seal", extended), "was written through an extension of DCP, and has no checksums")
    assert_one_line(run_here("seal", tmp_path), "is not a checkpoint itself")


def test_what_changes_while_it_is_sealed(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(saved["without"], tmp_path / "copy"))

    def saved_again(*args: Any) -> Any:
        found = check_structure(*args)
        save(folder, {"a": torch.ones(3)})
        return found

    monkeypatch.setattr("checkpoint_tools.integrity.seal.check_structure", saved_again)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        seal(folder)
    assert not (folder / MANIFEST).exists()
