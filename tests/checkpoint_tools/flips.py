"""Single bits that are flipped in a checkpoint, and what notices that."""

import io
import random
import shutil
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_tools.integrity.seal import seal
from checkpoint_tools.stored.opening import open_checkpoint
from tests.checkpoint_tools.checkpoints import run_here
from tests.checkpoint_tools.offline import DOWN, FUSED, RULES
from tests.distributed.launch import mesh

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


def save_alone(folder: Path, *, sealed: bool) -> None:
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(state(), checkpoint_id=folder, no_dist=True)
    if sealed:
        seal(folder)


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


# Flips ---------------------------------------------------------------------------------------------------------------


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
