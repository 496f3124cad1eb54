"""Hooks from a model's forward and backward into the core. Everything here refers to the optimizer weakly."""

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.buckets import ELSEWHERE
from ..device.lanes import refuse_capture
from ..fsdp.fully_shard import LeftBehind, Points, abandon_backward, runs_in_backward, sharding_groups
from ..fsdp.gradients import refuse_freed
from ..fsdp.homed import keep_in_place
from ..policy import OffloadPolicy
from .engine import Engine, states_of

_LOOKS = {
    "_before_state_dict",
    "_after_state_dict",
    "_before_load",
    "_after_load",
}  # other threads may run these between steps


class ModelHooks:
    """The hooks on one model for one optimizer.

    The gather of parameters that stay on the device waits for their updates. Streamed parameters are fetched as late as
    possible, before their shards are read.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, engine: Engine) -> None:
        self._model, self._optimizer, self._engine = weakref.ref(model), weakref.ref(optimizer), engine
        self._groups = sharding_groups(model)
        hooks = weakref.ref(self)
        # The hooks keep only this alive. A deleted engine has waited for the device, but not for updates on the CPU.
        last = self._left_behind = LeftBehind(self._model, {} if engine.host is None else engine.host.ended)
        self._undo: list[Callable[[], None]] = []
        for number, group in enumerate(self._groups):
            points = Points(*(partial(_call, hooks, last, f"_{name}", number) for name in Points._fields))
            self._undo.append(group.hook(points))
        self._trains = True  # the gather under way is part of training
        if engine.weights.parts:
            self._undo.append(keep_in_place(model, list(engine.weights.parts), engine))
        if engine.policy.moves_beside_model:
            before_save, after_save, before_load, after_load = (
                partial(_call, hooks, last, name)
                for name in ("_before_state_dict", "_after_state_dict", "_before_load", "_after_load")
            )
            for module in model.modules():  # also submodules, whose state dict may be taken by itself
                self._undo.append(module.register_state_dict_pre_hook(before_save).remove)
                self._undo.append(module.register_state_dict_post_hook(after_save).remove)
                self._undo.append(module.register_load_state_dict_pre_hook(before_load).remove)
                self._undo.append(module.register_load_state_dict_post_hook(after_load).remove)

    def __del__(self) -> None:
        if self._engine.core.done and self._undo:
            self._left_behind.is_half_updated = True

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    # Called by the hooks ----------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> None:
        """Call one of the methods below. If it raises, abandon the backward, so that no part of it is left."""
        try:
            with nullcontext() if method in _LOOKS else self._engine.core.lock:
                getattr(self, method)(*args)
        except BaseException:
            abandon_backward(self._model())
            raise

    def _before_gather(self, number: int, stream: torch.Stream | None) -> None:
        engine = self._engine
        engine.core.loading.clear()  # of a load that an exception has ended
        refuse_capture(engine.device)
        if engine.speculation.ahead.is_speculative:
            engine.speculation.before_gather(number)
        if number not in engine.weights.items:
            engine.core.gather(number, stream)
        if stream is None:
            engine.core.uses(number)

    def _before_use(self, number: int, in_backward: bool) -> None:
        engine = self._engine
        if engine.speculation.ahead.is_speculative:
            engine.speculation.before_gather(number)
        step = engine.core.updates
        if step is not None and engine.core.has_updated(number):
            if runs_in_backward():
                engine.refuse("second backward" if in_backward else "recomputation")
            step.is_seen = True
        engine.core.come((number, in_backward, torch.is_grad_enabled()))  # an evaluation has points of its own
        self._before_gather(number, None)
        if not in_backward and torch.is_grad_enabled() and not runs_in_backward():
            if engine.core.is_foreign:
                engine.core.trained_here()
            engine.speculation.keep_ahead(number)

    def _before_read(self, number: int, stream: torch.Stream | None, in_backward: bool) -> None:
        engine = self._engine
        if number in engine.weights.items:
            engine.speculation.before_gather(number)
            engine.core.gather(number, stream)
            engine.weights.lend(number)
            self._trains = in_backward or torch.is_grad_enabled()

    def _after_read(self, number: int, stream: torch.Stream | None) -> None:
        streams = number in self._engine.weights.items
        if streams:
            self._engine.weights.take_back(number)
        self._engine.core.gathered(number, stream, counts=not streams or self._trains)

    def _before_state_dict(self, *_: object) -> None:
        with self._engine.between_steps():
            self._engine.check_usable("model.state_dict()")  # refuses a mix of new and old parameters
            self._engine.wait_updated()  # reading a parameter on the host waits for its home by itself

    def _after_state_dict(self, module: nn.Module, found: Mapping[str, object], prefix: str, _: object) -> None:
        engine = self._engine
        with engine.core.lock:
            for name, param in module.named_parameters(recurse=False):
                if param in engine.plan.shards and param not in engine.plan.streamed:
                    home = engine.weights.fixed[engine.plan.together.get(param, ELSEWHERE)]
                    home.hand_out(param, found.get(prefix + name), engine.core.steps)

    def _before_load(self, module: nn.Module, _: object, prefix: str, *__: object) -> None:
        here, loading = threading.get_ident(), self._engine.core.loading
        for one in [one for one, thread in [*loading.items()] if thread == here and not prefix]:
            del loading[one]  # an exception has ended an earlier load
        with self._engine.between_steps():
            self._engine.wait_updated()
            if self._engine.weights.items:
                self._engine.lending.wait()  # R4, on the host: a checkpoint's writer may still be reading the homes
            loading[id(module)] = here

    def _after_load(self, module: nn.Module, _: object) -> None:
        self._engine.core.loading.pop(id(module), None)

    def _before_reduce(self, number: int) -> None:
        optimizer, engine = self._optimizer(), self._engine
        if optimizer is not None and not engine.core.reductions.counts:
            engine.expect_gradients(optimizer, states_of(optimizer).unwaited)
        for one in engine.contents.listeners:
            one.before_reduction()
        step = engine.core.updates
        if step is not None and (step.is_seen or engine.core.has_updated(number)):
            if engine.speculation.made:
                engine.speculation.roll_back()
            else:
                engine.refuse("second backward")
        if engine.policy.parameters:
            refuse_freed(self._groups[number].params)
        engine.core.uses(number)  # R1: the reduction may add to gradients that an update reads; no gather has waited

    def _reduced(self, number: int, event: object) -> None:
        optimizer, engine = self._optimizer(), self._engine
        if optimizer is not None:
            event = event if engine.device.type != "cpu" else None
            with engine.core.timed_call():
                engine.core.come((number, "reduced"))
                engine.reduced(number, self._groups[number].params, event, optimizer, states_of(optimizer).unwaited)


def _call(hooks: "weakref.ref[ModelHooks]", left_behind: LeftBehind, method: str, *args: Any) -> None:
    target = hooks()
    if target is not None:
        target.call(method, *args)
    else:
        left_behind.call(method, *args)


def hook_model(model: nn.Module | None, optimizer: Optimizer, engine: Engine) -> ModelHooks | None:
    """Hook into a model's forward and backward; ``None`` if the policy needs no hooks, and no group is gathered.

    Raises:
        ValueError: the policy needs a sharded model, and there is none.
        NotImplementedError: the policy needs hooks, and this torch's ``fully_shard`` has other hook points.
    """
    policy = engine.policy
    if policy.updates_in_backward and not engine.conventions.reads_param_grad:
        raise ValueError(
            "offload_optimizer: overlap='iteration' uses gradients as fully_shard makes them, and this optimizer reads "
            "param.decoupled_grad, which is made later. Use overlap='forward'."
        )
    is_gathered = bool(engine.plan.together.keys() & engine.names.keys())
    if not (policy.moves_beside_model or is_gathered):
        return None  # nothing to hook into: loads begin in step()
    wanted = f"OffloadPolicy({'parameters=True' if policy.parameters else f'overlap={policy.overlap!r}'})"
    if model is None:
        raise ValueError(f"offload_optimizer: {wanted} needs model=..., into whose forward and backward it hooks.")
    if policy.runs_on_into_forward and not (is_gathered or (engine.plan.together and not engine.names)):
        raise ValueError(
            f"offload_optimizer: {wanted} hooks into fully_shard, and none of the optimizer's parameters is sharded by "
            "it. Shard the model first, or leave overlap at its default."
        )
    engine.loads_in_backward = True
    if policy.parameters:
        engine.stream_parameters([group.sharded() for group in sharding_groups(model)])
    return ModelHooks(model, optimizer, engine)


def group_numbers(model: nn.Module | None, policy: OffloadPolicy) -> dict[Tensor, int]:
    """Map each sharded parameter to the number of its ``fully_shard`` group, in forward order; empty without groups.

    Raises:
        NotImplementedError: the policy needs hooks, and this torch's ``fully_shard`` has other hook points.
    """
    if model is None:
        return {}
    try:
        groups = sharding_groups(model)
    except NotImplementedError:
        if policy.moves_beside_model:
            raise
        return {}
    return {param: number for number, group in enumerate(groups) for param in group.params}
