"""What the report says of one optimizer, read from its engine."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .core.engine import Engine
from .core.items import Item
from .device import HAS_COPY_QUEUES
from .device.copy_queues import TOO_FEW
from .optimizers.table import row_of
from .report import IterationRecord, KeptRecord, MemoryRecord, OffloadReport, StepRecord
from .state.layout import leaves_of
from .state.store import StateStore


def report_of(engine: Engine, states: StateStore, parked_bytes: int = 0) -> OffloadReport:
    """Report on one optimizer; blocks the host until the device has finished the last step.

    ``parked_bytes``: host memory taken beside the homes, for parameters that sleep.
    """
    shards = list(engine.plan.shards.values())
    of_shards = [(shard.homes, states.get(shard.param)) for shard in shards]
    exchanged_bytes = _bytes_of(
        own[name] for homes, own in of_shards for name, home in homes.items() if own.get(name, home) is not home
    )
    on_cpu = engine.device.type == "cpu"
    state, weights = _items(engine)
    other_bytes = _bytes_of(value for homes, own in of_shards for name, value in own.items() if name not in homes)
    memory = MemoryRecord(
        host_state_bytes=sum(shard.nbytes for shard in shards),
        kept_state_bytes=sum(item.nbytes for item in state if item.kept and item.block is not None),
        other_state_bytes=exchanged_bytes + other_bytes,
        host_parameter_bytes=0 if engine.weights is None else engine.weights.nbytes,
        kept_parameter_bytes=sum(item.nbytes for item in weights if item.kept and item.block is not None),
        host_bytes=sum(region.nbytes for region in engine.plan.regions) + parked_bytes,
        spare_home_bytes=engine.plan.spare_bytes,
        pinned=engine.pinned,
        device_bytes=engine.staging_bytes(),
        device_peak_bytes=None if on_cpu else torch.accelerator.max_memory_allocated(engine.device),
    )
    exchanged = (
        f"optimizer.state holds {exchanged_bytes} bytes of tensors that somebody put there beside their homes; the "
        "next step moves them. Do not load state to the device: it comes by itself."
    )
    queues = [] if HAS_COPY_QUEUES or on_cpu or not engine.loads_in_backward else [TOO_FEW]
    step, iteration = _last(engine)
    return OffloadReport(
        optimizer=engine.cls.__name__,
        memory=memory,
        kept=_kept(engine, state, weights),
        step=step,
        iteration=iteration,
        clipping=engine.guesses.sentence,
        left_out=_left_out(engine),
        notes=(*notes_of(engine), *([exchanged] if exchanged_bytes else []), *queues),
    )


def notes_of(engine: Engine) -> Iterator[str]:
    """Yield what the user should know about this offload, most important first."""
    shards = engine.plan.shards.values()
    items = [item for some in _items(engine) for item in some]
    whole = engine.layouts.capabilities.moves_whole
    if whole:
        yield _why_whole(engine.cls)
    is_unknown = whole and shards and not any(shard.existed for shard in shards)
    if not items and not is_unknown and not any(shard.nbytes for shard in shards):
        no_state = f"{engine.cls.__name__} keeps no state for these parameters"
        yield f"NOTHING IS OFFLOADED: {no_state if shards else 'no parameter is trained'}."
    if items and all(item.kept for item in items):
        yield "NOTHING IS OFFLOADED: all of the state fits into device_bytes and stays on the device."
    if engine.device.type == "cpu":
        yield "The parameters are on the CPU: offloading works, but there is nothing to gain."
    largest_bytes, limit_bytes = engine.largest_bytes(), engine.passing_bytes()
    least_bytes = sum(pool.least * pool.nbytes for pool in engine.core.cache.pools)
    if largest_bytes > limit_bytes:
        yield (
            f"The largest bucket that cannot be cut needs {largest_bytes} bytes of the device, more than "
            f"device_bytes={engine.policy.device_bytes!r} leaves to pass through ({limit_bytes})."
        )
    elif least_bytes > limit_bytes:
        yield (
            f"One update needs {least_bytes} bytes of the device, parameters of the largest group and their state, "
            f"more than device_bytes={engine.policy.device_bytes!r}."
        )
    if left_out := _left_out(engine):
        own = " of its own" if whole else ""
        yield f"State {list(left_out)} is not made of dense tensors{own} and stays where the optimizer put it."
    if engine.steps.failure:
        yield f"Not usable: {engine.steps.failure}."


def _why_whole(cls: type[Optimizer]) -> str:
    row, end = row_of(cls), "moves as a whole: all of its state is on the device during step()."
    if row is None:
        return (
            f"{cls.__name__} is not in the table of optimizers and {end} If each element's update depends on that "
            "element alone, offload_optimizer(..., trust_separable=True) moves it in pieces."
        )
    found = f"{cls.__name__} of {row.library} {row.versions}"
    if row.verdict == "mixed":
        return f"An update by {found} depends on several parameters, so it {end}"
    part = "each element by itself" if row.verdict == "elementwise" else "each parameter by itself"
    return (
        f"{found} updated {part} when it was tried, which no test of this package repeats, so it {end} "
        "offload_optimizer(..., trust_separable=True) moves it in pieces."
    )


def _items(engine: Engine) -> tuple[list[Item], list[Item]]:
    """Items of state, and of parameters, that may move."""
    state = [bucket.state for bucket in engine.core.buckets if bucket.state.nbytes]
    return state, [] if engine.weights is None else list(engine.weights.items.values())


def _last(engine: Engine) -> tuple[StepRecord | None, IterationRecord | None]:
    """The last step, and its iteration if it was measured."""
    moved, watch = engine.core.last_moved, engine.core.cache.stopwatch
    if moved is None:
        return None, None
    on_cpu = {} if engine.host is None else engine.host.last_times()
    last = None if watch is None else watch.last()
    if last is None:
        return StepRecord(**asdict(moved), **on_cpu), None
    rates: dict[str, Any] = {"load_gb_per_s": last.load_gb_per_s, "store_gb_per_s": last.store_gb_per_s}
    ways = zip((moved.loaded_bytes, moved.stored_bytes), rates.values(), strict=True)
    copies_ms = [nbytes / rate / 1e6 for nbytes, rate in ways if rate is not None]
    iteration_ms, stalled_ms = last.iteration_ms, min(last.stalled_ms, last.iteration_ms)
    iteration = IterationRecord(
        iteration_ms=iteration_ms,
        stalled_ms=stalled_ms,
        moved_bytes=moved.loaded_bytes + moved.stored_bytes,
        # The copies that were timed may have shared the link with others: that all are as slow is not proven.
        bound_ms=min(iteration_ms, max(iteration_ms - stalled_ms, *copies_ms, 0.0)),
    )
    return StepRecord(**asdict(moved), **on_cpu, **rates), iteration


def _kept(engine: Engine, state: list[Item], weights: list[Item]) -> KeptRecord:
    asked = f"device_bytes={engine.policy.device_bytes!r}"
    moving = [item for item in state if not item.kept]
    stays = f"{len(state) - len(moving)} of {len(state)} buckets stay on the device"
    groups = f", {sum(item.kept for item in weights)} of {len(weights)} groups of parameters" if weights else ""
    found = f" ({engine.room.sentence})" if engine.room is not None and engine.room.sentence else ""
    moving_bytes = sum(item.nbytes for item in (*state, *weights) if not item.kept)
    return KeptRecord(buckets=len(moving), moving_bytes=moving_bytes, reason=f"{asked}: {stays}{groups}{found}.")


def _left_out(engine: Engine) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in engine.plan.shards.values() for name in one.layout.left_out))


def _bytes_of(values: Iterable[object]) -> int:
    tensors = (value for value in values if isinstance(value, Tensor))
    return sum(leaf.numel() * leaf.element_size() for value in tensors for leaf in leaves_of(value))
