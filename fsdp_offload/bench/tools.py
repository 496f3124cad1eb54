"""What rewriting and checking a checkpoint costs, beside copying and reading the same files with the system's tools."""

import contextlib
import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from ..checkpoint import LoadPlanner, ShardTensor, load
from ..checkpoint.item_archive import crc32
from ..checkpoint.rectangles import Cut, cut_chunks
from .record import median, print_record

_ROOT = Path(__file__).resolve().parents[2]

_RULES = """
[[rule]]
fused = '{prefix}gate_up.weight'
parts = ['{prefix}gate.weight', '{prefix}up.weight']
"""

_STATE_BYTES = 10
"""Bytes of each parameter: bf16 weights and two fp32 moments."""


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the checkpoint, in 10**9 bytes.")] = 20.0,
    folder: Annotated[Path | None, typer.Option(help="Where to write; by default a temporary folder.")] = None,
    files: Annotated[int, typer.Option(help="Files of the checkpoint, as of so many ranks.")] = 8,
    layers: Annotated[int, typer.Option(help="Layers; each has a fused weight, and one that is not.")] = 24,
    threads: Annotated[int, typer.Option(help="Of split, and of the copy beside it.")] = 4,
    max_memory: Annotated[str, typer.Option(help="Of split and verify.")] = "2GiB",
    repeats: Annotated[int, typer.Option(help="Measurements of each figure, interleaved; medians are printed.")] = 3,
    keep_caches: Annotated[bool, typer.Option("--keep-caches", help="Do not drop the machine's page cache.")] = False,
) -> None:
    """Split beside `cp` and fsync, verify beside `cat`, a checked load beside one that is not.

    With a cold cache, if this user may drop it.
    """
    work = Path(tempfile.mkdtemp(dir=folder, prefix="bench-tools-"))
    try:
        source = work / "source"
        _make(source, int(gigabytes * 1e9), files, layers)
        (work / "rules.toml").write_text(_RULES)
        nbytes = sum(file.stat().st_size for file in source.iterdir())
        ways = _ways(work, source, threads, max_memory)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        peaks: dict[str, list[int]] = {name: [] for name in ways}
        is_cold = True
        for _ in range(repeats):
            for name, command in ways.items():
                is_cold = not keep_caches and _drop_caches() and is_cold
                elapsed, peak_bytes = _timed(command)
                seconds[name].append(elapsed)
                peaks[name].append(peak_bytes)
                for made in work.glob("made-*"):
                    shutil.rmtree(made)
        figures = {
            "load_average": round(os.getloadavg()[0], 2),
            "nbytes": nbytes,
            "files": files,
            "threads": threads,
            "cold_cache": is_cold,
            "repeats": repeats,
        }
        for name in ways:
            _print(name, nbytes, seconds, peaks, figures)
        _compare_loads(source, repeats, keep_caches, figures)
    finally:
        shutil.rmtree(work, ignore_errors=True)


_TOOL = [sys.executable, "-m", "checkpoint_tools"]

_BESIDE = {
    "split": "copy",
    "verify": "cat",
    "verify, data": "cat",
    "verify, finite values": "cat",
}
"""With what each is compared."""


def _print(
    name: str, nbytes: int, seconds: dict[str, list[float]], peaks: dict[str, list[int]], figures: dict[str, Any]
) -> None:
    compared = {}
    if name in _BESIDE:
        compared = {
            "beside": _BESIDE[name],
            "share_of_its_speed": median(seconds[_BESIDE[name]]) / median(seconds[name]),
            # Of each repeat alone: what others do to the disk meanwhile, they do to both.
            "share_in_each_repeat": [
                round(beside / own, 3) for beside, own in zip(seconds[_BESIDE[name]], seconds[name], strict=True)
            ],
            "peak_resident_bytes": max(peaks[name]),
        }
    print_record(
        "tools",
        way=name,
        **figures,
        seconds=median(seconds[name]),
        all_seconds=[round(each, 2) for each in seconds[name]],
        gb_per_s=nbytes / median(seconds[name]) / 1e9,
        **compared,
    )


def _ways(work: Path, source: Path, threads: int, max_memory: str) -> dict[str, list[str]]:
    sizes = ["--threads", str(threads), "--max-memory", max_memory]
    copied = work / "made-copy"
    return {
        "copy": ["sh", "-c", _COPY.format(source=source, target=copied, threads=threads)],
        "split": [*_TOOL, "split", str(source), str(work / "made-split"), "--rules", str(work / "rules.toml"), *sizes],
        "cat": ["sh", "-c", f"cat {source}/*.distcp > /dev/null"],
        "verify": [*_TOOL, "verify", str(source), *sizes],
        "verify, data": [*_TOOL, "verify", "--data", str(source), *sizes],
        "verify, finite values": [*_TOOL, "verify", "--finite", str(source), *sizes],
    }


# As many processes as split has threads; `sync FILE...` is fsync of each.
_COPY = (
    "mkdir {target} && find {source} -type f -print0 "
    "| xargs -0 -n 1 -P {threads} cp --reflink=never -t {target} && sync {target}/* {target}/.metadata {target}"
)


