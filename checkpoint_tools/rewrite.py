"""Rewrite a checkpoint to a new folder: check, plan, write, and publish it only when complete.

::

    open_whole ──▶ Checkpoint ──plan──▶ Rewrite: files ─▶ pieces ──torch.save of each──▶ DST.partial ──rename──▶ DST

=========  ============================================================================================================
direction  piece
=========  ============================================================================================================
split      the elements of one part in one stored item: a strided view of the item's bytes
merge      a rectangle of the fused tensor, assembled from items of its parts in any files
=========  ============================================================================================================

The source is not changed. Writing begins when the source was found to be whole. Each rank keeps its own files, of about
1 GiB at most. A local DST appears as a whole or not at all; the next run removes the DST.partial of a killed one.

*Sidecars* are files without tensors of the model that belong to a checkpoint and are copied with it: tokenizer,
``config.json``, Megatron's ``common.pt`` and ``metadata.json``, the state of schedulers, of random numbers and of
trainers. Other data (files of a checkpoint saved here before, other formats of the same weights) are not copied; a
note names them.
"""

import contextlib
import errno
import fcntl
import functools
import io
import itertools
import math
import os
import pickle
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from fsdp_offload.checkpoint import Chunk, ShardChunks, chunks_of
from fsdp_offload.checkpoint.chunks import contiguous_strides

from .core.regions import TensorRegion, nothing_of, part_chunks, stretches, whole_of
from .core.text import CheckpointError, counted, dtype_name, human_bytes, human_shape, some_of, table
from .fuse.files import RECORD_FILE, Request, find_exchange, new_record
from .fuse.plan import Exchange, Fusion
from .fuse.rules import Way
from .look.verify import Advance, check_whole, notes_on_checksums, seal
from .stored import checkpoint as stored
from .stored.checkpoint import Checkpoint, StoredChunk, StoredObject, StoredTensor
from .stored.foreign import DATA
from .stored.items import Archive, DamagedError, ItemReader, is_zip_end, typed
from .stored.metadata import METADATA_FILE, open_dcp
from .stored.storage import TORCH_SUFFIXES, Folder, RemoteFolder, open_folder, read_file, write_file

LARGEST_PIECE_BYTES = 128 << 20
"""Largest piece that is put together in memory."""

_FILE_BYTES = 1 << 30  # larger ranks get several files, written by several threads
_SLICE_BYTES = 1 << 20
_MARK = ".being-written"  # marks our own partial folders

# The plan -------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One item to write: a rectangle of a tensor, or an object (``region`` is None)."""

    key: str
    region: TensorRegion | None
    nbytes: int
    read: Callable[[ItemReader], Tensor | bytes | memoryview]


class Rewrite(NamedTuple):
    """The plan of a new checkpoint, before it is written."""

    checkpoint: Checkpoint  # the old one, found to be whole
    tensors: Mapping[str, StoredTensor]  # of the new one, without chunks yet
    objects: tuple[str, ...]  # keys of objects
    files: Mapping[str, Sequence[Piece]]  # new file → its pieces
    paths: Mapping[str, stored.Path]  # key → path in the nested state dict, if known
    exchange: Exchange = Exchange()  # the plan of a split or merge
    heads: Mapping[str, bytes] = {}  # bytes at the start of files of safetensors
    notes: tuple[str, ...] = ()  # for people
    sidecars: Mapping[str, bytes | None] = {}  # file → its new content; None: copy the old file
    headline: str = ""  # a line for people

    @property
    def keys(self) -> int:
        """Count the keys of the new checkpoint."""
        return len(self.tensors) + len(self.objects)

    @property
    def nbytes(self) -> int:
        """Return the size of all pieces in bytes."""
        return sum(self.file_bytes().values())

    def file_bytes(self) -> dict[str, int]:
        """Return each file's size in bytes, without the zip format around pieces of DCP."""
        return {
            file: len(self.heads.get(file, b"")) + sum(piece.nbytes for piece in pieces)
            for file, pieces in self.files.items()
        }


def open_whole(source: str, threads: int) -> Checkpoint:
    """Open a checkpoint of DCP, check that nothing is missing, and list its sidecars."""
    return whole(open_dcp(source), threads)


