"""What offloading costs and gains, in numbers a person reads."""

from dataclasses import dataclass


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
        host_bytes: host memory taken, padding included.
        snapshot_bytes: of that, spare homes for asynchronous saves.
        pinned: whether that memory is page-locked.
        ring_bytes: device memory through which state passes.
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
        bound_ms: what such an iteration takes at least with this policy, by the times of its parts as measured; where
            nothing overlaps, what ``step()`` takes at least. Never more than the iteration, or the step, did take. 0
            if not known: the last two steps did not move the same.
        bound: its formula, in the letters of ``fsdp_offload/bound.py``: forward F, backward B, update U, all loads L,
            all stores S, both at once T; ``B + clip`` is whatever is not the first forward. Empty if not known.
        advice: what would help where transfers decide how long it takes; a sentence, or empty.
        host_updated_bytes: state that the host updated in the last step.
        host_update_ms: time of the host's thread in which the optimizer ran.
        host_update_gb_per_s: their quotient.
        host_waited_ms: time in which the main thread stood still for the host's updates: in ``step()``, in a forward
            under ``overlap_forward``, or wherever state was looked at.
        host_arrival_ms: time in which the host's thread waited for gradients.
        host_span_ms: from the beginning of the host's first update to the end of its last one; what it holds beside
            ``host_update_ms`` and ``host_arrival_ms`` is spent between updates.
        host_weights_down_bytes: of parameters that the host had to fetch, as somebody else had written them.
        host_buffer_bytes: host memory through which gradients pass; all optimizers of the device share it.
        tuning: what each ``"auto"`` has chosen, and why, once it is known.
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
    iteration_ms: float = 0.0
    stalled_ms: float = 0.0
    bound_ms: float = 0.0
    bound: str = ""
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
            ("host memory taken", f"{_bytes(self.host_bytes)} {'pinned' if self.pinned else 'not pinned'}"),
            ("  of it for asynchronous saves", _bytes(self.snapshot_bytes)),
            ("staging ring on the device", f"{_bytes(self.ring_bytes)}, {self.buckets} buckets pass through"),
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
