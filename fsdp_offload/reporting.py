"""What an engine says of itself: bytes by place, times of the last step and iteration, and what a user should know."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .bound import Bound, bound, bound_of_step, parts_of_iteration, staged_share, what_would_help
from .engine import Engine
from .host_update import HostTimes
from .policy import OffloadPolicy
from .report import OffloadReport
from .shards import StateShard, leaves_of
from .times import StepTimes
from .update import StateStore, UserState


def report_of(engine: Engine, states: StateStore) -> OffloadReport:
    """Bytes by place, and the times of the last step; waits for that step."""
    times = engine.step_times()
    on_host = engine.host.last_times() if engine.host is not None else HostTimes()
    shards = list(engine.plan.shards.values())
    on_device = {shard for shard in shards if shard.resident and not engine.phases.away}
    on_cpu = engine.device.type == "cpu"
    exchanged_bytes = sum(_exchanged_bytes(shard, states.get(shard.param)) for shard in shards)
    exchanged = (
        f"optimizer.state holds {exchanged_bytes} bytes of tensors that somebody put there beside their homes; the "
        "next step moves them. Do not load state to the device: it comes by itself."
    )
    return OffloadReport(
        optimizer=engine.cls.__name__,
        host_state_bytes=sum(shard.nbytes for shard in shards if shard not in on_device),
        resident_state_bytes=sum(shard.nbytes for shard in on_device),
        other_state_bytes=exchanged_bytes + sum(_other_bytes(shard, states.get(shard.param)) for shard in shards),
        left_out=tuple(dict.fromkeys(name for shard in shards for name in shard.layout.left_out)),
        host_bytes=sum(region.nbytes for region in engine.plan.regions),
        snapshot_bytes=engine.plan.spare_bytes,
        pinned=engine.pinned,
        ring_bytes=0 if engine.phases.away else engine.plan.ring_bytes,
        buckets=engine.plan.moving_buckets,
        device_peak_bytes=0 if on_cpu else torch.accelerator.max_memory_allocated(engine.device),
        loaded_bytes=times.loaded_bytes,
        stored_bytes=times.stored_bytes,
        load_gb_per_s=_gb_per_s(times.loaded_bytes, times.load_ms),
        store_gb_per_s=_gb_per_s(times.stored_bytes, times.store_ms),
        step_ms=times.step_ms,
        update_ms=times.update_ms,
        exposed_ms=times.exposed_ms,
        host_updated_bytes=on_host.state_bytes,
        host_update_ms=on_host.update_ms,
        host_update_gb_per_s=_gb_per_s(on_host.state_bytes, on_host.update_ms),
        host_waited_ms=on_host.waited_ms,
        host_arrival_ms=on_host.arrival_ms,
        host_span_ms=on_host.span_ms,
        host_weights_down_bytes=on_host.weights_down_bytes,
        host_buffer_bytes=engine.host.buffer_bytes if engine.host is not None else 0,
        **_against_bound(engine, times),
        tuning=tuple(
            filter(
                None,
                (
                    *(engine.tuning_of_policy, engine.tuning_of_residents),
                    *(engine.tuning_of_staging, engine.tuning_of_host),
                ),
            )
        ),
        notes=(*notes_of(engine), *([exchanged] if exchanged_bytes else [])),
    )


def notes_of(engine: Engine) -> Iterable[str]:
    """What the user should know about this offload, most important first."""
    policy, shards = engine.policy, engine.plan.shards.values()
    if not any(shard.nbytes for shard in shards if not shard.resident):
        if any(shard.resident for shard in shards):
            yield "NOTHING IS OFFLOADED: all of the state fits into resident_bytes."
        else:
            no_state = f"{engine.cls.__name__} keeps no state for these parameters"
            yield f"NOTHING IS OFFLOADED: {no_state if shards else 'no parameter is trained'}."
    if engine.device.type == "cpu":
        yield "The parameters are on the CPU: offloading works, but there is nothing to gain."
    largest_bytes = max(engine.plan.ring.nbytes, default=0)
    if largest_bytes > policy.ring_bytes:
        yield (
            f"The largest bucket that cannot be cut needs {largest_bytes} bytes of staging, more than "
            f"staging_bytes={policy.staging_bytes} leaves ({policy.ring_bytes})."
        )
    left_out = list(dict.fromkeys(name for shard in shards for name in shard.layout.left_out))
    if left_out:
        yield f"State {left_out} is not made of dense tensors and stays where the optimizer put it."
    if engine.steps.failure:
        yield f"Not usable: {engine.steps.failure}."


# Bounds -------------------------------------------------------------------------------------------------------------


def _against_bound(engine: Engine, step: StepTimes) -> dict[str, Any]:
    """What the report says of the last iteration, or of ``step()`` where nothing overlaps, and of its bound."""
    if step == StepTimes():
        return {}
    policy, copies = engine.policy, {"load_ms": step.load_ms, "store_ms": step.store_ms}
    # On the CPU there is nothing that transfers could hide behind.
    advised = policy if engine.device.type != "cpu" else None
    if not policy.overlaps:
        at_least = bound_of_step(update_ms=step.update_ms, **copies)
        return _bound_fields(advised, at_least, step.update_ms, took_ms=step.step_ms)
    last = engine.iteration.last()
    if last is None:
        return {}
    # Updates in the compute stream itself wait there for their loads.
    waited_ms = 0.0 if policy.updates_beside_compute else step.exposed_ms
    stalled_ms = min(last.ms, last.stalled_ms + waited_ms)
    fields: dict[str, Any] = {"iteration_ms": last.ms, "stalled_ms": stalled_ms}
    if not last.repeats:
        return fields  # its transfers were those of two different steps
    times = parts_of_iteration(
        busy_ms=last.ms - stalled_ms,
        forward_ms=last.forward_ms,
        update_ms=step.update_ms,
        beside_compute=policy.updates_beside_compute,
        **copies,
    )
    at_least = bound(policy, times, staged=staged_share(engine.plan.ring_bytes, engine.plan.moving_bytes()))
    unmoved = bound(policy, times, offloaded=0.0)
    return {**fields, **_bound_fields(advised, at_least, unmoved.ms, took_ms=last.ms)}


def _bound_fields(
    advised: OffloadPolicy | None, at_least: Bound, without_transfers_ms: float, *, took_ms: float
) -> dict[str, Any]:
    # What has taken no longer has hidden the rest elsewhere: the first loads behind what the device was still to do
    # when step() was called.
    bound_ms = min(at_least.ms, took_ms)
    advice = "" if advised is None else what_would_help(advised, bound_ms, without_transfers_ms)
    return {"bound_ms": bound_ms, "bound": at_least.formula, "advice": advice}


def _other_bytes(shard: StateShard, state: UserState) -> int:
    return _bytes_of(value for name, value in state.items() if name not in shard.homes)


def _exchanged_bytes(shard: StateShard, state: UserState) -> int:
    """Of tensors that the user has put in the place of homes, and that the next step moves there."""
    return _bytes_of(state[name] for name, home in shard.homes.items() if state.get(name, home) is not home)


def _bytes_of(values: Iterable[object]) -> int:
    tensors = (value for value in values if isinstance(value, Tensor))
    return sum(leaf.numel() * leaf.element_size() for value in tensors for leaf in leaves_of(value))


def _gb_per_s(nbytes: int, ms: float) -> float:
    return nbytes / ms / 1e6 if ms > 0 else 0.0