def plan(source: Checkpoint, way: Way, request: Request) -> Rewrite:
    """Plan the split or the merge of a checkpoint."""
    exchange, asked = find_exchange(way, source, request)
    new, sidecars = plan_rewrite(source, exchange), {file: None for file in source.sidecars if file != RECORD_FILE}
    state, done = len(exchange.fusions) - exchange.parameters, "split" if way == "split" else "merged"
    exchanged = f"{counted(exchange.parameters, 'tensor')} and {counted(state, 'state tensor')} {done}"
    nbytes = sum(math.prod(fusion.shape) * fusion.dtype.itemsize for fusion in exchange.fusions)
    size = f"{human_bytes(nbytes)} of {human_bytes(new.nbytes)}"
    headline = f"{exchanged}, {size}; {counted(new.keys, 'key')} in {counted(len(new.files), 'file')}"
    record = new_record(source, way, asked, exchange.matched)
    return new._replace(sidecars={**sidecars, **record}, notes=(*asked.notes, *source.notes), headline=headline)


def as_table(rewrite: Rewrite) -> list[str]:
    """Return a table with a row for each fused tensor and each of its parts."""
    rows = (
        (*names, human_shape(shape), dtype_name(fusion.dtype))
        for fusion in rewrite.exchange.fusions
        for *names, shape in ((fusion.fused, "", fusion.shape), *(("", *part) for part in fusion.part_shapes()))
    )
    return table(("fused tensor", "parts", "shape", "dtype"), (), rows)


def plan_rewrite(checkpoint: Checkpoint, exchange: Exchange) -> Rewrite:
    """Plan the new checkpoint of an exchange, without reading data."""
    if checkpoint.refusal:
        raise CheckpointError(checkpoint.refusal)
    new = _NewFiles(checkpoint)
    fused = {fusion.fused: fusion for fusion in exchange.fusions if fusion.fused in checkpoint.tensors}
    merged = {part: fusion for fusion in exchange.fusions if fusion.fused not in fused for part in fusion.parts}
    for fusion in exchange.fusions:
        is_split = fusion.fused in fused
        for key, shape in fusion.part_shapes() if is_split else [(fusion.fused, fusion.shape)]:
            new.tensors[key] = StoredTensor(key, shape, fusion.dtype, ())
    for file, entries in checkpoint.items_by_file().items():
        for key, item in entries:
            if key in exchange.objects:
                torch.save(exchange.objects[key], buffer := io.BytesIO())
                new.add(file, given(key, buffer.getvalue()))
            elif key not in fused and key not in merged:
                for new_key in exchange.copies.get(key, (key,)):
                    new.add_copy(file, new_key, key, item)
    for fusion in fused.values():
        new.add_split(fusion)
    for fusion in dict.fromkeys(merged.values()):
        new.add_merged(fusion)
    keys = {*new.tensors, *new.objects}
    paths = {key: path for key, path in {**checkpoint.paths, **exchange.paths}.items() if key in keys}
    files = {
        f"__{rank}_{number}.distcp": some
        for rank, pieces in enumerate(new.pieces.values())
        for number, some in enumerate(in_files(pieces, lambda piece: piece.nbytes, _FILE_BYTES))
    }
    notes, sidecars = checkpoint.notes, dict.fromkeys(checkpoint.sidecars)
    return Rewrite(checkpoint, new.tensors, tuple(new.objects), files, paths, exchange, notes=notes, sidecars=sidecars)


