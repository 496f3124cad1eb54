"""Exact deltas of weights, out of the updates: no second copy of the weights, and no pass over them on the host.

::

    update of a bucket:  copy its weights as they are used ─▶ the user's step ─▶ a bit for each that differs ─▶ host
                              └─▶ sums ────────────────────────────────────────────▶ sums ───────────────────▶ host
    commit:              the bits count; those of a step that is rolled back or fails are dropped
    iterating:           if the sums before an update are not those after the last one, or differ now, other code has
                         written the weights: all elements are handed out
"""

import itertools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..api.wrapped import IF_NOT, attachment_of, optimizers_in
from ..checkpoint.chunks import chunks_of, flat_index
from ..device.lanes import Lanes, Mark
from ..device.worker import Worker
from ..engine.engine import Engine
from ..engine.homes import home_of
from ..fsdp.dtensor import canonical_fqn, has_inner_tensors, local_shard, unseen
from ..fsdp.fully_shard import dtypes_in_use, parameters_of
from ..optimizers.bucket_update import BoundRange
from ..policy import listed, tells
from ..state.layout import params_of
from .rows import PIECE_NUMEL, ROW, Sums, compare, gather, merge, positions, rows_of, sums

DENSE_ABOVE = 1 / 4
"""Share of changed elements above which the whole shard is handed out."""

_DENSE_NUMEL = 1 << 22
"""Elements in one delta of a shard that is handed out whole."""


class WeightDelta(NamedTuple):
    """Elements of one parameter that have changed, on the host.

    Attributes:
        name: of the parameter, as state dicts have it.
        indices: int64: where each element is in the flat whole parameter, not in this rank's shard.
        values: in the dtype in which forwards use the parameter.
        dense: all elements of this rank's shard are handed out, here or in several deltas: other code has written
            the parameter, or more than a quarter of the shard has changed.
    """

    name: str
    indices: Tensor
    values: Tensor
    dense: bool


class Piece(NamedTuple):
    """A range of a shard that is compared at once; ``flat`` are its elements."""

    param: Tensor
    start: int
    stop: int
    dtype: torch.dtype
    flat: Tensor


@dataclass(eq=False)
class Batch:
    """Pieces that forwards use in one dtype, and that are compared together: at most ``PIECE_NUMEL`` elements."""

    pieces: list[Piece] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)

    def copy(self) -> Tensor:
        """Copy the present values of the pieces into rows, in the current stream."""
        rows, like = sum(map(rows_of, self.numels)), self.pieces[0]
        made = torch.empty(rows, ROW, dtype=like.dtype, device=like.flat.device)
        return gather([piece.flat for piece in self.pieces], made)


def _batches(pieces: Sequence[Piece]) -> list[Batch]:
    made: defaultdict[object, list[Batch]] = defaultdict(list)
    for piece in pieces:
        alike = made[piece.dtype, piece.flat.device]
        if not alike or sum(alike[-1].numels) + piece.flat.numel() > PIECE_NUMEL:
            alike.append(Batch())
        alike[-1].pieces.append(piece)
        alike[-1].numels.append(piece.flat.numel())
    return [*itertools.chain.from_iterable(made.values())]


class _Step:
    """Records one step: bits and sums of each batch that it updates, on their way to the host."""

    def __init__(self, recorder: "_Recorder") -> None:
        self._recorder = recorder
        self._records: list[tuple[Batch, Tensor, Tensor]] = []

    def update(self, ranges: Sequence[BoundRange], run: Callable[[], None]) -> None:
        with unseen():  # parameters may be watched
            locals_ = [(one, local_shard(one.param).detach()) for one in ranges if not has_inner_tensors(one.param)]
            cut = [self._recorder.cut(one.shard.param, one.start, flat.reshape(-1)) for one, flat in locals_]
            batches = [(batch, batch.copy()) for batch in _batches([*itertools.chain.from_iterable(cut)])]
        run()
        while batches:
            with unseen():
                self._compare(*batches.pop(0))

    def _compare(self, batch: Batch, before: Tensor) -> None:
        homes = self._recorder.store(compare(before, [piece.flat for piece in batch.pieces]))
        batch.pieces = [piece._replace(flat=homes[0][:0]) for piece in batch.pieces]  # other items may get the places
        self._records.append((batch, homes[0], homes[1]))

    def committed(self) -> None:
        self._recorder.add(self._records)


@dataclass(eq=False)
class _Shard:
    """Records of one shard.

    Attributes:
        sums: by the first element of each piece, its end and its sums after the last update.
        bits: by the first element of a piece, a bit per element, set if the element has changed since the last
            iteration over deltas; in the memory to which an update stored them, so that a single step needs no copy.
        is_dense: other code has written the shard.
    """

    sums: dict[int, tuple[int, Sums]]
    bits: dict[int, Tensor] = field(default_factory=dict)
    is_dense: bool = False


