"""Where a model's forward and backward meet the engine: who waits for which parameters, and when gradients are final.

    forward:   a group of fully_shard is gathered ──▶ its stream waits for the updates of that group's buckets
    backward:  it begins ──▶ loads begin, into staging that is there for the backward
               a group's gradients are reduced ──▶ updates begin, once the last reduction before step() is

Where the loop is, ``clock.py`` says. ``tune_resident.py`` learns from the times of some iterations, ``tune_staging.py``
from their memory. Everything here refers to the optimizer weakly, so that the hooks keep nothing alive.
"""

import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..engine.engine import Engine
from ..policy import OffloadPolicy
from ..state.store import StateStore
from ..torch_compat.conversions import keep_in_place
from ..torch_compat.fully_shard import abandon_backward, runs_in_backward, sharding_groups
from ..torch_compat.left_behind import LeftBehind
from ..torch_compat.spent_gradient import lift_zeroed, put_zeroed_back, refuse_freed
from .alone import Alone
from .clock import Clock
from .peak import Peak
from .tune_resident import Rehearsal
from .tune_staging import Elastic

_ELSEWHERE = -1

GetStates = Callable[[Optimizer], StateStore]


class Overlap:
    """The hooks on one model for one optimizer.

    Attributes:
        in_groups: parameters that ``fully_shard`` gathers; all others have to be new when ``step()`` returns.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, engine: Engine, get_states: GetStates) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._engine = weakref.ref(engine)
        self._get_states = get_states
        self._groups = sharding_groups(model)
        self.in_groups = {param for group in self._groups for param in group.params}
        self._clock = Clock(len(self._groups))
        self._generation = -1  # of the engine's plan, for which these are known
        self._buckets_of: dict[int, set[int]] = {}
        self._all_new = True
        self._used: dict[int, None] = {}  # groups since the last step, in the order of their first forwards
        self._evaluates = False  # in a forward that no backward follows
        self._final: set[Tensor] = set()
        params = [group.params for group in self._groups]
        self._peak = Peak(engine, self._clock)
        self._rehearsal = Rehearsal(engine, params, self._clock, self._peak)
        self._elastic = Elastic(engine, params, self._peak)
        self._alone = Alone(self._clock, self._peak)
        overlap = weakref.ref(self)
        # All that the hooks keep: what the device does is waited for when the engine goes, what the host does is not.
        last = self._left_behind = LeftBehind(
            self._model, None if engine.host is None else engine.host.last.wait_without_owner
        )
        self._steps = engine.steps  # the engine may go first
        self._undo: list[Callable[[], None]] = []
        for number, group in enumerate(self._groups):
            names = ["_before_gather", "_before_use", "_before_reduce", "_reduced"]
            if engine.window is not None:
                names += ["_before_read", "_after_read", "_in_forward"]
            self._undo.append(group.hook(*(partial(_call, overlap, last, name, number) for name in names)))
        if engine.window is not None:
            streamed = [one for group in engine.window.groups for one in group]
            owners = [module for one in streamed for module, _ in one.places()]
            self._undo.append(keep_in_place(model, owners, [one.param for one in streamed], engine))
            begins, ends = (partial(_call, overlap, last, name) for name in ("_forward_begins", "_forward_ended"))
            self._undo.append(model.register_forward_pre_hook(begins, prepend=True).remove)
            self._undo.append(model.register_forward_hook(ends, always_call=True).remove)
        if engine.policy.runs_on_into_forward or engine.window is not None:
            for module in model.modules():  # the state dict of a part of the model may be asked for by itself
                for register, name in (
                    (module.register_state_dict_pre_hook, "_before_state_dict"),
                    (module.register_load_state_dict_pre_hook, "_before_load"),
                ):
                    handle: RemovableHandle = register(partial(_call, overlap, last, name))  # type: ignore[no-untyped-call]
                    self._undo.append(handle.remove)

    def __del__(self) -> None:
        begun = self._steps.begun
        if begun is not None and begun.has_updated and self._undo:
            self._left_behind.is_half_updated = True

    def remove(self) -> None:
        """Take the hooks away."""
        for undo in self._undo:
            undo()
        self._undo = []

    def forget_reductions(self) -> None:
        """Gradients have been cleared without a step: what has been reduced counts for nothing."""
        self._clock.forget_reductions()
        self._final = set()

    def before_step(self) -> None:
        """Call it before ``step()`` issues anything."""
        engine = self._engine()
        assert engine is not None
        engine.iteration.step_begins()
        self._rehearsal.conclude(engine)
        self._rehearsal.step_begins(engine)

    def before_reload(self) -> None:
        """Call it before loads are begun by hand: from then on, the times of the last step are gone."""
        engine = self._engine()
        assert engine is not None
        self._rehearsal.conclude(engine)

    def after_step(self, states: StateStore) -> None:
        """Call it when ``step()`` has issued everything."""
        engine = self._engine()
        assert engine is not None
        order = self._clock.order
        self._clock.step_ended()
        self._rehearsal.step_ended(engine, states)
        self._elastic.step_ended(engine)
        if engine.policy.runs_on_into_forward:
            engine.steps.wait_for(self._buckets(engine)[_ELSEWHERE])
        self._all_new = False
        buckets = self._buckets(engine)
        engine.steps.backward_order = _by_last_appearance(buckets[number] for number in order)
        self._final, self._used = set(), {}
        if engine.window is not None:
            engine.window.step_ended()
        if not engine.policy.serial:  # whose marks make the host wait
            self._alone.step_ended(engine)
            engine.iteration.step_ended(engine.steps.last)
            self._alone.iteration_ended(engine)

    def _buckets(self, engine: Engine) -> Mapping[int, Collection[int]]:
        """Of each group, and ``_ELSEWHERE``: of what ``fully_shard`` does not gather."""
        if engine.plan.generation != self._generation:
            elsewhere = [param for param in engine.plan.shards if param not in self.in_groups]
            groups = {number: group.params for number, group in enumerate(self._groups)} | {_ELSEWHERE: elsewhere}
            self._buckets_of = {number: engine.steps.buckets_of(params) for number, params in groups.items()}
            self._generation = engine.plan.generation
        return self._buckets_of

    # Called by the hooks ------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any) -> None:
        """Call one of the methods below. A backward that it refuses to go on with leaves nothing behind."""
        try:
            getattr(self, method)(*args)
        except BaseException:
            model = self._model()
            if model is not None and runs_in_backward():
                abandon_backward(model)
            raise

    def _before_gather(self, number: int, stream: torch.Stream | None) -> None:
        engine = self._engine()
        if engine is not None and engine.policy.runs_on_into_forward:
            engine.steps.before_gather(self._buckets(engine)[number], stream, in_backward=runs_in_backward())

    def _before_use(self, number: int, in_backward: bool) -> None:
        engine = self._engine()
        if engine is not None and not in_backward:
            if engine.policy.updates_in_backward and runs_in_backward():
                engine.steps.refuse_recomputation(self._buckets(engine)[number])
            self._clock.forward()
            self._rehearsal.wanted(engine, number)
            self._elastic.before_use(engine, number)
        elif engine is not None:
            engine.iteration.backward_begins()
            if not self._clock.in_backward:
                self._backward_begins(engine)
        self._before_gather(number, None)
        if engine is not None and engine.policy.updates_in_backward and not in_backward and torch.is_grad_enabled():
            self._keep_ahead(engine, number)

    def _keep_ahead(self, engine: Engine, number: int) -> None:
        """In the last forward before the step: what other forwards see may be other weights."""
        if self._clock.expects_reductions and self._clock.in_last_backward:
            engine.keep_ahead(self._buckets(engine)[number])

    def _backward_begins(self, engine: Engine) -> None:
        """Ahead of the first gradients of a backward; unless nothing is gathered in it."""
        clock = self._clock
        clock.in_backward = True
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if not clock.has_reduced:
            self._rehearsal.conclude(engine)
        self._peak.backward_begins(engine)
        self._expect_reductions(engine)
        room_bytes = self._elastic.backward_begins(engine)
        if engine.window is not None:
            engine.window.held_for_updates = (
                engine.steps.updates_early and clock.expects_reductions and clock.in_last_backward
            )
        if clock.expects_reductions and clock.in_last_backward:
            engine.load_ahead(optimizer, self._get_states(optimizer), room_bytes)

    def _expect_reductions(self, engine: Engine) -> None:
        """As a backward begins: none of the gradients that it frees may wait for one that does not come.

        Where there is no room for all of them, none may have to wait for ``step()``. They cannot be added up there
        either, so in the first backward each is final when it has been reduced once.
        """
        clock, steps, optimizer = self._clock, engine.steps, self._optimizer()
        if clock.has_reduced or optimizer is None:
            return
        if engine.would_keep_gradients and engine.must_free_gradients() and not clock.expects_reductions:
            clock.expect_one()
        if engine.frees_all_gradients:
            engine.follow_changes(optimizer, self._get_states(optimizer))
            if not steps.backward_order:
                buckets = self._buckets(engine)
                steps.backward_order = _by_last_appearance(buckets[number] for number in reversed(self._used))
        if engine.frees_gradients:
            steps.expect_none_of(
                {
                    param
                    for number, group in enumerate(self._groups)
                    for param in group.params
                    if number not in self._used or not param.requires_grad
                }
            )

    def _before_read(self, number: int, stream: torch.Stream | None, in_backward: bool) -> None:
        engine = self._engine()
        if engine is not None and engine.window is not None:
            engine.window.lend(number, stream, in_backward=in_backward)

    def _after_read(self, number: int, stream: torch.Stream | None) -> None:
        engine = self._engine()
        if engine is not None and engine.window is not None:
            engine.window.take_back(number, stream)

    def _forward_begins(self, *_: object) -> None:
        # Asked of the whole model: parts of it also run without gradients under a checkpoint that computes them again.
        self._evaluates = not torch.is_grad_enabled()

    def _forward_ended(self, *_: object) -> None:
        self._evaluates = False

    def _in_forward(self, number: int) -> None:
        if not self._evaluates:
            self._used.setdefault(number)

    def _before_state_dict(self, *_: object) -> None:
        engine = self._engine()
        if engine is not None:
            engine.steps.check_whole("model.state_dict()")
        self._before_load()

    def _before_load(self, *_: object) -> None:
        engine = self._engine()
        if engine is not None:
            engine.steps.take_back()
            engine.steps.wait_for_all()
            if engine.window is not None:
                engine.wait_all_home()  # whoever reads parameters there does it on the host

    def _before_reduce(self, number: int) -> None:
        engine = self._engine()
        if engine is not None:
            engine.iteration.backward_begins()  # where nothing is gathered again, this is the first that is seen of it
            self._expect_reductions(engine)
        if engine is not None and (self._clock.is_final(number) or engine.steps.has_been_seen):
            engine.steps.refuse_second_backward()
        refuse_freed(self._groups[number].params)
        lift_zeroed(self._groups[number].params)

    def _reduced(self, number: int, event: object) -> None:
        put_zeroed_back(self._groups[number].params)
        optimizer, engine = self._optimizer(), self._engine()
        if optimizer is None or engine is None:
            return
        if engine.policy.runs_on_into_forward and not self._all_new:
            engine.steps.wait_for_all()  # also for what this forward did not use
            self._all_new = True
        if not self._clock.has_reduced:
            self._rehearsal.conclude(engine)
        self._rehearsal.final(engine, number)
        self._peak.reduced(engine)
        room_bytes = self._elastic.reduced(engine)
        self._clock.reduced(number)
        if engine.policy.updates_in_backward:
            engine.steps.speculation.watch(self._groups[number].params)
        if not self._clock.expects_reductions:
            return
        if self._clock.is_final(number):
            self._final.update(self._groups[number].params)
        if self._clock.in_last_backward:
            device_event = event if engine.device.type != "cpu" else None
            engine.gradients_reduced(optimizer, self._get_states(optimizer), self._final, device_event, room_bytes)


def _call(overlap: "weakref.ref[Overlap]", left_behind: LeftBehind, method: str, *args: Any) -> None:
    target = overlap()
    if target is not None:
        target.call(method, *args)
    else:
        left_behind.call(method, *args)


def _by_last_appearance(sets: Any) -> list[int]:
    """A bucket that several groups share comes where the last of them does."""
    order: dict[int, None] = {}
    for numbers in sets:
        for number in sorted(numbers):
            order.pop(number, None)
            order[number] = None
    return list(order)


def make_overlap(
    model: nn.Module | None, optimizer: Optimizer, engine: Engine, get_states: GetStates
) -> Overlap | None:
    """The hooks on a model's forward and backward; ``None`` where the policy can do without, and there is no place.

    Raises:
        ValueError: the policy needs a model, and there is none to hook into, or it is not sharded.
        NotImplementedError: the same, and this torch's ``fully_shard`` has other hook points.
    """
    policy = engine.policy
    if policy.updates_in_backward and not engine.conventions.reads_param_grad:
        raise ValueError(
            "offload_optimizer: overlap='iteration' uses gradients as fully_shard makes them, and this optimizer reads "
            "param.decoupled_grad, which is made later. Use overlap='forward'."
        )
    if (
        not (policy.runs_on_into_forward or policy.parameters)
        and not group_numbers(model, policy).keys() & engine.names.keys()
    ):
        return None  # nothing to hook into: loads begin in step()
    wanted = f"OffloadPolicy({'parameters=True' if policy.parameters else f'overlap={policy.overlap!r}'})"
    if model is None:
        raise ValueError(f"offload_optimizer: {wanted} needs model=..., into whose forward and backward it hooks.")
    if policy.parameters:
        engine.stream_parameters([group.sharded() for group in sharding_groups(model)])
    overlap = Overlap(model, optimizer, engine, get_states)
    if policy.runs_on_into_forward and not overlap.in_groups & set(engine.plan.shards):
        overlap.remove()
        raise ValueError(
            f"offload_optimizer: {wanted} hooks into fully_shard, and none of the optimizer's parameters is sharded by "
            "it. Shard the model first, or leave overlap at its default."
        )
    engine.loads_in_backward = True
    return overlap


def group_numbers(model: nn.Module | None, policy: OffloadPolicy) -> dict[Tensor, int]:
    """Of the model's sharded parameters, in the order in which a forward gathers them; none without groups to hook.

    Raises:
        NotImplementedError: this torch's ``fully_shard`` has other hook points, and the policy cannot do without.
    """
    if model is None:
        return {}
    try:
        groups = sharding_groups(model)
    except NotImplementedError:
        if policy.runs_on_into_forward or policy.parameters:
            raise
        return {}
    return {param: number for number, group in enumerate(groups) for param in group.params}
