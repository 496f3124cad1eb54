"""The report on an offloaded optimizer: bytes by place, what the last step moved, what the last iteration took."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..core.items import Item
from ..device import HAS_COPY_QUEUES
from ..device.copy_queues import TOO_FEW
from ..engine.engine import Engine
from ..fsdp.dtensor import NEWEST_TESTED
from ..optimizers.capabilities import row_of
from ..state.layout import leaves_of
from ..state.store import StateStore


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Bytes by place, now.

    Attributes:
        host_state_bytes: State whose home is host memory, with homes reserved for state that is yet to be created.
        other_state_bytes: State that does not move: counters, tensors that are not made of dense tensors, and tensors
            that the user put into ``optimizer.state`` in place of homes, until the next step copies them there.
        host_parameter_bytes: Parameters whose home is host memory, frozen ones included.
        kept_state_bytes, kept_parameter_bytes: Offloaded state and parameters kept on the device; with padding.
        host_bytes: Host memory taken, padding included, page-locked if ``pinned``.
        spare_home_bytes: Part of ``host_bytes``: second homes, for asynchronous saves and updates that may roll back.
        device_bytes: Device memory for offloaded state and parameters throughout an iteration.
        off_peak_bytes: Largest addition to ``device_bytes`` in the last iteration, where the model left memory free.
        device_peak_bytes: The allocator's peak since its statistics were last reset; ``None`` on the CPU.
    """

    host_state_bytes: int
    kept_state_bytes: int
    other_state_bytes: int
    host_parameter_bytes: int
    kept_parameter_bytes: int
    host_bytes: int
    spare_home_bytes: int
    pinned: bool
    device_bytes: int
    off_peak_bytes: int
    device_peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Bytes, copies and updates of the last step, from the end of the step before to its own end.

    Attributes:
        loaded_bytes, stored_bytes: Bytes copied to the device (gathers included) and to host memory; with padding.
        loads, stores: Numbers of copies.
        updates: Buckets updated, those on the CPU included.
        held_updates: Updates that the backward left to ``step()``, because other code held tensors over the bucket's
            state or parameters.
        load_gb_per_s, store_gb_per_s: Rates (10**9 bytes) of one large copy each way; ``None``: none was timed.
        host_updated_bytes, host_update_ms, host_waited_ms: State that the CPU updated, the time that its thread took,
            and the time that the main thread waited for that thread; ``None`` if the CPU updates nothing.
    """

    loaded_bytes: int
    stored_bytes: int
    loads: int
    stores: int
    updates: int
    held_updates: int = 0
    load_gb_per_s: float | None = None
    store_gb_per_s: float | None = None
    host_updated_bytes: int | None = None
    host_update_ms: float | None = None
    host_waited_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """The last iteration that was timed, in the order of the compute stream.

    Once nothing changes, one iteration in eight is timed; the 16 iterations after a report are.

    Attributes:
        iteration_ms: From the end of the previous step to the end of the last one, the rest of the loop included.
        stalled_ms: The part of ``iteration_ms`` in which compute waited for loads, or for updates during the model.
        bound_ms: The longest of compute (``iteration_ms - stalled_ms - host_ms``), all loads at their rate, and all
            stores at theirs; at most ``iteration_ms``.
        host_ms: Time in which compute was idle while the host ran this package's hooks of reductions, or ``step()``.
            Not measured with ``overlap="step"``.
        paced_ms: ``host_ms`` plus the time between two such calls if compute was idle at both: compute then probably
            ran at the host's pace.
        next_gb_ms: What another GB (10**9 bytes) of ``device_bytes`` saves at most: the time of its load or of its
            store, whichever takes longer, but no more than ``stalled_ms``.
    """

    iteration_ms: float
    stalled_ms: float
    bound_ms: float
    host_ms: float = 0.0
    paced_ms: float = 0.0
    next_gb_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KeptRecord:
    """State and parameters that stay on the device between their uses, and the rest, which moves.

    Attributes:
        buckets, moving_buckets: Numbers of buckets of state that are kept, and that move.
        moving_bytes: State that moves, and parameters on the host that move for gathers; padding included.
        reason: A sentence that says how much is kept, and why.
    """

    buckets: int
    moving_buckets: int
    moving_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class OffloadReport:
    """A snapshot of an offloaded optimizer on this rank; ``str()`` is a table.

    Attributes:
        optimizer: Name of the user's class.
        memory: Bytes by place, now.
        kept: State and parameters kept on the device.
        step: The last step; ``None`` before the first one.
        iteration: The last iteration; ``None`` where none was measured: before the second step, after an error, on the
            CPU, with ``serial=True``.
        clipping: How often speculative updates in the backward were kept, or why all updates wait for ``step()``;
            empty if no update is speculative.
        left_out: Names of state tensors that do not move, since they are not made of dense tensors.
        notes: Warnings for the user, most important first.
    """

    optimizer: str
    memory: MemoryRecord
    kept: KeptRecord
    step: StepRecord | None = None
    iteration: IterationRecord | None = None
    clipping: str = ""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return all numbers that are known, for loggers, as ``{"memory/host_state_bytes": 8e9, ...}``."""
        records = {name: record for name, record in asdict(self).items() if isinstance(record, dict)}
        numbers = {f"{name}/{field}": value for name, record in records.items() for field, value in record.items()}
        return {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}

    def __str__(self) -> str:
        lines = [f"Offloaded {self.optimizer}", *(f"  ! {note}" for note in self.notes), f"  {self.kept.reason}"]
        mark = "! " if "updates wait for" in self.clipping else ""
        lines += [f"  {mark}{self.clipping}"] if self.clipping else []
        if self.step is None:
            lines.append(f"  No step yet. Steps will move {_bytes(self.kept.moving_bytes)} through the device.")
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join([*lines, *(f"  {name:<{width}}  {value}" for name, value in rows)])

    def _rows(self) -> Iterator[tuple[str, str]]:
        memory = self.memory
        for name, nbytes, how in (
            ("state on the host", memory.host_state_bytes, ""),
            ("  kept on the device", memory.kept_state_bytes, ""),
            ("other state, not moved", memory.other_state_bytes, ""),
            ("parameters on the host", memory.host_parameter_bytes, ""),
            ("  kept on the device", memory.kept_parameter_bytes, ""),
            ("host memory taken", memory.host_bytes, " pinned" if memory.pinned else " not pinned"),
            ("  spare homes", memory.spare_home_bytes, ""),
            ("device memory taken", memory.device_bytes, ""),
            ("  more off the peak", memory.off_peak_bytes, ""),
            ("device peak", memory.device_peak_bytes, ""),
        ):
            if nbytes:
                yield name, _bytes(nbytes) + how
        if (step := self.step) is not None:
            for name, nbytes, copies, rate in (
                ("loaded", step.loaded_bytes, step.loads, step.load_gb_per_s),
                ("stored", step.stored_bytes, step.stores, step.store_gb_per_s),
            ):
                at = "" if rate is None else f", at {rate:.1f} GB/s"
                yield f"last step: {name}", f"{_bytes(nbytes)} in {copies} copies{at}"
            yield "last step: updated", f"{step.updates} buckets"
            if step.held_updates:
                yield "  held until step()", f"{step.held_updates} buckets"
            if step.host_updated_bytes is not None:
                waited = f"{step.host_update_ms:.1f} ms, {step.host_waited_ms:.1f} ms waited for"
                yield "  on the CPU", f"{_bytes(step.host_updated_bytes)} in {waited}"
        if (last := self.iteration) is not None:
            waited = f"{last.stalled_ms:.1f} ms waiting for what is offloaded"
            yield "last iteration", f"{last.iteration_ms:.1f} ms, of it {waited}"
            if last.paced_ms >= 0.05:
                yield "  at the host's pace", f"{last.paced_ms:.1f} ms, of it {last.host_ms:.1f} ms in fsdp_offload"
            yield "  no less than", f"{last.bound_ms:.1f} ms"
            if last.next_gb_ms >= 0.05:
                yield "  with 1 GB more", f"up to {last.next_gb_ms:.1f} ms less"


