"""The plan's generation: when it grows, and that what was derived from buckets is derived anew then."""

from collections.abc import Callable

import pytest
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload.engine.engine import Engine
from tests.clipping import NEVER, clipped_step, speculation_of
from tests.overlapping import SIZES, Loop, adamw
from tests.policies import with_share


def clipping_loop(mesh: DeviceMesh) -> Loop:
    """Updates run ahead of clipping, for all parameters but the last eight, which are in no group yet."""
    loop = Loop(mesh, lambda params: adamw(params[:-8]), with_share(**SIZES, overlap="iteration"))
    for at in range(5):
        clipped_step(loop, at, NEVER)
    return loop


def engine_of(loop: Loop) -> Engine:
    return vars(loop.optimizer)["_offload_engine"].engine


def stay(loop: Loop) -> None:
    engine = engine_of(loop)
    engine.keep_on_device(engine.steps.buckets_of(loop.model.blocks[1].parameters()), loop.optimizer.state.unwaited)


def resize(loop: Loop) -> None:
    engine_of(loop).resize_staging(8192)


def add(loop: Loop) -> None:
    loop.optimizer.add_param_group({"params": list(loop.model.parameters())[-8:]})


def need_more_state(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["amsgrad"] = True
    for state in loop.optimizer.state.values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()


@pytest.mark.parametrize("change", [stay, resize, add, need_more_state])
def test_what_is_derived_from_buckets_is_derived_anew(mesh: DeviceMesh, change: Callable[[Loop], None]) -> None:
    loop = clipping_loop(mesh)
    engine, speculation = engine_of(loop), speculation_of(loop)
    overlap = vars(loop.optimizer)["_offload_engine"].overlap
    before = engine.plan.generation
    assert any(map(speculation.may_update, range(engine.plan.bucket_count)))
    change(loop)
    if change in (add, need_more_state):  # found out in the next step
        engine.reserved_state(loop.optimizer, loop.optimizer.state.unwaited)
    assert engine.plan.generation > before
    assert not any(map(speculation.may_update, range(engine.plan.bucket_count)))
    for number, group in enumerate(overlap._groups):
        assert overlap._buckets(engine)[number] == engine.steps.buckets_of(group.params)
    clipped_step(loop, 5, NEVER)
    assert any(map(speculation.may_update, range(engine.plan.bucket_count)))


def test_steps_sleep_and_reading_leave_it_alone(mesh: DeviceMesh) -> None:
    loop = clipping_loop(mesh)
    before = engine_of(loop).plan.generation
    loop.optimizer.offload_states()
    loop.optimizer.release_states()
    loop.optimizer.reload_states()
    loop.everything()
    clipped_step(loop, 5, NEVER)
    assert engine_of(loop).plan.generation == before