class _NewFiles:
    """Collects pieces by the rank whose files they go to."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.pieces: dict[str, list[Piece]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, None] = {}

    def add(self, file: str, piece: Piece) -> None:
        """Add a piece to the new files of the rank that wrote ``file``; other names get a new file each."""
        if piece.region is None:
            self.objects[piece.key] = None
        rank = re.fullmatch(r"__(\d+)_\d+\.distcp", file)
        self.pieces.setdefault(rank[1] if rank else file, []).append(piece)

    def add_copy(self, file: str, new_key: str, key: str, item: StoredChunk | StoredObject) -> None:
        if isinstance(item, StoredObject):

            def read(reader: ItemReader) -> memoryview:
                reader.check(item, data=True)
                return reader.view(item)

            self.add(file, Piece(new_key, None, item.length_bytes, read))
            return
        tensor = self.checkpoint.tensors[key]
        self.tensors[new_key] = tensor._replace(key=new_key, chunks=())
        self.add(file, _carved(new_key, item.region, tensor.dtype, item, 0, contiguous_strides(item.sizes)))

    def add_split(self, fusion: Fusion) -> None:
        stored, empty = self.checkpoint.tensors[fusion.fused].chunks, dict.fromkeys(fusion.parts)
        most = LARGEST_PIECE_BYTES // fusion.dtype.itemsize
        for source in stored:
            rectangles = [(source.region, 0)]  # rectangle, and its first element's index in the chunk
            if fusion.is_flat:
                flat_range = source.offsets[0], source.offsets[0] + source.sizes[0]
                found = chunks_of(fusion.shape, flat_range).chunks
                rectangles = [(TensorRegion(each.offsets, each.sizes), each.local_start) for each in found]
            for region, first in rectangles:
                for part, chunk in _pieces_of(fusion, region):
                    key = fusion.parts[part]
                    empty.pop(key, None)
                    for small in stretches(TensorRegion(chunk.offsets, chunk.sizes), most):
                        moved = zip(small.offsets, chunk.offsets, chunk.local_strides, strict=True)
                        start = first + chunk.local_start + sum((at - from_) * step for at, from_, step in moved)
                        self.add(source.file, _carved(key, small, fusion.dtype, source, start, chunk.local_strides))
        for key in empty if stored and fusion.shape else ():
            nothing = nothing_of(self.tensors[key].shape)
            self.add(stored[0].file, given(key, torch.empty(nothing.sizes, dtype=fusion.dtype), nothing))

    def add_merged(self, fusion: Fusion) -> None:
        parts = [self.checkpoint.tensors[part] for part in fusion.parts]
        stored = [chunk for part in parts for chunk in part.chunks]
        # Pieces are as large as a rank's share of all parts, dealt to the same files in turns: loads read no more data.
        shares = (len(fusion.parts) * chunk.numel for chunk in stored)
        numel = min(max(shares, default=1), LARGEST_PIECE_BYTES // fusion.dtype.itemsize)
        files = itertools.cycle(dict.fromkeys(chunk.file for chunk in stored))
        for region, file in zip(stretches(whole_of(fusion.shape), numel), files, strict=False):
            read = functools.partial(_gathered, fusion, region, parts)
            self.add(file, Piece(fusion.fused, region, region.numel * fusion.dtype.itemsize, read))


def given(key: str, content: bytes | Tensor, region: TensorRegion | None = None) -> Piece:
    """Return a piece whose content is at hand: an object, or a rectangle of a tensor."""
    return Piece(key, region, content.nbytes if isinstance(content, Tensor) else len(content), lambda reader: content)


_Sized = TypeVar("_Sized")


def in_files(some: Iterable[_Sized], nbytes_of: Callable[[_Sized], int], file_bytes: int) -> list[list[_Sized]]:
    """Divide pieces or keys into files, in order; each file takes as many as fit into ``file_bytes``."""
    files: list[list[_Sized]] = []
    filled = 0
    for each in some:
        if not files or filled + nbytes_of(each) > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(each)
        filled += nbytes_of(each)
    return files


def _pieces_of(fusion: Fusion, region: TensorRegion) -> Iterator[tuple[int, Chunk]]:
    """Yield the rectangles of each part in a fused rectangle; starts and strides index its row-major buffer."""
    chunk = Chunk(region.offsets, region.sizes, 0, contiguous_strides(region.sizes))
    if not fusion.shape:  # a single element, without a dimension to divide
        yield 0, chunk
        return
    shard = ShardChunks(fusion.shape, region.sizes, (chunk,))
    for part, comb in enumerate(fusion.combs):
        for piece in part_chunks(shard, fusion.dim, comb).chunks:
            if piece.numel:
                yield part, piece


def _carved(
    key: str, region: TensorRegion, dtype: torch.dtype, source: StoredChunk, start: int, strides: tuple[int, ...]
) -> Piece:
    """Return the piece of a rectangle that one item holds; ``start``: index of the rectangle's first element there."""

    def read(reader: ItemReader) -> Tensor:
        view = _view(reader.bits(source, dtype), region.sizes, start, strides)
        if view.is_contiguous():  # from_numpy makes a storage of the view, without a copy: torch.save writes whole ones
            return typed(torch.from_numpy(view.numpy()), dtype)
        return typed(torch.empty(view.shape, dtype=torch.uint8).copy_(view), dtype)

    return Piece(key, region, region.numel * dtype.itemsize, read)


