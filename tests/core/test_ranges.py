"""Parameters in several buckets, or in other memory than before; and state that is exchanged while it is on its way."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from fsdp_offload import OffloadPolicy
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.engine.step import Step
from tests.async_writers import Reading
from tests.parity import attach

SIZES = (90, 700, 60)  # elements; the second is cut, and its ends share buckets with the others
SPARE = OffloadPolicy(bucket_bytes=1024, snapshot_bytes=1 << 20)


def make(policy: OffloadPolicy, **flags: Any) -> tuple[Optimizer, Optimizer]:
    """A plain one and an offloaded one of the same parameters."""
    plain, ours = (AdamW([nn.Parameter(torch.linspace(-1, 1, n)) for n in SIZES], lr=0.1, **flags) for _ in range(2))
    return plain, attach(ours, policy=policy)


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return list(optimizer.param_groups[0]["params"])


def step(optimizer: Optimizer, at: int, which: Sequence[int] = (0, 1, 2)) -> None:
    for number, param in enumerate(params_of(optimizer)):
        param.grad = torch.cos(torch.arange(len(param)) + at) if number in which else None
    optimizer.step()


def seen(optimizer: Optimizer) -> list[list[Tensor]]:
    """Parameters with their state."""
    params = params_of(optimizer)
    return [[param.detach().clone(), *(one.clone() for one in optimizer.state[param].values())] for param in params]


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return all(all(map(torch.equal, *pair)) for pair in zip(one, other, strict=True))


def read(optimizer: Optimizer) -> Reading:
    """A save that is being written."""
    engine, reader = engine_of(optimizer), Reading()
    assert len(engine.plan.shards[params_of(optimizer)[1]].buckets) > 2, "it is not cut"
    engine.lending.lend(reader, [shard.home for shard in engine.plan.shards.values()])
    return reader


def test_only_neighbours_have_gradients_while_a_save_reads() -> None:
    """Buckets of its ends are updated, and those between are not: their bytes would stay behind."""
    plain, ours = make(SPARE)
    for at in range(2):
        for one in (plain, ours):
            step(one, at)
    reader = read(ours)
    for which in ((0, 2), (1,), (0, 1, 2)):
        for one in (plain, ours):
            step(one, 5, which)
        assert same(seen(plain), seen(ours))
        reader.reading = False


def test_a_step_that_fails_between_two_ranges_while_a_save_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """State of which only a part was updated is that from before the step; of which all was, from behind it."""
    plain, ours = make(SPARE)
    for one in (plain, ours):
        step(one, 0)
    before, updated, job = seen(plain), [], Step.job
    step(plain, 1)
    after = seen(plain)
    read(ours)

    def failing(opened: Step, buckets: Any) -> Any:
        if len(updated) >= 3:
            raise LookupError("no such table")
        updated.extend(buckets)
        return job(opened, buckets)

    monkeypatch.setattr(Step, "job", failing)
    with pytest.raises(LookupError, match="no such table"):
        step(ours, 1)
    parts = engine_of(ours).plan.shards
    done = [all(any(one.number == n for one in updated) for n in parts[param].buckets) for param in params_of(ours)]
    assert any(done)
    assert not all(done)
    for is_done, old, new, (_, *state) in zip(done, before, after, seen(ours), strict=True):
        assert all(map(torch.equal, state[1:], (new if is_done else old)[2:]))  # without counters


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_parameters_that_get_other_memory(flags: dict[str, Any]) -> None:
    plain, ours = make(OffloadPolicy(bucket_bytes=1024), **flags)
    for at in range(6):
        kept = [param.data for param in params_of(ours)]
        for one in (plain, ours):
            for param in params_of(one) if at % 2 else ():
                param.data = param.data * 0.5
            step(one, at)
        assert same(seen(plain), seen(ours))
        del kept


@pytest.mark.parametrize("device_bytes", [4096, 1 << 20])
def test_state_that_is_exchanged_through_entries_from_before_a_step(device_bytes: int) -> None:
    """Nobody has looked since: what is exchanged is still on its way home, or only on the device."""
    runs = make(OffloadPolicy(bucket_bytes=1024, device_bytes=device_bytes))
    for one in runs:
        one.add_param_group({"params": [twin := nn.Parameter(torch.linspace(1, 2, SIZES[1]))]})
        entries = []
        for at in range(6):
            for entry, value in zip(entries, [entry["exp_avg"] for entry in entries][::-1], strict=True):
                entry["exp_avg"] = value
            twin.grad = torch.sin(torch.arange(len(twin)) + at)
            step(one, at)
            if at == 2:
                entries = [one.state[param] for param in (params_of(one)[1], twin)]
    assert same(*map(seen, runs))
