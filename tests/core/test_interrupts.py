"""An interrupt at any line of ours leaves all of a call, or nothing of it, or an optimizer that says what is half done.

A line is drawn of those that an iteration of training, or another call, runs. ``KeyboardInterrupt`` is raised there, as
Ctrl-C does in a notebook, where training goes on afterwards.
"""

import copy
import gc
import linecache
import os
import random
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp_offload
from fsdp_offload import OffloadPolicy, clip_grad_norm_, is_offloaded, offload_optimizer, remove_offload
from fsdp_offload.engine import step as steps
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.fsdp import homed
from tests.core.test_step_ends import LEARNT, look
from tests.overlapping import Loop, adamw
from tests.parity import leaves, same_value

OURS = str(Path(fsdp_offload.__file__).parent)
WARM, BEHIND = 5, 3
"""Iterations before the one that is interrupted, and behind it."""

INTERRUPTED = {
    "timeline._noted": "gathers of a forward that was not the last one of its step, as if gradients added up",
    "timeline.at": "the same",
    "cache.peak_bytes": "a measurement: on a device, what lies there when depends on when copies end",
    "cache.last_peak_bytes": "the same",
}
"""What else is other behind an interrupt."""

TRIALS = int(os.environ.get("INTERRUPTS", "8"))
"""Of each loop under each policy."""


