"""State that is set aside and put back is what it was: a step that makes new state leaves it alone."""

from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.cpu.test_host_fraction import fused_adamw
from tests.overlapping import Loop, pair, policy_of, same


def train(loop: Loop, *, clips: bool) -> None:
    state = loop.optimizer.state
    for at in range(9):
        loop.clipped_step(at, 1e9) if clips else loop.train(1, first=at)
        if at == 4:
            aside = dict(state)
            state.clear()
        if at == 6:
            state.clear()
            state.update(aside)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
@pytest.mark.parametrize("more", [{}, {"parameters": True}, {"host_fraction": 1.0}], ids=str)
def test_state_that_is_set_aside(mesh: DeviceMesh, overlap: str, more: dict[str, Any], *, clips: bool) -> None:
    both = pair(mesh, policy_of({"overlap": overlap, **more}), fused_adamw)
    for loop in both:
        train(loop, clips=clips)
    assert same(*both)
