"""Clipping by a global norm with updates in the backward: the bits of a plain optimizer, whatever the norm is."""

import math
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.engine.speculation import Speculation
from tests.overlapping import SIZES, Loop, adamw, same
from tests.policies import with_share

NEVER, ALWAYS = 1e9, 1e-3


def policy_of(**more: Any) -> OffloadPolicy:
    return with_share(**{**SIZES, "overlap": "iteration", **more})


def speculation_of(loop: Loop) -> Speculation:
    engine = engine_of(loop.optimizer)
    assert engine is not None
    return engine.steps.speculation


def clip(loop: Loop, max_norm: float, **options: Any) -> None:
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), max_norm, **options)
    loop.seen.append(getattr(norm, "full_tensor", lambda: norm)().item())


def clipped_step(loop: Loop, at: int, max_norm: float, **options: Any) -> None:
    loop.backward(at)
    clip(loop, max_norm, **options)
    loop.step()


def train(loop: Loop, limits: list[float], first: int = 0, **options: Any) -> Loop:
    for at, max_norm in enumerate(limits, first):
        clipped_step(loop, at, max_norm, **options)
    return loop


def pair(mesh: DeviceMesh, policy: OffloadPolicy, make: Any = adamw, **kwargs: Any) -> tuple[Loop, Loop]:
    return Loop(mesh, make, None, **kwargs), Loop(mesh, make, policy, **kwargs)


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"norm_type": math.inf}, {"norm_type": 1.0}], ids=str)
def test_never_clipped(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    plain, loop = pair(mesh, policy_of())
    for at in range(8):
        for each in (plain, loop):
            clipped_step(each, at, NEVER, **options)
        assert same(plain, loop)
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (6, 0)


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=str)
def test_clipped_once(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    plain, loop = pair(mesh, policy_of())
    for at in range(12):
        for each in (plain, loop):
            clipped_step(each, at, ALWAYS if at == 7 else NEVER, **options)
        assert same(plain, loop), at
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (9, 1)


def test_always_clipped(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, policy_of())
    assert same(train(plain, [ALWAYS] * 8), train(loop, [ALWAYS] * 8))
    found = speculation_of(loop)
    assert (found.committed, found.taken_back) == (0, 0)
    assert loop.optimizer.offload_report().snapshot_bytes == 0  # type: ignore[attr-defined]