class Interrupted:
    """Raises ``kind`` at line ``at`` of ours; counts lines where there is none."""

    def __init__(self, at: int | None = None, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.kind, self.lines, self.where = at, kind, 0, ""
        self._entered: dict[int, set[int]] = {}  # by ``id`` of a frame: holding it would hold tensors

    def is_here(self) -> bool:
        """Return whether it raises at the line that is about to run."""
        self.lines += 1
        return self.lines == self.at

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "call":
            self._entered.pop(id(frame), None)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and line.startswith("with "):
            # The line of a ``with`` comes again at its end. No signal can come between the block and what undoes it.
            entered = self._entered.setdefault(id(frame), set())
            if frame.f_lineno in entered:
                return self._trace
            entered.add(frame.f_lineno)
        if event == "line" and self.is_here():
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            raise self.kind
        return self._trace

    def __enter__(self) -> "Interrupted":
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(None)
        return kind is self.kind


RUNS = {"backward": False}
"""An exception in the forward or in the backward leaves ``fully_shard`` itself half way."""


def backward(loop: Loop, at: int) -> None:
    RUNS["backward"] = True
    loop.backward(at)
    RUNS["backward"] = False


def usual(loop: Loop, at: int) -> None:
    backward(loop, at)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def clipped(loop: Loop, at: int) -> None:
    backward(loop, at)
    clip_grad_norm_(loop.optimizer, 1e9 if at % 4 else 1e-3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def plain_clipped(loop: Loop, at: int) -> None:
    loop.backward(at)
    torch.nn.utils.clip_grad_norm_(loop.params, 1e9 if at % 4 else 1e-3)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def values(loop: Loop) -> list[Tensor]:
    """Copy parameters, state and counters. A forward that was interrupted has left the model's own gathered."""
    states = [loop.optimizer.state[param] for param in loop.params if param in loop.optimizer.state]
    found = [leaf for state in states for name in sorted(state) for leaf in leaves(state[name])]
    return [one.detach().clone() for one in (*(param.to_local() for param in loop.params), *found)]


LOOPS: dict[str, tuple[Callable[[Loop, int], None], Callable[[Loop, int], None]]] = {
    "usual": (usual, usual),
    "clipped": (clipped, plain_clipped),
}
POLICIES: dict[str, dict[str, Any]] = {
    "step": {},
    "forward": {"overlap": "forward"},
    "iteration": {"overlap": "iteration"},
    "parameters": {"overlap": "iteration", "parameters": True},
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_leaves_all_of_a_step_or_nothing_or_says_so(mesh: DeviceMesh, policy: str, name: str) -> None:
    iterate, plainly = LOOPS[name]
    plain = Loop(mesh, adamw, None)
    plain.train(WARM, plainly)
    kept = [values(plain)]
    plain.train(1, plainly, WARM)
    kept.append(values(plain))
    fields = OffloadPolicy(bucket_bytes=8192, device_bytes=12 * 8192, **POLICIES[policy])
    counted = Loop(mesh, adamw, fields).train(WARM, iterate)
    with Interrupted() as counting:
        iterate(counted, WARM)
    assert same_value(values(counted), kept[1])
    rng, outcomes = random.Random(policy + name), []
    for _ in range(TRIALS):
        interrupted = Interrupted(rng.randrange(1, counting.lines))
        outcomes.append(check(mesh, fields, iterate, kept, interrupted))
    assert set(outcomes) <= {"before", "behind", "said"}


def check(
    mesh: DeviceMesh,
    policy: OffloadPolicy,
    iterate: Callable[[Loop, int], None],
    kept: list[list[Tensor]],
    interrupted: Interrupted,
) -> str:
    loop = Loop(mesh, adamw, policy).train(WARM, iterate)
    outcome = left_by(loop, iterate, interrupted, kept)
    if outcome != "said" and not RUNS["backward"]:
        plainly = LOOPS["clipped" if iterate is clipped else "usual"][1]
        side = ("before", "behind").index(outcome)
        plain = Loop(mesh, adamw, None).train(WARM + side, plainly)
        loop.train(BEHIND, iterate, WARM + 1)
        plain.train(BEHIND, plainly, WARM + 1)
        assert same_value(values(loop), values(plain)), f"{interrupted.where}: other bits later"
    return outcome


def left_by(
    loop: Loop, iterate: Callable[[Loop, int], None], interrupted: Interrupted, kept: list[list[Tensor]]
) -> str:
    """Interrupt an iteration; returns which of the two states that were ``kept`` it has left, or that it says so."""
    engine = engine_of(loop.optimizer)
    assert engine is not None
    before = look(engine)
    opened: list[weakref.ref[steps.Step]] = []
    made = steps.Step.__init__

    def noted(step: steps.Step, *args: Any, **options: Any) -> None:
        made(step, *args, **options)
        opened.append(weakref.ref(step))

    RUNS["backward"] = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Step, "__init__", noted)
        with interrupted:
            iterate(loop, WARM)
    where = interrupted.where
    for param in loop.params:
        param.grad = None
    try:
        loop.optimizer.zero_grad()
        found = values(loop)
    except RuntimeError as said:  # half of it has been updated, and cannot be undone
        if re.search("parameters have been updated in the backward|may be half updated", str(said)) is None:
            raise
        return "said"
    gc.collect()
    assert not [one for one in opened if one() is not None], f"{where}: the step is still reachable"
    after = look(engine)
    other = {name: (before.get(name), after[name]) for name in after if before.get(name) != after[name]}
    left = {name: pair for name, pair in other.items() if name not in LEARNT | INTERRUPTED}
    assert not left, f"{where}: {left}"
    if engine.failure:  # what the next step() says
        return "said"
    sides = [same_value(found, side) for side in kept]
    assert any(sides), f"{where}: neither the state before the step nor behind it"
    return ("before", "behind")[sides.index(True)]


def load(loop: Loop, saved: dict[str, Any]) -> None:
    loop.optimizer.load_state_dict(saved)


def load_while_held(loop: Loop, saved: dict[str, Any]) -> None:
    held = [dict(entry) for entry in loop.optimizer.state.values()]
    loop.optimizer.load_state_dict(saved)
    del held


def remove(loop: Loop, _: object) -> None:
    remove_offload(loop.optimizer)


def attach(loop: Loop, policy: OffloadPolicy) -> None:
    offload_optimizer(loop.optimizer, model=loop.model, policy=policy)


def read(loop: Loop, _: object) -> None:
    loop.optimizer.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", [load, load_while_held, remove, attach, read])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_interrupt_between_steps_changes_nothing_or_all_of_it(
    mesh: DeviceMesh, policy: str, call: Callable[[Loop, Any], None]
) -> None:
    """``load`` exchanges all state or none, or the optimizer asks for another one. Otherwise training goes on."""
    fields = OffloadPolicy(bucket_bytes=8192, device_bytes=12 * 8192, **POLICIES[policy])
    plain, sides = Loop(mesh, adamw, None), []
    for at in range(WARM + BEHIND):
        plain.train(1, usual, at)
        sides.append(values(plain))

    def prepared() -> tuple[Loop, Any]:
        if call is attach:
            return Loop(mesh, adamw, None).train(WARM, usual), fields
        loop = Loop(mesh, adamw, fields).train(WARM - 2, usual)
        saved = copy.deepcopy(loop.optimizer.state_dict())
        return loop.train(2, usual, WARM - 2), saved

    loop, argument = prepared()
    with Interrupted() as counting:
        call(loop, argument)
    rng = random.Random(policy + call.__name__)
    for _ in range(max(1, TRIALS // 4)):
        loop, argument = prepared()
        with Interrupted(rng.randrange(1, counting.lines)) as interrupted:
            call(loop, argument)
        engine = engine_of(loop.optimizer) if is_offloaded(loop.optimizer) else None
        if engine is not None and engine.failure:
            continue
        found, params = values(loop), len(loop.params)
        if call in (load, load_while_held) and same_value(found[params:], sides[WARM - 3][params:]):
            assert same_value(found[:params], sides[WARM - 1][:params]), interrupted.where
            continue
        assert same_value(found, sides[WARM - 1]), interrupted.where
        loop.train(BEHIND, usual, WARM)
        assert same_value(values(loop), sides[-1]), f"{interrupted.where}: other bits later"


def test_parameters_stay_where_they_were_if_attaching_is_interrupted(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, loop = (Loop(mesh, adamw, None).train(2, usual) for _ in range(2))
    put_home, calls = homed.put_home, [0]

    def third(*args: Any) -> Tensor:
        calls[0] += 1
        stand_in = put_home(*args)
        if calls[0] == 3:
            raise KeyboardInterrupt
        return stand_in

    with monkeypatch.context() as patch:
        patch.setattr(homed, "put_home", third)
        with pytest.raises(KeyboardInterrupt):
            attach(loop, OffloadPolicy(overlap="iteration", parameters=True))
    assert not is_offloaded(loop.optimizer)
    assert not any(map(homed.is_homed, loop.params))
    assert same_value(values(loop.train(2, usual, 2)), values(plain.train(2, usual, 2)))
