"""Exact deltas of weights, out of the updates: no second copy of the weights, and no host that looks for changes.

::

    update of a bucket:  copy its weights as they are used ─▶ the user's step ─▶ a bit for each that differs ─▶ host
                              └─▶ sums ────────────────────────────────────────────▶ sums ───────────────────▶ host
    commit:              the bits count; those of a step that is rolled back or fails are dropped
    iterating:           sums before an update that differ from those behind the last one, or sums that are others by
                         now: somebody else has written there, and all elements are handed out
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..api.wrapped import IF_NOT, attachment_of, optimizers_in
from ..checkpoint.chunks import ShardChunks, chunks_of, contiguous_strides
from ..device.lanes import Mark
from ..engine.engine import Engine
from ..engine.homes import home_of
from ..fsdp.dtensor import canonical_fqn, has_inner_tensors, local_shard
from ..fsdp.fully_shard import dtypes_in_use, parameter_names
from ..optimizers.bucket_update import BoundRange
from ..policy import listed, tells
from ..state.layout import params_of
from .rows import PIECE_NUMEL, Sums, count, differing, gather, positions, read_sums, rows_of, sums

DENSE_ABOVE = 1 / 4
"""The share of a shard that has changed above which all of it is handed out: the numbers would take more than that."""

_DENSE_NUMEL = 1 << 22
"""Elements in one delta of a shard that is handed out whole."""


class WeightDelta(NamedTuple):
    """Elements of one parameter that have changed, as they are now.

    Attributes:
        name: of the parameter, as state dicts have it.
        indices: int64, on the host: where each element is in the flat whole parameter, not in this rank's shard.
        values: on the host, in the dtype in which forwards use the parameter.
        dense: ``indices`` are all of this rank's shard, or of a part of it: somebody else has written the parameter, or
            more than a quarter of the shard has changed.
    """

    name: str
    indices: Tensor
    values: Tensor
    dense: bool


class Piece(NamedTuple):
    """A range of a shard that is compared at once."""

    param: Tensor
    start: int
    stop: int


def _cut(param: Tensor, start: int, stop: int) -> list[Piece]:
    ends = [*range(start + PIECE_NUMEL, stop, PIECE_NUMEL), stop] if stop > start else []
    return [Piece(param, *both) for both in itertools.pairwise([start, *ends])]


@dataclass(eq=False)
class Batch:
    """Pieces that are used in one dtype and compared in one go: at most ``PIECE_NUMEL`` elements, or one of them."""

    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    flats: list[Tensor] = field(default_factory=list)
    numel: int = 0

    def rows(self) -> Tensor:
        """Copy them as they are now, in the current stream."""
        return gather(self.flats, self.dtype)

    @property
    def numels(self) -> list[int]:
        """Elements of each."""
        return [flat.numel() for flat in self.flats]


def _batches(found: Sequence[tuple[Piece, Tensor, torch.dtype]]) -> list[Batch]:
    made: list[Batch] = []
    open_ones: dict[object, Batch] = {}
    for piece, flat, dtype in found:
        batch = open_ones.get((dtype, flat.device))
        if batch is None or batch.numel + flat.numel() > PIECE_NUMEL:
            batch = open_ones[dtype, flat.device] = Batch(dtype)
            made.append(batch)
        batch.pieces.append(piece)
        batch.flats.append(flat)
        batch.numel += flat.numel()
    return made


class Record(NamedTuple):
    """What an update has changed in one batch: on the host once its marks have passed."""

    pieces: list[Piece]
    bits: Tensor
    sums: Tensor  # before the update and behind it, as rows.sums has them


class _Step:
    """What is heard of one step."""

    def __init__(self, recorder: "_Recorder") -> None:
        self._recorder = recorder
        self._records: list[Record] = []

    def update(self, ranges: Sequence[BoundRange], run: Callable[[], None]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be watched
            batches = _batches([found for one in ranges for found in self._recorder.pieces_of(one)])
            before = [batch.rows() for batch in batches]
        run()
        while batches:
            with torch._C.DisableTorchFunctionSubclass():
                self._compare(batches.pop(0), before.pop(0))

    def _compare(self, batch: Batch, before: Tensor) -> None:
        after = batch.rows()
        both = torch.stack([sums(rows, batch.numels) for rows in (before, after)])
        found = differing(before, after), both
        pin = before.device.type != "cpu" and self._recorder.pins
        homes = [torch.empty(one.shape, dtype=one.dtype, pin_memory=pin) for one in found]
        for home, one in zip(homes, found, strict=True):
            home.copy_(one, non_blocking=True)
        self._records.append(Record(batch.pieces, *homes))

    def committed(self, updated: Sequence[Mark]) -> None:
        self._recorder.add(self._records, updated)


@dataclass(eq=False)
class _Shard:
    """What is known of the shard of one parameter.

    Attributes:
        sums: of its pieces behind the last update, by their first elements, with their ends.
        bits: those of elements that have changed since somebody asked; ``None``: none.
        is_dense: somebody else has written it.
    """

    sums: dict[int, tuple[int, Sums]]
    bits: Tensor | None = None
    is_dense: bool = False

    def add(self, piece: Piece, bits: Tensor, old: Sums, new: Sums) -> None:
        if self.sums.get(piece.start) != (piece.stop, old):
            self.is_dense = True
        self.sums[piece.start] = piece.stop, new
        if self.is_dense:
            self.bits = None
            return
        if self.bits is None:
            self.bits = torch.zeros(8 * rows_of(local_shard(piece.param).numel()), dtype=torch.uint8)
        begin = piece.start // 8
        self.bits[begin : begin + len(bits)] |= bits


class _Recorder:
    """The listener: it knows of what the last call has not handed out. It has no reference to the optimizer."""

    def __init__(self, dtypes: dict[Tensor, torch.dtype], pins: bool) -> None:
        self.dtypes, self.pins = dtypes, pins
        self.shards: dict[Tensor, _Shard] = {}
        self._records: list[Record] = []
        self._marks: Sequence[Mark] = ()

    def begin(self) -> _Step:
        return _Step(self)

    def dtype_of(self, param: Tensor) -> torch.dtype:
        return self.dtypes.get(param, param.dtype)

    def pieces_of(self, one: BoundRange) -> Iterator[tuple[Piece, Tensor, torch.dtype]]:
        """Pieces of a range that is on the device, and their elements there; none of what has inner tensors."""
        local, param = local_shard(one.param).detach(), one.shard.param
        if has_inner_tensors(param):
            return
        flat = local.reshape(-1)
        for piece in _cut(param, one.start, one.stop):
            yield piece, flat[piece.start - one.start : piece.stop - one.start], self.dtype_of(param)

    def add(self, records: list[Record], updated: Sequence[Mark]) -> None:
        """A step is complete. What the one before it has recorded is on the host by now."""
        self.merge()
        self._records, self._marks = records, updated

    def merge(self) -> None:
        """Add what is recorded to what is known."""
        for mark in self._marks:
            mark.synchronize()  # R3, on the host
        records, self._records, self._marks = self._records, [], ()
        for pieces, bits, both in records:
            numels = [piece.stop - piece.start for piece in pieces]
            old, new = (read_sums(one, numels) for one in both)
            parts = bits.split([8 * rows_of(numel) for numel in numels])
            for piece, part, *its_sums in zip(pieces, parts, old, new, strict=True):
                shard = self.shards.setdefault(piece.param, _Shard({}, is_dense=True))
                shard.add(piece, part, *its_sums)


class WeightDeltas:
    """What has changed in the weights of one optimizer since it was last iterated over; see :func:`weight_deltas`."""

    def __init__(self, optimizer: Optimizer, engine: Engine, names: dict[Tensor, str], recorder: _Recorder) -> None:
        self._optimizer, self._engine = weakref.ref(optimizer), weakref.ref(engine)
        self._names, self._recorder = names, recorder
        engine.contents.listeners.append(recorder)
        self.close = weakref.finalize(self, _leave, weakref.ref(engine), recorder)  # also when this is dropped
        self.close.atexit = False
        with engine.between_steps():
            self._recorder.shards = {param: _Shard(its) for param, its in self._measure(engine).items()}

    def forget(self) -> None:
        """Hand out all weights the next time: what was handed out last has not arrived."""
        for shard in self._recorder.shards.values():
            shard.is_dense = True

    def __iter__(self) -> Iterator[WeightDelta]:
        """Read what has changed between two steps, at once, and hand it out; what is not taken then is gone.

        Raises:
            RuntimeError: the backward has updated, and ``step()`` has not been called; an exception has left weights
                half updated; parameters are asleep, or others than they were; the optimizer is not offloaded any more.
        """
        engine, attachment = self._engine(), attachment_of(self._optimizer())
        if engine is None or attachment is None or attachment.engine is not engine or not self.close.alive:
            raise RuntimeError(
                "weight_deltas: its optimizer is not offloaded any more, or close() was called. Call "
                "weight_deltas(optimizer) again behind offload_optimizer(), and send all weights once."
            )
        with engine.between_steps():
            return self._hand_out(self._take(engine))

    def _take(self, engine: Engine) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """List parameters that have changed: which elements have, as bits, ``None`` being all, and their values."""
        recorder = self._recorder
        present = self._measure(engine)
        recorder.merge()
        taken: list[tuple[Tensor, Tensor | None, Tensor]] = []
        for param, its_sums in present.items():
            shard = recorder.shards.get(param, _Shard({}))
            flat = _flat(engine, param)
            bits = None if shard.is_dense or shard.sums != its_sums else shard.bits
            if shard.sums == its_sums and bits is None and not shard.is_dense:
                continue
            if bits is not None and count(bits) > DENSE_ABOVE * flat.numel():
                bits = None
            wanted = flat if bits is None else flat[positions(bits).to(flat.device)]
            taken.append((param, bits, wanted.to("cpu", recorder.dtype_of(param), copy=True)))
        recorder.shards = {param: _Shard(its_sums) for param, its_sums in present.items()}
        return taken

    def _hand_out(self, taken: list[tuple[Tensor, Tensor | None, Tensor]]) -> Iterator[WeightDelta]:
        for param, bits, values in taken:
            name, part = self._names[param], chunks_of(param)
            if bits is not None:
                yield WeightDelta(name, global_index(part, positions(bits)), values, dense=False)
                continue
            for start in range(0, len(values), _DENSE_NUMEL):
                some = values[start : start + _DENSE_NUMEL]
                indices = global_index(part, torch.arange(start, start + len(some)))
                yield WeightDelta(name, indices, some, dense=True)

    def _measure(self, engine: Engine) -> dict[Tensor, dict[int, tuple[int, Sums]]]:
        """Sum all shards as they are now, behind all updates."""
        engine.check_usable("weight_deltas")
        optimizer = self._optimizer()
        assert optimizer is not None, "it has an attachment"
        params = params_of(optimizer)
        if unknown := [engine.names.get(one, "a parameter") for one in params if one not in self._names]:
            raise RuntimeError(
                f"weight_deltas: the optimizer has {listed(unknown)}, which its model did not have when weight_deltas "
                "was called. Call weight_deltas(optimizer) again, and send all weights once."
            )
        engine.wait_updated()
        wait_parameters_home(engine)
        pieces = {param: _cut(param, 0, local_shard(param).numel()) for param in params}
        for shard, ranges in _ranges(engine).items():
            if shard in pieces:
                pieces[shard] = [piece for start, stop in ranges for piece in _cut(shard, start, stop)]
        found: list[tuple[Piece, Tensor, torch.dtype]] = []
        with torch._C.DisableTorchFunctionSubclass():
            for param, its in pieces.items():
                flat, dtype = _flat(engine, param), self._recorder.dtype_of(param)
                found += [(piece, flat[piece.start : piece.stop], dtype) for piece in its]
            measured: dict[Tensor, dict[int, tuple[int, Sums]]] = {param: {} for param in params}
            for batch in _batches(found):
                both = zip(batch.pieces, read_sums(sums(batch.rows(), batch.numels).cpu(), batch.numels), strict=True)
                for piece, its_sums in both:
                    measured[piece.param][piece.start] = piece.stop, its_sums
        return measured


def _leave(engine: "weakref.ref[Engine]", recorder: _Recorder) -> None:
    if (found := engine()) is not None and recorder in found.contents.listeners:
        found.contents.listeners.remove(recorder)


def _ranges(engine: Engine) -> dict[Tensor, list[tuple[int, int]]]:
    found: defaultdict[Tensor, list[tuple[int, int]]] = defaultdict(list)
    for bucket in engine.plan.buckets:
        home = home_of(bucket)
        for shard, piece in zip(home.shards, home.packed.ranges, strict=True):
            found[shard.param].append((piece.start, piece.stop))
    return found


def wait_parameters_home(engine: Engine) -> None:
    """Block the host until parameters that stream are at home, as new as the last update."""
    items = [*engine.weights.items.values()]
    engine.core.cache.flush(items)
    for item in items:
        if item.home.stored is not None:
            item.home.stored.synchronize()  # R2, on the host


def _flat(engine: Engine, param: Tensor) -> Tensor:
    """Return the elements of a shard, row by row, where they are: in its home, or on the device."""
    part = engine.weights.parts.get(param)
    local = local_shard(param) if part is None else part.home.weights
    assert local is not None, "the home of a parameter has weights"
    if local.numel() and not local.untyped_storage().nbytes():
        raise RuntimeError(
            f"weight_deltas: {engine.names.get(param, 'a parameter')} is asleep. Call reload_model(model) first, or "
            "iterate before offload_model()."
        )
    return local.detach().reshape(-1)


def global_index(part: ShardChunks, at: Tensor) -> Tensor:
    """Return where elements are in the flat whole tensor, of a rank that has ``part``, by their numbers there."""
    strides = contiguous_strides(part.global_shape)
    found = torch.empty_like(at)
    is_grid = len(part.local_shape) == len(part.global_shape)
    own_strides = contiguous_strides(part.local_shape)
    for chunk in part.chunks:
        if not chunk.numel:
            continue
        inside, numbers = torch.ones_like(at, dtype=torch.bool), torch.zeros_like(at)
        if not is_grid:
            inside = (at >= chunk.local_start) & (at < chunk.local_start + chunk.numel)
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            if is_grid:
                first = chunk.local_start // own_strides[dim] % max(1, part.local_shape[dim])
                local = at // own_strides[dim] % max(1, part.local_shape[dim]) - first
                inside &= (local >= 0) & (local < size)
            else:
                local = (at - chunk.local_start) // chunk.local_strides[dim] % size
            numbers += (local + offset) * strides[dim]
        found = torch.where(inside, numbers, found)
    return found


@tells("weight_deltas(optimizer)")
def weight_deltas(optimizer: Optimizer) -> WeightDeltas:
    """Record which weights each step changes; iterate over the result for what has changed since the last time.

    ::

        deltas = weight_deltas(optimizer)      # the engine has the weights of this moment
        ...                                    # any number of steps
        for name, indices, values, dense in deltas:
            send(name, indices, values)        # whole[name].view(-1)[indices] = values

    Weights are compared as they are used: in ``MixedPrecisionPolicy.param_dtype``, else in the parameter's dtype. Each
    rank hands out what has changed in its own shards, replicas the same. No collective. What has changed and changed
    back is handed out with its present value. Deltas are those of parameters of this optimizer.

    An update copies its weights on the device first, and its bits go to the host, one for each element.

    Raises:
        TypeError: it is no optimizer, and holds none.
        RuntimeError: it is not offloaded, or the backward has updated and ``step()`` was not called.
        ValueError: its updates cannot be listened to; says why, and what to do.
    """
    found = optimizers_in(optimizer, "weight_deltas")
    attachment = attachment_of(found[0])
    if len(found) > 1 or attachment is None:
        problem = (
            f"holds {len(found)} optimizers; give one at a time" if len(found) > 1 else f"is not offloaded; {IF_NOT}"
        )
        raise RuntimeError(f"weight_deltas: this {type(found[0]).__name__} {problem}.")
    engine, model = attachment.engine, None if attachment.model is None else attachment.model()
    params = params_of(found[0])
    if model is None:
        raise ValueError(
            "weight_deltas: names and the dtype of weights are the model's, and it is not known. Call "
            "offload_optimizer(optimizer, model=model)."
        )
    if engine.layouts.capabilities.moves_whole:
        raise ValueError(
            f"weight_deltas: {engine.cls.__name__} moves as a whole, and its own step updates all weights at once. "
            "Compare with a copy of the weights, or call offload_optimizer(optimizer, model=model, "
            "trust_separable=True) if its steps may be divided."
        )
    if engine.host is not None:
        raise ValueError("weight_deltas: the CPU updates a part of the weights. Use OffloadPolicy(host_fraction=0).")
    if wrapped := [engine.names.get(one, "a parameter") for one in params if has_inner_tensors(one)]:
        raise ValueError(
            f"weight_deltas: {listed(wrapped)} are made of several tensors, of which forwards compute their weights. "
            "Leave them to an optimizer of their own, and compare those with a copy."
        )
    names = {param: canonical_fqn(model, name) for param, name in parameter_names(model).items()}
    recorder = _Recorder(dtypes_in_use(model), engine.policy.pins(engine.device.type))
    return WeightDeltas(found[0], engine, names, recorder)