def _gathered(fusion: Fusion, region: TensorRegion, parts: Sequence[StoredTensor], reader: ItemReader) -> Tensor:
    whole = torch.empty(*region.sizes, fusion.dtype.itemsize, dtype=torch.uint8)
    bits = whole.view(-1, fusion.dtype.itemsize)
    for part, piece in _pieces_of(fusion, region) if region.numel else ():
        into = _view(bits, piece.sizes, piece.local_start, piece.local_strides)
        reader.read_into(into, parts[part], TensorRegion(piece.offsets, piece.sizes))
    return typed(whole, fusion.dtype)


def _view(bits: Tensor, sizes: Sequence[int], start: int, strides: Sequence[int]) -> Tensor:
    """View a rectangle in ``bits``, the bytes of elements with one row per element; start and strides in elements."""
    itemsize = bits.shape[-1]
    at = int(bits.storage_offset()) + start * itemsize
    return bits.as_strided((*sizes, itemsize), (*(stride * itemsize for stride in strides), 1), at)


# Writing it -----------------------------------------------------------------------------------------------------------


def check_destination(source: str, destination: str) -> None:
    """Raise if the destination cannot be made: it exists, or one of source and destination lies inside the other."""
    old, new, path = _place(source), _place(destination), Path(destination)
    is_there, has_no_parent = os.path.lexists(path), not path.parent.is_dir()
    if "://" in destination:
        remote = RemoteFolder(destination)
        remote.fs.invalidate_cache()
        is_there, has_no_parent = remote.fs.exists(remote.root) and bool(remote.files()), False
    for is_wrong, text in (
        (not source.strip(), "SRC is empty; give the folder of a checkpoint, or its URL"),
        (not destination.strip(), "DST is empty; give the name of a new folder, or a URL"),
        (is_there, f"{destination} exists; give a name that is not taken, or remove it first"),
        (path.name in ("", ".", ".."), f"{destination!r} is not the name of a new folder"),
        (has_no_parent, f"{path.parent} is not a folder; make it first, or choose another place"),
        (new.startswith(old), f"{destination} lies inside of {source}; choose a place outside of it"),
        (
            old.startswith((new, *(f"{new[:-1]}.{what}/" for what in ("partial", "steps")))),
            f"{source} lies inside of {destination}, or where that is made; choose another place",
        ),
    ):
        if is_wrong:
            raise CheckpointError(text)


def _place(path: str) -> str:
    """Return the path (absolute if local) with a slash at the end: the prefix of all paths inside of it."""
    if path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    return os.path.join(path if "://" in path else Path(path).resolve(), "")


