"""The report on an offloaded optimizer: bytes by place, times of the last iteration, and what the user should know."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .core.attached import Engine
from .cpu_update.updates import HostTimes
from .device import HAS_COPY_QUEUES
from .device.copy_queues import TOO_FEW
from .state.layout import leaves_of
from .state.shard import StateShard
from .state.store import StateStore, UserState


@dataclass(frozen=True)
class OffloadReport:
    """A snapshot of an offloaded optimizer on this rank; ``str()`` is a table.

    Attributes:
        optimizer: name of the user's class.
        host_state_bytes: state whose home is host memory. Reserved for state that the optimizer has yet to create.
        resident_state_bytes: state that stays on the device.
        other_state_bytes: state that is not moved: counters, tensors that are not understood, and tensors that were put
            into ``optimizer.state`` in the place of others, until the next step moves them.
        left_out: names of state tensors that are not understood.
        host_parameter_bytes: parameters whose home is host memory, frozen ones included.
        resident_parameter_bytes: parameters that stay on the device with their state, where others stream.
        host_bytes: host memory taken, padding included.
        snapshot_bytes: of that, spare homes for asynchronous saves, and for steps that may be taken back.
        pinned: whether that memory is page-locked.
        ring_bytes: device memory through which state passes, and parameters with it.
        window_bytes: device memory through which parameters pass for gathers, now.
        buckets: how many pieces the offloaded state is divided into.
        device_peak_bytes: the allocator's peak on this device since its statistics were last reset; 0 on the CPU.
        loaded_bytes, stored_bytes: moved in the last step, host to device and back.
        load_gb_per_s, store_gb_per_s: their rate (10**9 bytes) while a copy was running; 0 if nothing moved.
        step_ms: duration of the last step, until the last update.
        update_ms: time of that in which the optimizer ran.
        exposed_ms: time of that in which no update ran: the device waited for transfers or for the host, unless updates
            run beside the model, which then hides it.
        iteration_ms: from the end of the step before to the end of the last one, in the order of the compute stream. 0
            if nothing overlaps with the model, the policy is serial, or there was no backward in between.
        stalled_ms: time of that in which the compute stream stood still for new parameters or for state: in ``step()``,
            in the forward, in ``synchronize()``.
        bound_ms: what such an iteration takes at least with this policy, by the times of its parts, each measured alone
            in an iteration before (the second, then the seventeenth); where nothing overlaps, what ``step()`` takes at
            least. 0 if not known: the last two steps did not move the same.
        bound: its formula, as in ``fsdp_offload/planning/bound.py``: forward F, backward B, update U, all loads L,
            all stores S, both at once T; ``B + clip`` is whatever is not the first forward. Empty if not known.
        contention_ms: how much longer the model computed in the last iteration than alone, beside copies and updates.
            What else the iteration took longer than ``bound_ms``, it waited.
        forward_alone_ms, backward_alone_ms, update_alone_ms, transfers_alone_ms: F, B (with all that is not the first
            forward), U and T of that bound.
        advice: what would help where transfers decide how long it takes; a sentence, or empty.
        host_updated_bytes: state that the host updated in the last step.
        host_update_ms: time of the host's thread in which the optimizer ran.
        host_update_gb_per_s: their quotient.
        host_waited_ms: time in which the main thread stood still for the host's updates: in ``step()``, in a forward
            that needs their parameters, or wherever state was looked at.
        host_arrival_ms: time in which the host's thread waited for gradients.
        host_span_ms: from the beginning of the host's first update to the end of its last one; what it holds beside
            ``host_update_ms`` and ``host_arrival_ms`` is spent between updates.
        host_weights_down_bytes: of parameters that the host had to fetch, as somebody else had written them.
        host_buffer_bytes: host memory through which gradients pass; all optimizers of the device share it.
        tuning: what each ``"auto"`` has chosen, and why, once it is known; and, where the loop clips, how often updates
            in the backward were taken back.
        notes: what the user should know, most important first.
    """

    optimizer: str
    host_state_bytes: int
    resident_state_bytes: int
    other_state_bytes: int
    left_out: tuple[str, ...]
    host_bytes: int
    snapshot_bytes: int
    pinned: bool
    ring_bytes: int
    buckets: int
    device_peak_bytes: int
    loaded_bytes: int
    stored_bytes: int
    load_gb_per_s: float
    store_gb_per_s: float
    step_ms: float
    update_ms: float
    exposed_ms: float
    host_parameter_bytes: int = 0
    resident_parameter_bytes: int = 0
    window_bytes: int = 0
    iteration_ms: float = 0.0
    stalled_ms: float = 0.0
    bound_ms: float = 0.0
    bound: str = ""
    contention_ms: float = 0.0
    forward_alone_ms: float = 0.0
    backward_alone_ms: float = 0.0
    update_alone_ms: float = 0.0
    transfers_alone_ms: float = 0.0
    advice: str = ""
    host_updated_bytes: int = 0
    host_update_ms: float = 0.0
    host_update_gb_per_s: float = 0.0
    host_waited_ms: float = 0.0
    host_arrival_ms: float = 0.0
    host_span_ms: float = 0.0
    host_weights_down_bytes: int = 0
    host_buffer_bytes: int = 0
    tuning: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            ("state on the host", _bytes(self.host_state_bytes)),
            ("state resident on the device", _bytes(self.resident_state_bytes)),
            ("other state, where it was", _bytes(self.other_state_bytes)),
            *([("parameters on the host", _bytes(self.host_parameter_bytes))] if self.host_parameter_bytes else []),
            *(
                [("parameters resident on the device", _bytes(self.resident_parameter_bytes))]
                if self.resident_parameter_bytes
                else []
            ),
            ("host memory taken", f"{_bytes(self.host_bytes)} {'pinned' if self.pinned else 'not pinned'}"),
            ("  of it spare homes", _bytes(self.snapshot_bytes)),
            ("staging ring on the device", f"{_bytes(self.ring_bytes)}, {self.buckets} buckets pass through"),
            *([("window for gathers on the device", _bytes(self.window_bytes))] if self.host_parameter_bytes else []),
            ("device peak", _bytes(self.device_peak_bytes)),
            ("last step: loaded", f"{_bytes(self.loaded_bytes)} at {self.load_gb_per_s:.1f} GB/s"),
            ("last step: stored", f"{_bytes(self.stored_bytes)} at {self.store_gb_per_s:.1f} GB/s"),
            ("last step: time", f"{self.step_ms:.1f} ms, of it {self.update_ms:.1f} ms updates"),
            ("last step: exposed", f"{self.exposed_ms:.1f} ms"),
        ]
        if self.iteration_ms:
            stalled = f"of it {self.stalled_ms:.1f} ms waiting for state"
            rows.append(("last iteration", f"{self.iteration_ms:.1f} ms, {stalled}"))
        if self.bound:
            rows.append(("  it takes at least", f"{self.bound_ms:.1f} ms = {self.bound}"))
        if self.forward_alone_ms or self.backward_alone_ms:
            alone = f"F {self.forward_alone_ms:.1f}, B {self.backward_alone_ms:.1f}, U {self.update_alone_ms:.1f}"
            more_ms = max(0.0, self.iteration_ms - self.bound_ms)
            contention = f"of it {min(more_ms, self.contention_ms):.1f} ms contention"
            rows += [
                ("    by its parts alone", f"{alone}, T {self.transfers_alone_ms:.1f} ms"),
                ("    more than that", f"{more_ms:.1f} ms, {contention}"),
            ]
        if self.host_updated_bytes:
            rate = f"{_bytes(self.host_updated_bytes)} at {self.host_update_gb_per_s:.1f} GB/s"
            rows += [
                ("last step: updated on the host", f"{rate}, {self.host_waited_ms:.1f} ms waited for"),
                ("  buffers for that", _bytes(self.host_buffer_bytes)),
            ]
        width = max(len(name) for name, _ in rows)
        lines = [f"Offloaded {self.optimizer}"]
        lines += [f"  ! {note}" for note in self.notes]
        lines += [f"  {sentence}" for sentence in (*self.tuning, self.advice) if sentence]
        lines += [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join(lines)


def _bytes(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def report_of(engine: Engine, states: StateStore) -> OffloadReport:
    """Report bytes by place, and the times of the last step; waits for that step."""
    moved = engine.core.last_moved
    on_host = engine.host.last_times() if engine.host is not None else HostTimes()
    shards = list(engine.plan.shards.values())
    on_cpu = engine.device.type == "cpu"
    exchanged_bytes = sum(_exchanged_bytes(shard, states.get(shard.param)) for shard in shards)
    exchanged = (
        f"optimizer.state holds {exchanged_bytes} bytes of tensors that somebody put there beside their homes; the "
        "next step moves them. Do not load state to the device: it comes by itself."
    )
    queues = [] if HAS_COPY_QUEUES or on_cpu or not engine.loads_in_backward else [TOO_FEW]
    return OffloadReport(
        optimizer=engine.cls.__name__,
        host_state_bytes=sum(shard.nbytes for shard in shards),
        resident_state_bytes=0,
        other_state_bytes=exchanged_bytes + sum(_other_bytes(shard, states.get(shard.param)) for shard in shards),
        left_out=tuple(dict.fromkeys(name for shard in shards for name in shard.layout.left_out)),
        host_parameter_bytes=0 if engine.weights is None else engine.weights.nbytes,
        host_bytes=sum(region.nbytes for region in engine.plan.regions),
        snapshot_bytes=engine.plan.spare_bytes,
        pinned=engine.pinned,
        ring_bytes=0 if engine.phases.away else engine.staging_bytes(),
        buckets=len(engine.core.buckets),
        device_peak_bytes=0 if on_cpu else torch.accelerator.max_memory_allocated(engine.device),
        loaded_bytes=moved.loaded_bytes,
        stored_bytes=moved.stored_bytes,
        load_gb_per_s=0.0,
        store_gb_per_s=0.0,
        step_ms=0.0,
        update_ms=0.0,
        exposed_ms=0.0,
        host_updated_bytes=on_host.state_bytes,
        host_update_ms=on_host.update_ms,
        host_update_gb_per_s=_gb_per_s(on_host.state_bytes, on_host.update_ms),
        host_waited_ms=on_host.waited_ms,
        host_arrival_ms=on_host.arrival_ms,
        host_span_ms=on_host.span_ms,
        host_weights_down_bytes=on_host.weights_down_bytes,
        host_buffer_bytes=engine.host.buffer_bytes if engine.host is not None else 0,
        tuning=tuple(
            filter(
                None,
                (engine.tuning_of_staging,),
            )
        ),
        notes=(*notes_of(engine), *([exchanged] if exchanged_bytes else []), *queues),
    )


def notes_of(engine: Engine) -> Iterable[str]:
    """Yield what the user should know about this offload, most important first."""
    shards = engine.plan.shards.values()
    whole = engine.layouts.capabilities.moves_whole
    if whole:
        yield (
            f"{engine.cls.__name__} is not in the table of optimizers and moves as a whole: all of its state is on the "
            "device during step(). If each element's update depends on that element alone, "
            "offload_optimizer(..., trust_separable=True) moves it in pieces; so does a row in the table."
        )
    no_state_yet = whole and shards and not any(shard.existed for shard in shards)
    if not no_state_yet and not engine.weights and not any(shard.nbytes for shard in shards):
        no_state = f"{engine.cls.__name__} keeps no state for these parameters"
        yield f"NOTHING IS OFFLOADED: {no_state if shards else 'no parameter is trained'}."
    if engine.device.type == "cpu":
        yield "The parameters are on the CPU: offloading works, but there is nothing to gain."
    largest_bytes = engine.largest_bytes()
    ring_bytes = engine.passing_bytes()
    if largest_bytes > ring_bytes:
        yield (
            f"The largest bucket that cannot be cut needs {largest_bytes} bytes of the device, more than "
            f"device_bytes={engine.policy.device_bytes!r} leaves to pass through ({ring_bytes})."
        )
    left_out = list(dict.fromkeys(name for shard in shards for name in shard.layout.left_out))
    if left_out:
        own = " of its own" if whole else ""
        yield f"State {left_out} is not made of dense tensors{own} and stays where the optimizer put it."
    if engine.steps.failure:
        yield f"Not usable: {engine.steps.failure}."


def _other_bytes(shard: StateShard, state: UserState) -> int:
    return _bytes_of(value for name, value in state.items() if name not in shard.homes)


def _exchanged_bytes(shard: StateShard, state: UserState) -> int:
    """Count the bytes of tensors that the user has put in the place of homes, and that the next step moves there."""
    return _bytes_of(state[name] for name, home in shard.homes.items() if state.get(name, home) is not home)


def _bytes_of(values: Iterable[object]) -> int:
    tensors = (value for value in values if isinstance(value, Tensor))
    return sum(leaf.numel() * leaf.element_size() for value in tensors for leaf in leaves_of(value))


def _gb_per_s(nbytes: int, ms: float) -> float:
    return nbytes / ms / 1e6 if ms > 0 else 0.0