class _Recorder:
    """The engine's listener: records changes that are yet to be handed out. It does not refer to the optimizer."""

    stores_kept = False

    def __init__(self, dtypes: dict[Tensor, torch.dtype], lanes: Lanes, device: torch.device, pins: bool) -> None:
        self._dtypes, self._lanes, self._pins = dtypes, lanes, pins
        self.shards: dict[Tensor, _Shard] = {}
        self._stored = deque[tuple[Mark, Sequence[Tensor]]]()
        self._thread = Worker("fsdp_offload deltas", device)  # 30 ms a step for 3 G elements
        self._merging: Future[None] | None = None
        self.problem: Exception | None = None
        self.forgotten = self.handed_out = 0  # calls of forget(), and how many the last iteration knew of

    def begin(self) -> _Step:
        return _Step(self)

    def before_reduction(self) -> None:
        """Do nothing: each update compares the weights itself."""

    def cut(self, param: Tensor, start: int, flat: Tensor) -> list[Piece]:
        """Cut ``flat``, elements of a shard from ``start`` on, into pieces."""
        dtype, parts = self._dtypes.get(param, param.dtype), flat.split(PIECE_NUMEL) if flat.numel() else ()
        starts = itertools.accumulate(map(len, parts), initial=start)
        return [Piece(param, at, at + len(part), dtype, part) for at, part in zip(starts, parts, strict=False)]

    def store(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors that the current stream has made to the host, in a lane for which no part of a step waits.

        In the update's lane, the next update would wait until the copy engine is done with other stores.
        """
        lanes, down = self._lanes, self._lanes.down
        pin = found[0].device.type != "cpu" and self._pins
        homes = [torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=pin) for one in found]
        lanes.made([*found, *homes], here := lanes.here())
        down.wait(here.mark())  # R3: it has made them
        down.copy([*zip(homes, found, strict=True)])
        self._stored.append((down.mark(), found))  # R2: kept until they are copied, like other memory of their stream
        while self._stored and self._stored[0][0].is_passed():
            self._stored.popleft()
        return homes

    def add(self, records: list[tuple[Batch, Tensor, Tensor]]) -> None:
        """Merge the records of a complete step, in a thread, once they are on the host."""
        self.wait_merged()
        self._merging = self._thread.submit(self._merge, records, self._lanes.down.mark())

    def wait_merged(self) -> None:
        """Wait until the last step's records are merged; keep an error for the next read, as the step is complete."""
        merging, self._merging = self._merging, None
        try:
            if merging is not None:
                merging.result()
        except Exception as error:  # noqa: BLE001  # raised where deltas are read
            self.problem = error

    def _merge(self, records: list[tuple[Batch, Tensor, Tensor]], stored: Mark) -> None:
        stored.synchronize()  # R3, on the host
        for batch, bits, both in records:
            parts = bits.split([8 * rows_of(numel) for numel in batch.numels])
            for piece, part, old, new in zip(batch.pieces, parts, *both.tolist(), strict=True):
                shard, start = self.shards.setdefault(piece.param, _Shard({})), piece.start
                if shard.sums.get(start) != (piece.stop, Sums(*old)):
                    shard.is_dense = True
                if not shard.is_dense and start in shard.bits:
                    merge(shard.bits[start], part)
                elif not shard.is_dense:
                    shard.bits[start] = part
                # Last: after an exception above, the sums differ, and all elements are handed out.
                shard.sums[start] = piece.stop, Sums(*new)


class WeightDeltas:
    """Iterates over the weights of one optimizer that have changed since the last iteration, until ``close()``."""

    def __init__(self, optimizer: Optimizer, engine: Engine, names: dict[Tensor, str], recorder: _Recorder) -> None:
        self._optimizer, self._engine = weakref.ref(optimizer), weakref.ref(engine)
        self._names, self._recorder = names, recorder
        with engine.between_steps():
            recorder.shards = {param: _Shard(its) for param, (_, its) in self._measure(engine).items()}
            engine.contents.listeners.append(recorder)
        self.close = weakref.finalize(self, _leave, weakref.ref(engine), recorder)  # also when this object is dropped
        self.close.atexit = False

    def forget(self) -> None:
        """Hand out all weights the next time. Call it if the last deltas have not arrived."""
        self._recorder.forgotten += 1

    def __iter__(self) -> Iterator[WeightDelta]:
        """Read all changes at once, between two steps, and hand them out; those that the caller leaves are lost.

        Raises:
            RuntimeError: the backward has updated, and ``step()`` has not been called; an exception has left weights
                half updated; parameters are asleep, or are others; the optimizer is not offloaded any more; a step
                could not be recorded.
        """
        engine, attachment = self._engine(), attachment_of(self._optimizer())
        if engine is None or attachment is None or attachment.engine is not engine or not self.close.alive:
            raise RuntimeError(
                "weight_deltas: its optimizer is not offloaded any more, or close() was called. Call "
                "weight_deltas(optimizer) again behind offload_optimizer(), and send all weights once."
            )
        with engine.between_steps():
            return self._hand_out(self._take(engine))

    def __reduce__(self) -> NoReturn:
        raise TypeError("WeightDeltas listens to an optimizer of this process. Iterate over it here, send the deltas.")

    def _take(self, engine: Engine) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """List the changed parameters, each with the indices of changed elements (``None``: all) and their values."""
        recorder, present = self._recorder, self._measure(engine)
        recorder.wait_merged()
        problem, recorder.problem = recorder.problem, None
        if problem is not None:
            raise RuntimeError(
                "weight_deltas: what a step has changed could not be recorded (see the cause). Iterate again: weights "
                "without a record are handed out whole."
            ) from problem
        taken: list[tuple[Tensor, Tensor | None, Tensor]] = []
        forgotten = recorder.forgotten  # another thread may call forget() meanwhile: that is for the next iteration
        for param, (pieces, its_sums) in present.items():
            shard = recorder.shards.get(param, _Shard({}))
            is_dense = forgotten > recorder.handed_out or shard.is_dense or shard.sums != its_sums
            if not pieces or not (shard.bits or is_dense):
                continue
            flat, dtype = _flat(engine, param), pieces[0].dtype
            changed = None if is_dense else _changed(shard.bits, flat, dtype)
            if changed is None or len(changed[0]):
                taken.append((param, *(changed or (None, flat.to("cpu", dtype, copy=True)))))
        own = set(params_of(optimizer)) if (optimizer := self._optimizer()) is not None else ()
        recorder.shards = {param: _Shard(its) for param, (_, its) in present.items() if param in own}
        recorder.handed_out = forgotten
        return taken

    def _hand_out(self, taken: list[tuple[Tensor, Tensor | None, Tensor]]) -> Iterator[WeightDelta]:
        for param, places, values in taken:
            name, part = self._names[param], chunks_of(param)
            if places is not None:
                yield WeightDelta(name, flat_index(part, places), values, dense=False)
                continue
            for number, some in enumerate(values.split(_DENSE_NUMEL)):
                numbers = torch.arange(len(some), device="cpu") + number * _DENSE_NUMEL
                yield WeightDelta(name, flat_index(part, numbers), some, dense=True)

    def _measure(self, engine: Engine) -> dict[Tensor, tuple[list[Piece], dict[int, tuple[int, Sums]]]]:
        """Return the pieces of all shards, and the sums of each piece after all updates so far."""
        engine.check_usable("weight_deltas")
        optimizer, cut = self._optimizer(), self._recorder.cut
        params = params_of(optimizer) if optimizer is not None else []
        attachment = attachment_of(optimizer)
        model = None if attachment is None or attachment.model is None else attachment.model()
        there = dict.fromkeys(params) if model is None else parameters_of(model)
        if gone := [engine.names.get(one, "a parameter") for one in params if one not in there]:
            raise RuntimeError(
                f"weight_deltas: the optimizer has {listed(gone)}, which the model does not have (any more, after "
                "load_state_dict(assign=True)). Build an optimizer of the model's parameters, and offload that."
            )
        if unknown := [engine.names.get(one, "a parameter") for one in params if one not in self._names]:
            raise RuntimeError(
                f"weight_deltas: the optimizer has {listed(unknown)}, which its model did not have when weight_deltas "
                "was called. Call weight_deltas(optimizer) again, and send all weights once."
            )
        params = [*dict.fromkeys([*params, *self._recorder.shards])]  # some may have left it since a step
        engine.wait_updated()
        wait_parameters_home(engine)
        ranges: defaultdict[Tensor, list[tuple[int, int]]] = defaultdict(list)
        for home in map(home_of, engine.plan.buckets):
            for shard, one in zip(home.shards, home.packed.ranges, strict=True):
                ranges[shard.param].append((one.start, one.stop))
        measured: dict[Tensor, tuple[list[Piece], dict[int, tuple[int, Sums]]]] = {}
        with unseen():
            for param in params:
                flat = _flat(engine, param)
                cuts = [cut(param, start, flat[start:stop]) for start, stop in ranges.get(param) or [(0, len(flat))]]
                measured[param] = [*itertools.chain.from_iterable(cuts)], {}
            for batch in _batches([piece for pieces, _ in measured.values() for piece in pieces]):
                for piece, its_sums in zip(batch.pieces, sums(batch.copy(), batch.numels).tolist(), strict=True):
                    measured[piece.param][1][piece.start] = piece.stop, Sums(*its_sums)
        return measured


def _changed(bits: dict[int, Tensor], flat: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Return where ``flat`` has changed, and the values there; ``None``: in more than ``DENSE_ABOVE`` of it.

    The bits are read where ``flat`` is: on a GPU, not by one thread of the host.
    """
    places, values, left = list[Tensor](), list[Tensor](), int(DENSE_ABOVE * flat.numel())
    for begin in sorted(bits):
        at = positions(bits[begin].to(flat.device)) + begin
        left -= len(at)
        if left < 0:
            return None
        values.append(flat[at].to("cpu", dtype))
        places.append(at.cpu())
    return torch.cat(places), torch.cat(values)


def _leave(engine: "weakref.ref[Engine]", recorder: _Recorder) -> None:
    if (found := engine()) is not None and recorder in found.contents.listeners:
        found.contents.listeners.remove(recorder)


def wait_parameters_home(engine: Engine) -> None:
    """Block the host until the homes of streamed parameters have the values of the last update."""
    items = [*engine.weights.items.values()]
    engine.core.cache.flush(items)
    for item in items:
        if item.home.stored is not None:
            item.home.stored.synchronize()  # R2, on the host


def _flat(engine: Engine, param: Tensor) -> Tensor:
    """Return the elements of a shard, row by row, where they are: in its home, or on the device."""
    part = engine.weights.parts.get(param)
    local = local_shard(param) if part is None or part.home.weights is None else part.home.weights
    if local.numel() and not local.untyped_storage().nbytes():
        raise RuntimeError(
            f"weight_deltas: {engine.names.get(param, 'a parameter')} is asleep. Call reload_model(model) first, or "
            "iterate before offload_model(model)."
        )
    return local.detach().reshape(-1)


@tells("weight_deltas(optimizer)")
def weight_deltas(optimizer: Optimizer) -> WeightDeltas:
    """Record which weights each step changes; iterate over the result for what has changed since the last time.

    ::

        deltas = weight_deltas(optimizer)         # the engine has the weights of this moment
        ...                                       # any number of steps
        for name, indices, values, dense in deltas:
            send(name, indices, values)           # whole[name].view(-1)[indices] = values

    Weights are compared as forwards use them: in ``MixedPrecisionPolicy.param_dtype``, else in their own dtype. Each
    rank hands out the changes in its shards of this optimizer's parameters; replicas hand out the same. No collective.
    Elements that changed and changed back are handed out, too, with their present value.

    Raises:
        TypeError: ``optimizer`` is no optimizer and holds none.
        RuntimeError: it is not offloaded, or the backward has updated and ``step()`` was not called.
        ValueError: updates of this optimizer cannot be compared; says why, and what to do.
    """
    first, *others = optimizers_in(optimizer, "weight_deltas")
    attachment, kind = attachment_of(first), type(first).__name__
    if others or attachment is None:
        problem = f"holds {1 + len(others)} optimizers; give one at a time" if others else f"is not offloaded; {IF_NOT}"
        raise RuntimeError(f"weight_deltas: this {kind} {problem}.")
    engine, model = attachment.engine, None if attachment.model is None else attachment.model()
    if model is None:
        raise ValueError(
            "weight_deltas: names and dtypes are those of the model, and it is not known. Call "
            "offload_optimizer(optimizer, model=model)."
        )
    if engine.layouts.capabilities.moves_whole:
        raise ValueError(
            f"weight_deltas: {kind} moves as a whole, and its own step updates all weights at once. Compare with a "
            "copy of them, or call offload_optimizer(..., trust_separable=True) if the step may be divided."
        )
    if engine.host is not None:
        raise ValueError("weight_deltas: the CPU updates a part of the weights. Use OffloadPolicy(host_fraction=0).")
    if several := [engine.names.get(one, "a parameter") for one in params_of(first) if has_inner_tensors(one)]:
        raise ValueError(
            f"weight_deltas: {listed(several)} are made of several tensors, from which forwards compute weights. Train "
            "them by an optimizer of their own, and compare them with a copy."
        )
    names = {param: canonical_fqn(model, name) for param, name in parameters_of(model).items()}
    pins = engine.policy.pins(engine.device.type)
    recorder = _Recorder(dtypes_in_use(model), engine.core.lanes, engine.device, pins)
    return WeightDeltas(first, engine, names, recorder)
