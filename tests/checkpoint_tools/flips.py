"""Single bits that are flipped in a checkpoint, and what notices that."""

import io
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint_tools.convert import torch_files, translate
from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.integrity.seal import seal
from checkpoint_tools.look.verify import verify as problems_of
from checkpoint_tools.rewrite import rewrite
from checkpoint_tools.stored.opening import open_checkpoint
from tests.checkpoint_tools.converted import converted
from tests.checkpoint_tools.offline import DOWN, FUSED, rewritten, rule
from tests.distributed.launch import mesh

OTHER = "mlp.other.weight"
METADATA, MANIFEST = ".metadata", ".checksums"
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


# What should notice a flip -------------------------------------------------------------------------------------------


def verify(folder: Path, made: Path) -> bool:
    del made
    return not problems_of(folder, threads=1)


def split(folder: Path, made: Path) -> bool:
    rewritten("split", folder, made, rule(), threads=1)
    return True


def merge(folder: Path, made: Path) -> bool:
    """Of two tensors that happen to have as many columns."""
    both = rule(fused="{p}both.weight", parts=("{p}" + FUSED, "{p}" + OTHER), dim=0)
    rewritten("merge", folder, made, both, threads=1)
    return True


def convert(folder: Path, made: Path) -> bool:
    converted(folder, made, threads=1)
    return True


def to_torch(folder: Path, made: Path) -> bool:
    """Into one file."""
    made.mkdir()
    checkpoint = open_checkpoint(folder)
    rewrite.check_whole(checkpoint, 1)
    torch_files.to_torch(checkpoint, str(made / "model.pt"), (), 1 << 30)
    return True


def rename(folder: Path, made: Path) -> bool:
    """All that has an FQN, by a family that puts a word in front."""
    made.mkdir()
    (made / "own.toml").write_text(FAMILY)
    asked = translate.Translation(str(made / "own.toml"), "hf", "ours", {}, [])
    translate.translate(str(folder), str(made / "new"), asked, threads=1, max_memory_bytes=1 << 20)
    return True


READERS: dict[str, Callable[[Path, Path], bool]] = {
    "verify --data": verify,
    "split": split,
    "merge": merge,
    "convert": convert,
    "to torch": to_torch,
    "rename": rename,
}


def passes(reader: str, folder: Path, made: Path) -> bool:
    """Whether it takes the checkpoint for whole. What it writes is gone afterwards."""
    try:
        return READERS[reader](folder, made)
    except CheckpointError:
        return False
    finally:
        shutil.rmtree(made, ignore_errors=True)


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