def _bytes(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


# From an engine ------------------------------------------------------------------------------------------------------


def report_of(engine: Engine, states: StateStore, parked_bytes: int = 0) -> OffloadReport:
    """Report on one optimizer, after its last step has ended; ``parked_bytes``: host memory of parked masters."""
    shards, on_cpu = engine.plan.shards.values(), engine.device.type == "cpu"
    others = (
        value
        for shard in shards
        for name, value in states.get(shard.param).items()
        if isinstance(value, Tensor) and value is not shard.homes.get(name)
    )
    state, weights = _items(engine)
    lasting_bytes = engine.core.cache.lasting_bytes
    memory = MemoryRecord(
        host_state_bytes=sum(shard.nbytes for shard in shards),
        kept_state_bytes=sum(item.nbytes for item in state if item.kept and item.block is not None),
        other_state_bytes=sum(leaf.numel() * leaf.element_size() for value in others for leaf in leaves_of(value)),
        host_parameter_bytes=engine.weights.nbytes,
        kept_parameter_bytes=sum(item.nbytes for item in weights if item.kept and item.block is not None),
        host_bytes=sum(region.nbytes for region in engine.plan.regions) + parked_bytes,
        spare_home_bytes=engine.plan.spare_bytes,
        pinned=engine.policy.pins(engine.device.type),
        device_bytes=lasting_bytes,
        off_peak_bytes=max(0, engine.core.cache.last_peak_bytes - lasting_bytes),
        device_peak_bytes=None if on_cpu else torch.accelerator.max_memory_allocated(engine.device),
    )
    kept_buckets = sum(item.kept for item in state)
    stays = f"{kept_buckets} of {len(state)} buckets are kept on the device"
    groups = f", {sum(item.kept for item in weights)} of {len(weights)} groups of parameters" if weights else ""
    found = f" ({engine.room.sentence})" if engine.room is not None and engine.room.sentence else ""
    kept = KeptRecord(
        buckets=kept_buckets,
        moving_buckets=len(state) - kept_buckets,
        moving_bytes=sum(item.nbytes for item in (*state, *weights) if not item.kept),
        reason=f"device_bytes={engine.policy.device_bytes!r}: {stays}{groups}{found}.",
    )
    too_few = [TOO_FEW] if engine.loads_in_backward and not (HAS_COPY_QUEUES or on_cpu) else []
    step, iteration = _last(engine)
    return OffloadReport(
        optimizer=_class_name(engine),
        memory=memory,
        kept=kept,
        step=step,
        iteration=iteration,
        clipping=engine.speculation.sentence,
        left_out=_left_out(engine),
        notes=(*notes_of(engine), *too_few),
    )


_TRUST = " OffloadPolicy(trust_separable=True) moves it in pieces."
_WHOLE = {
    None: ("is not in the table of optimizers", " If each element's update depends on that element alone," + _TRUST),
    "mixed": ("computes with several parameters together", ""),
}
"""By verdict: why a class moves as a whole, and the remedy."""


def notes_of(engine: Engine) -> Iterator[str]:
    """Yield notes on this offload for the user, most important first."""
    shards, name = engine.plan.shards.values(), _class_name(engine)
    state, weights = _items(engine)
    items, sizes = [*state, *weights], [item.nbytes for item in state]
    whole = engine.layouts.capabilities.moves_whole
    if whole:
        verdict = row_of(engine.cls).get("verdict")
        why, remedy = _WHOLE.get(verdict, ("was tried in pieces, which no test of this package repeats,", _TRUST))
        yield f"{name} {why} and moves as a whole: all of its state is on the device during step().{remedy}"
    is_unknown = whole and shards and not any(shard.existed for shard in shards)
    if not items and not is_unknown and not any(shard.nbytes for shard in shards):
        no_state = f"{name} keeps no state for these parameters"
        yield f"NOTHING IS OFFLOADED: {no_state if shards else 'no parameter is trained'}."
    if tuple(map(int, torch.__version__.split(".")[:2])) > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        yield (
            f"torch {torch.__version__} is newer than {tested}, the newest version that fsdp_offload was tested with. "
            "Private names of fully_shard may mean something else there: compare some steps with a run without offload."
        )
    if items and all(item.kept for item in items):
        yield "NOTHING IS OFFLOADED: all of the state fits into device_bytes and stays on the device."
    if engine.device.type == "cpu":
        yield "The parameters are on the CPU: offloading works, but there is nothing to gain."
    elif engine.device.type != "cuda" or torch.version.hip is not None:
        yield (
            f"fsdp_offload was not tested on {'ROCm' if torch.version.hip else engine.device.type}, where torch's own "
            "calls copy, not the CUDA driver's: compare some steps with a run without offload."
        )
    limit_bytes = engine.policy.device_bytes
    blocks_bytes = sum(pool.least * pool.nbytes for pool in engine.core.cache.pools)
    needed_bytes = max(blocks_bytes, sum(sizes) if whole else max(sizes, default=0))
    if limit_bytes != "auto" and needed_bytes > limit_bytes:
        yield (
            f"One update needs {needed_bytes} bytes of the device, more than device_bytes={limit_bytes}: a bucket that "
            "cannot be cut, or the parameters of the largest group and their state."
        )
    if left_out := _left_out(engine):
        own = " of its own" if whole else ""
        yield f"State {list(left_out)} is not made of dense tensors{own} and stays where the optimizer put it."
    held = engine.core.last_moved.held_updates if engine.core.last_moved is not None else 0
    if held:
        steps = {item.home.exposed_at for bucket in engine.core.buckets for item in (bucket.state, *bucket.weights)}
        yield (
            f"{held} updates of the last step waited for step(): tensors over their state or parameters were held, "
            f"taken after step {min((n for n in steps if n is not None), default=0)} or later (a state dict, an entry "
            "of optimizer.state, a loop's variable). Let go of them, or keep copies."
        )
    if engine.failure:
        yield f"Not usable: {engine.failure}."


def _class_name(engine: Engine) -> str:
    return str(getattr(engine.cls, "plain_class", engine.cls).__name__)  # the user's class, without masters


def _items(engine: Engine) -> tuple[list[Item], list[Item]]:
    """List the items of state, and those of parameters, that may move."""
    state = [bucket.state for bucket in engine.core.buckets if bucket.state.nbytes]
    return state, list(engine.weights.items.values())


def _last(engine: Engine) -> tuple[StepRecord | None, IterationRecord | None]:
    """Return records of the last step, and of its iteration if that was measured."""
    moved, watch = engine.core.last_moved, engine.core.cache.stopwatch
    if moved is None:
        return None, None
    fields = asdict(moved) | ({} if engine.host is None else engine.host.times)
    last = None if watch is None else watch.last()
    if last is None:
        return StepRecord(**fields), None
    step = StepRecord(**fields, load_gb_per_s=last.load_gb_per_s, store_gb_per_s=last.store_gb_per_s)
    ways = (step.loaded_bytes, step.load_gb_per_s), (step.stored_bytes, step.store_gb_per_s)
    copies_ms = [nbytes / rate / 1e6 for nbytes, rate in ways if rate is not None]
    gb_ms = [1e3 / rate for _, rate in ways if rate is not None]
    whole_ms, stalled_ms = last.iteration_ms, min(last.stalled_ms, last.iteration_ms)
    host_ms = min(last.host_ms, whole_ms - stalled_ms)
    # Not a proven bound: the timed copies may have shared the link, so that the other copies may have been faster.
    bound_ms = min(whole_ms, max(whole_ms - stalled_ms - host_ms, *copies_ms, 0.0))
    times = {"host_ms": host_ms, "paced_ms": max(host_ms, min(last.paced_ms, whole_ms - stalled_ms))}
    times["next_gb_ms"] = min(stalled_ms, max(gb_ms, default=0.0))
    return step, IterationRecord(iteration_ms=whole_ms, stalled_ms=stalled_ms, bound_ms=bound_ms, **times)


def _left_out(engine: Engine) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in engine.plan.shards.values() for name in one.layout.left_out))
