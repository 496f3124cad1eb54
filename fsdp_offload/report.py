"""The report on an offloaded optimizer: bytes by place, what the last step moved, what the last iteration took.

``measured.py`` fills it.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Bytes by place, now.

    Attributes:
        host_state_bytes: State whose home is host memory; reserved for state that the optimizer has yet to create.
        kept_state_bytes: Of it, what is kept on the device now; padding included.
        other_state_bytes: State that does not move: counters, tensors that are not understood, and tensors that were
            put into ``optimizer.state`` in the place of others, until the next step moves them.
        host_parameter_bytes: Parameters whose home is host memory, frozen ones included.
        kept_parameter_bytes: Of these, what is kept on the device now; padding included.
        host_bytes: Host memory taken, padding included.
        spare_home_bytes: Of that, second homes for asynchronous saves and for updates that may be taken back.
        pinned: Whether the host memory is page-locked.
        device_bytes: Device memory taken for what is offloaded, kept or passing through.
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
    device_peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What the last step moved, from the end of the step before to its own end.

    Attributes:
        loaded_bytes, stored_bytes: Copied to the device, also for gathers, and to host memory; padding included.
        loads, stores: How many copies that took.
        updates: Buckets updated, those on the CPU included.
        load_gb_per_s, store_gb_per_s: Rates (10**9 bytes) of one large copy each way; ``None``: none was timed.
        host_updated_bytes: State that the CPU updated; ``None``, as the next two, where it updates nothing.
        host_update_ms: Time of the CPU's thread in which the optimizer ran.
        host_waited_ms: Time in which the main thread waited for it.
    """

    loaded_bytes: int
    stored_bytes: int
    loads: int
    stores: int
    updates: int
    load_gb_per_s: float | None = None
    store_gb_per_s: float | None = None
    host_updated_bytes: int | None = None
    host_update_ms: float | None = None
    host_waited_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class IterationRecord:
    """The last iteration, in the order of the compute stream.

    Attributes:
        iteration_ms: From the end of the step before to the end of the last one, with all that the loop did between.
        stalled_ms: Time of that in which compute waited for items: for loads, and for updates beside the model.
        moved_bytes: Loads and stores together.
        bound_ms: The longest of ``iteration_ms - stalled_ms``, the loads at their rate and the stores at theirs, but
            never more than ``iteration_ms``.
    """

    iteration_ms: float
    stalled_ms: float
    moved_bytes: int
    bound_ms: float


@dataclass(frozen=True, kw_only=True)
class KeptRecord:
    """What is kept on the device between its uses.

    Attributes:
        buckets: Pieces of state that are not kept.
        moving_bytes: State, and parameters for gathers, that are not kept; padding included.
        reason: What is kept, and why; a sentence.
    """

    buckets: int
    moving_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class OffloadReport:
    """A snapshot of an offloaded optimizer on this rank; ``str()`` is a table.

    Attributes:
        optimizer: Name of the user's class.
        memory: Bytes by place, now.
        kept: What is kept on the device.
        step: The last step; ``None`` before the first one.
        iteration: The last iteration; ``None`` where none was measured: before the second step, after an error, on the
            CPU, with ``serial=True``.
        clipping: How often updates in the backward, which were guesses, have stood; empty where the loop does not clip.
        left_out: Names of state tensors that are not understood.
        notes: What the user should know, most important first.
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
        rows = [*self._memory_rows(), *self._step_rows()]
        width = max(len(name) for name, _ in rows)
        lines = [f"Offloaded {self.optimizer}", *(f"  ! {note}" for note in self.notes), f"  {self.kept.reason}"]
        lines += [f"  {self.clipping}"] if self.clipping else []
        if self.step is None:
            lines.append(f"  No step yet. Steps will move {_bytes(self.kept.moving_bytes)} through the device.")
        return "\n".join([*lines, *(f"  {name:<{width}}  {value}" for name, value in rows)])

    def _memory_rows(self) -> Iterator[tuple[str, str]]:
        memory = self.memory
        taken = {"host memory taken": " pinned" if memory.pinned else " not pinned", "device memory for that": ""}
        for name, nbytes in (
            ("state on the host", memory.host_state_bytes),
            ("  kept on the device", memory.kept_state_bytes),
            ("other state, where it was", memory.other_state_bytes),
            ("parameters on the host", memory.host_parameter_bytes),
            ("  kept on the device", memory.kept_parameter_bytes),
            ("host memory taken", memory.host_bytes),
            ("  spare homes", memory.spare_home_bytes),
            ("device memory for that", memory.device_bytes),
            ("device peak", memory.device_peak_bytes),
        ):
            if nbytes or name in taken:
                yield name, _bytes(nbytes or 0) + taken.get(name, "")

    def _step_rows(self) -> Iterator[tuple[str, str]]:
        if (step := self.step) is not None:
            yield "last step: loaded", f"{_bytes(step.loaded_bytes)} in {step.loads} copies{_rate(step.load_gb_per_s)}"
            stored = f"{_bytes(step.stored_bytes)} in {step.stores} copies"
            yield "last step: stored", stored + _rate(step.store_gb_per_s)
            yield "last step: updated", f"{step.updates} buckets"
            if step.host_updated_bytes is not None:
                waited = f"{step.host_update_ms:.1f} ms, {step.host_waited_ms:.1f} ms waited for"
                yield "  on the CPU", f"{_bytes(step.host_updated_bytes)} in {waited}"
        if (last := self.iteration) is not None:
            waited = f"{last.stalled_ms:.1f} ms waiting for what is offloaded"
            yield "last iteration", f"{last.iteration_ms:.1f} ms, of it {waited}"
            yield "  no less than", f"{last.bound_ms:.1f} ms"


def _rate(gb_per_s: float | None) -> str:
    return "" if gb_per_s is None else f", at {gb_per_s:.1f} GB/s"


def _bytes(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