def write(
    rewrite: Rewrite, destination: str, threads: int, max_memory_bytes: int, advance: Advance = lambda done: None
) -> None:
    """Write the new checkpoint, and seal it if it is one of DCP; remove it after an error.

    ``max_memory_bytes``: limit for assembled pieces and mapped items of all threads. ``advance``: called from any
    thread, with the number of bytes written since its last call.
    """
    # Each thread holds one piece and maps one item of the old checkpoint; at least one thread runs.
    checkpoint = rewrite.checkpoint
    mapped_bytes = max((item.length_bytes for _, item in checkpoint.items()), default=0)
    each_bytes = min(LARGEST_PIECE_BYTES, rewrite.nbytes) + mapped_bytes + 1
    threads = max(min(threads, max_memory_bytes // each_bytes), 1)
    files = checkpoint.items_by_file()
    stamps = [checkpoint.folder.stamp(file) for file in files]
    with appearing(destination) as folder:
        _save(rewrite, ItemReader(checkpoint, max_memory_bytes // 4), folder, destination, threads, advance)
        for file, content in rewrite.sidecars.items():
            write_file(folder / file, read_sidecar(checkpoint.folder, file) if content is None else content)
        if not rewrite.heads:
            seal(folder, threads=threads)
        if [checkpoint.folder.stamp(file) for file in files] != stamps:
            raise CheckpointError(
                f"{checkpoint.path} was changed while it was read; run this again when no process writes it"
            )


# Sidecars -----------------------------------------------------------------------------------------------------------

_NAMES_IN_NOTES = 8
_MAX_BYTES = 256 << 20  # of all sidecars that are copied
_MAX_FILES = 1000


def whole(checkpoint: Checkpoint, threads: int) -> Checkpoint:
    """Check that a checkpoint is whole; return it with its sidecars, and with notes on copied and ignored files."""
    check_whole(checkpoint, threads)
    folder, known = checkpoint.folder, {*(checkpoint.own_files or ()), *checkpoint.items_by_file()}
    files: list[str] = []
    left: list[str] = []
    room_bytes = _MAX_BYTES
    for name in folder.files() if checkpoint.own_files is not None else ():
        if name in known or (name.endswith("/") and any(file.startswith(name) for file in known)):
            continue
        inside, nbytes = [], 0
        with contextlib.suppress(OSError):  # symbolic links that lead nowhere, or in a circle
            found = list(itertools.islice(_files_in(folder, name), _MAX_FILES + 1))
            inside, nbytes = found, sum(map(folder.size_bytes, found))
        has_data = any(DATA.fullmatch(file.rpartition("/")[2]) for file in (name.removesuffix("/"), *inside))
        # A folder is copied as a whole, or not at all.
        if inside and not has_data and nbytes <= room_bytes and len(files) + len(inside) <= _MAX_FILES:
            files += inside
            room_bytes -= nbytes
        else:
            left.append(name)
    copied = [file for file in files if file != RECORD_FILE]  # split and merge write a new record
    listed = (("copied", copied), ("not copied, as not of the checkpoint", left))
    notes = [f"{what}: {some_of(names, _NAMES_IN_NOTES)}" for what, names in listed if names]
    notes += [*checkpoint.notes, *notes_on_checksums(checkpoint)]
    return replace(checkpoint, sidecars=tuple(files), notes=tuple(notes))


def _files_in(folder: Folder, name: str) -> Iterator[str]:
    """Yield the file ``name``, or, if it ends in ``/``, all files in that subfolder."""
    if not name.endswith("/"):
        yield name
        return
    for each in open_folder(f"{folder.path.rstrip('/')}/{name.rstrip('/')}").files():
        yield from _files_in(folder, f"{name}{each}")


def read_sidecar(folder: Folder, file: str) -> bytes:
    """Read a sidecar; compare a file of ``torch.save`` with its checksums."""
    try:
        content = read_file(folder, file, _MAX_BYTES)
        # Look at both ends of a zip file: one damaged bit hides only one of them. Before torch 1.6, files are no zips.
        if file.endswith(TORCH_SUFFIXES) and (content.startswith(b"PK\3\4") or is_zip_end(content)):
            Archive(memoryview(content)).read_all()
    except DamagedError as error:
        raise CheckpointError(
            f"{folder.path}/{file} is not what torch.save writes ({error}), and would be copied as it is; fetch it "
            "again, or move it away"
        ) from error
    return content


# Files, and the folder that gets its final name at the end -----------------------------------------------------------

_Place = tuple[str, TensorRegion | None, _StorageInfo]
"""Key and rectangle of a piece, and its place in the new files."""


class _Stream(io.BufferedWriter):
    """Writes data in slices that fit into caches, three times as fast as 128 MiB in one write."""

    def write(self, data: Any) -> int:
        view = memoryview(data)
        return sum(
            [super(_Stream, self).write(view[at : at + _SLICE_BYTES]) for at in range(0, len(view), _SLICE_BYTES)]
        )


def _save(rewrite: Rewrite, reader: ItemReader, folder: Path, destination: str, threads: int, advance: Advance) -> None:
    """Write all files of the new checkpoint; for one of DCP (without ``heads``), write ``.metadata`` as well."""
    stop = threading.Event()

    def write(file: str) -> list[_Place]:
        places = []
        with _Stream(io.FileIO(folder / file, "w")) as stream:
            stream.write(rewrite.heads.get(file, b""))
            as_torch_orders = sorted(rewrite.files[file], key=lambda piece: piece.region is not None)
            for piece in as_torch_orders:
                if stop.is_set():
                    raise CheckpointError("another file could not be written")
                begin = stream.tell()
                found = piece.read(reader)
                if not isinstance(found, Tensor):
                    stream.write(found)
                elif rewrite.heads:
                    stream.write(found.reshape(-1).view(torch.uint8).numpy().data)
                else:
                    torch.save(found, cast(IO[bytes], stream))
                del found  # free this piece before the next one is read
                places.append((piece.key, piece.region, _StorageInfo(file, begin, stream.tell() - begin)))
                advance(piece.nbytes)
            stream.flush()
            os.fsync(stream.fileno())
        return places

    with ThreadPoolExecutor(max_workers=threads) as pool:
        try:
            places = [place for found in pool.map(write, rewrite.files) for place in found]
        except BaseException:
            stop.set()
            raise
    if not rewrite.heads:
        write_file(folder / METADATA_FILE, pickle.dumps(_metadata(rewrite, places, destination)))


def _metadata(rewrite: Rewrite, places: list[_Place], destination: str) -> dcp.Metadata:
    entries = {
        key: dcp.TensorStorageMetadata(dcp.TensorProperties(tensor.dtype), torch.Size(tensor.shape), [])
        for key, tensor in rewrite.tensors.items()
    }
    # The number in a MetadataIndex is the chunk's place in the list, where DCP looks first.
    stored = {dcp.MetadataIndex(key): info for key, region, info in places if region is None}
    regions = {(key, region): info for key, region, info in places if region is not None}
    for key, region in sorted(regions):
        chunk, chunks = dcp.ChunkStorageMetadata(*map(torch.Size, region)), entries[key].chunks
        stored[dcp.MetadataIndex(key, chunk.offsets, len(chunks))] = regions[key, region]
        chunks.append(chunk)
    return dcp.Metadata(
        {**{key: dcp.BytesStorageMetadata() for key in rewrite.objects}, **entries},
        planner_data=dict(rewrite.paths),
        storage_data=stored,
        storage_meta=dcp.StorageMeta(destination),
        version=CURRENT_DCP_VERSION,
    )


@contextlib.contextmanager
def appearing(destination: str, *, is_file: bool = False) -> Iterator[Path]:
    """Yield an empty folder; at the end, rename it to ``destination`` or send it there. Remove it after an error.

    ``is_file``: yield the path of a file in that folder instead; this file becomes ``destination``.
    """
    try:
        if "://" in destination:
            with tempfile.TemporaryDirectory(prefix="checkpoint-tools-") as spool:
                yield Path(spool)
                _send(Path(spool), destination)
            return
        path, folder = Path(destination), Path(f"{destination.rstrip('/')}.partial")
        with held(folder) as mark:
            made = folder / path.name if is_file else folder
            try:
                yield made
                _sync(folder)
                if os.path.lexists(path):
                    raise CheckpointError(f"{path} has appeared meanwhile; move it away, and run this again")
                made.rename(path)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            _sync(path.parent)
            if is_file:
                shutil.rmtree(folder)
            else:
                (path / mark.name).unlink()
    except (OSError, RuntimeError) as error:
        raise written(error) from error


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Create a folder, or take one that has our mark; lock it against other processes; remove all but the mark."""
    mark = folder / _MARK
    folder.mkdir(exist_ok=True)
    names = os.listdir(folder)
    if names and _MARK not in names:
        raise CheckpointError(f"{folder} exists, and was not made by this program; remove it, or give another name")
    lock = os.open(mark, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held the lock may have finished and renamed the folder: is this still the same mark?
            is_ours = os.path.samestat(os.fstat(lock), os.stat(mark))
        except OSError:
            is_ours = False
        if not is_ours:
            raise CheckpointError(f"another process is writing to {folder}; wait for it, or end it")
        for name in os.listdir(folder):
            if name != _MARK:
                each = folder / name
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
        yield mark
    finally:
        os.close(lock)


def _sync(folder: Path) -> None:
    """Flush a folder's directory entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _send(folder: Path, url: str) -> None:
    """Send all files to a URL, ``.metadata`` last; remove them again if one fails."""
    remote = RemoteFolder(url)
    fs, root = remote.fs, remote.root
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        for file in sorted(files, key=lambda name: (name == METADATA_FILE, name)):
            place = f"{root.rstrip('/')}/{file}"
            fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(folder / file), place)
    except BaseException as error:
        with contextlib.suppress(Exception):  # report the first error, not this one
            fs.rm(root, recursive=True)
        if isinstance(error, Exception):
            raise CheckpointError(f"{url} cannot be written: {type(error).__name__}: {error}") from error
        raise


def written(error: BaseException) -> CheckpointError:
    """Return the error to raise for a failed write; find the OSError that torch's own errors wrap."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    error = found or error
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "; make room, or choose another disk" if full else ""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    reason = f"{error.filename}: {reason}" if isinstance(error, OSError) and error.filename else reason
    return CheckpointError(f"the new checkpoint cannot be written: {reason}{hint}")