def _make(target: Path, nbytes: int, files: int, layers: int) -> None:
    """A checkpoint of a model with AdamW's state, every tensor's rows divided over the files, as FSDP2 saves them."""
    width = max(int((nbytes / _STATE_BYTES / layers / 12) ** 0.5) // (files * 2), 1) * files * 2
    rows = {"gate_up.weight": 8 * width, "down.weight": 4 * width}
    shapes = {f"layers.{n}.{name}": (count, width) for n in range(layers) for name, count in rows.items()}
    target.mkdir(parents=True)
    whole: Metadata | None = None
    for rank in range(files):
        saved = _save_rank(target, rank, _state_of_rank(shapes, rank, files))
        whole = saved if whole is None else _joined(whole, saved)
    (target / ".metadata").write_bytes(pickle.dumps(whole))


def _state_of_rank(shapes: dict[str, tuple[int, int]], rank: int, ranks: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)

    def shard(shape: tuple[int, int], dtype: torch.dtype) -> ShardTensor:
        chunks = cut_chunks(shape, (Cut(0, ranks, rank),))
        return ShardTensor(torch.randn(chunks.local_shape, generator=generator).to(dtype), chunks)

    model = {key: shard(shape, torch.bfloat16) for key, shape in shapes.items()}
    moments = ("exp_avg", "exp_avg_sq")
    state: dict[str, Any] = {
        key: {name: shard(shape, torch.float32) for name in moments} for key, shape in shapes.items()
    }
    optim: dict[str, Any] = {"state": state}
    if rank == 0:
        for entries in state.values():
            entries["step"] = torch.tensor(1.0)
        optim["param_groups"] = [{"lr": 1e-3, "params": list(shapes)}]
    return {"model": model, "optim": optim}


def _save_rank(target: Path, rank: int, state: dict[str, Any]) -> Metadata:
    """One file, as this rank would write it, and what the metadata say of it."""
    folder = target / "alone"
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    file = f"__{rank}_0.distcp"
    (folder / "__0_0.distcp").rename(target / file)
    shutil.rmtree(folder)
    infos = metadata.storage_data.items()
    metadata.storage_data = {index: dataclasses.replace(info, relative_path=file) for index, info in infos}
    return metadata


def _joined(whole: Metadata, part: Metadata) -> Metadata:
    for key, entry in part.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            cast(TensorStorageMetadata, whole.state_dict_metadata[key]).chunks.extend(entry.chunks)
    whole.storage_data.update(part.storage_data)
    return whole


# --- loads -----------------------------------------------------------------------------------------------------------


def _compare_loads(source: Path, repeats: int, keep_caches: bool, figures: dict[str, Any]) -> None:
    """Measure what comparing checksums costs a load, in this process: without a command line's imports."""
    entries = FileSystemReader(source).read_metadata().state_dict_metadata
    tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    state: dict[str, Any] = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype) for key, entry in tensors.items()
    }
    seconds: dict[bool, list[float]] = {False: [], True: []}
    cpu_seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats + 1):  # the first one takes the memory into use
        for check_data in (False, True):
            if not keep_caches:
                _drop_caches()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            with warnings.catch_warnings(action="ignore"):  # that there is no process group
                planner = LoadPlanner(allow_extra=True)
                load(state, checkpoint_id=source, planner=planner, no_dist=True, check_data=check_data)
            if repeat:
                seconds[check_data].append(time.perf_counter() - begin)
                cpu_seconds[check_data].append(time.process_time() - cpu_begin)
    for check_data in (False, True):
        print_record(
            "tools",
            way="load, checked" if check_data else "load",
            **figures,
            crc32=crc32.__module__,
            seconds=median(seconds[check_data]),
            cpu_seconds=median(cpu_seconds[check_data]),
            more_seconds=median(seconds[check_data]) / median(seconds[False]) - 1,
            more_cpu_seconds=median(cpu_seconds[check_data]) / median(cpu_seconds[False]) - 1,
            all_seconds=[round(each, 2) for each in seconds[check_data]],
            all_cpu_seconds=[round(each, 2) for each in cpu_seconds[check_data]],
        )


# --- measured --------------------------------------------------------------------------------------------------------


def _drop_caches() -> bool:
    """Return whether what was read and written is only on the disk now."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    # Python and torch are read again: what is measured is the files of the checkpoint.
    subprocess.run([*_TOOL, "--help"], env=_environment(), stdout=subprocess.DEVNULL, check=True)
    return True


def _timed(command: list[str]) -> tuple[float, int]:
    """Seconds, and the largest resident memory of the command."""
    peak_bytes = 0
    begin = time.perf_counter()
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL)
    while process.poll() is None:  # not ru_maxrss, in which the memory of this process counts too
        peak_bytes = max(peak_bytes, _peak_bytes(process.pid))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    elapsed = time.perf_counter() - begin
    if process.returncode:
        sys.exit(f"{command} ended with exit code {process.returncode}")
    return elapsed, peak_bytes


def _peak_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
