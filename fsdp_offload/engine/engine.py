"""One offloaded optimizer: its contents, its steps, and the core that moves its bytes."""

import functools
import logging
import warnings
import weakref
from collections import ChainMap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.buckets import ELSEWHERE, Bucket, pools_for, share_out
from ..core.curve import Reading
from ..core.items import Item
from ..core.loop import Core
from ..core.room import SAMPLED, Room, Stopwatch
from ..cpu_update import HostUpdates
from ..device.lanes import device_link
from ..fsdp.allocations import History
from ..fsdp.dtensor import local_shard, over_local
from ..fsdp.gradients import is_freed, is_zeroed
from ..fsdp.homed import ShardedParameter, is_homed
from ..fsdp.optim import scaler_decides, unsupported_gradient
from ..optimizers import Capabilities
from ..optimizers.divided_step import ENGINE_ATTRIBUTE
from ..optimizers.kept_state import Layouts, zero_like
from ..optimizers.masters import MASTER, can_rebuild
from ..policy import OffloadPolicy, listed
from ..state.layout import in_dtypes_of, is_trained
from ..state.shard import StateShard
from ..state.store import Entries, OffloadedState, StateStore, UserState, adopt, apart, is_exchanged
from .groups import ParamGroups, ids_of, is_dead
from .homes import Lending, Plan
from .speculation import AnyMethod, Speculation
from .step import Contents, Step
from .weights import FixedHome, Weights

logger = logging.getLogger(__name__)


def _alone(method: AnyMethod) -> AnyMethod:
    """Run ``method`` under the lock, without other threads in the engine."""

    @functools.wraps(method)
    def call(self: "Engine", *args: Any, **kwargs: Any) -> Any:
        with self.core.lock:
            return method(self, *args, **kwargs)

    return cast(AnyMethod, call)


def _looking(method: AnyMethod) -> AnyMethod:
    """Run ``method`` under the lock; a thread that does not train first waits for the end of the step under way."""

    @functools.wraps(method)
    def call(self: "Engine", *args: Any, **kwargs: Any) -> Any:
        with self.between_steps():
            return method(self, *args, **kwargs)

    return cast(AnyMethod, call)


class Engine:
    """The engine of one offloaded optimizer, to which it never refers: deleting the optimizer frees everything.

    Attributes:
        cls: the user's optimizer class.
        policy: the policy in force.
        device: device of the parameters.
        names: name of each parameter of the optimizer, for messages.
        layouts: layouts of their state.
        conventions: conventions of the class about state and gradients.
        host: updates the CPU's share of the state; ``None`` without a share.
        plan: shards, homes and buckets.
        groups: the param groups for which the plan was made.
        lending: homes that others read.
        contents: the parts that all its steps use, and their listeners.
        core: the loop that moves items and runs updates.
        speculation: gradients that the backward has updated with, and whether that step is speculative.
        weights: parameters whose home is on the host.
        loads_in_backward: hooks on a model tell when a backward begins.
        room: chooses how many blocks are allowed; ``None`` if ``device_bytes`` is a number, or blocks gain nothing.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        capabilities: Capabilities,
        policy: OffloadPolicy,
        device: torch.device,
        names: dict[Tensor, str],
        together: Mapping[Tensor, int],
        host: HostUpdates | None,
    ) -> None:
        self.cls, self.policy, self.device, self.names, self.host = cls, policy, device, names, host
        self.layouts, self.conventions = Layouts(cls, capabilities), capabilities.conventions
        self.loads_in_backward = False
        self.room: Room | None = None
        link = device_link(device)
        self.core = Core(link.lanes(serial=policy.serial), device, policy.overlap)
        self.lending = Lending(self.core, self.conventions.gradient)
        self.plan = Plan(self.layouts, policy, device, self.lending, together, host)
        self.weights = Weights(self.lending)
        self.plan.streamed = self.weights.parts.keys()
        self.groups = ParamGroups(self.layouts, self.plan)
        self.contents = Contents(cls, self.layouts, self.plan, self.groups, self.lending, self.weights, host)
        self.speculation = Speculation(self.core, self.contents, names)
        if device.type != "cpu" and not policy.serial:  # on serial lanes, each mark waits for the device
            self.core.cache.stopwatch = Stopwatch(device)
            if policy.moves_beside_model and not capabilities.moves_whole and link.counts:
                link.caches.add(self.core.cache)
                self.core.curve.read = lambda: Reading(*link.allocated(), optimizers=len(link.caches))
                self.core.curve.history = History(device)
                self.core.gives_way = policy.device_bytes == "auto" and policy.updates_in_backward
        self.core.frees_gradients = policy.parameters and policy.updates_in_backward
        self.core.reductions.chooses = policy.updates_in_backward and not policy.parameters and capabilities.elementwise
        self.core.cache.copies_alone = not policy.moves_beside_model
        self._failure = ""
        self._is_taken = True  # the core has the buckets of the plan
        # Wait for copies that use homes and places: the finalizer runs before the attributes are dropped.
        weakref.finalize(self, link.synchronize).atexit = False

    def stream_parameters(self, groups: Sequence[Sequence[ShardedParameter]]) -> None:
        """Move the parameters of this optimizer, and frozen ones of the model, to homes on the host, group by group.

        Raises:
            MemoryError: host memory does not suffice.
        """

        def is_own(one: ShardedParameter) -> bool:
            is_frozen = not is_trained(one.param) and one.is_plain  # moved by the first optimizer that is offloaded
            return one.param in self.names or (is_frozen and not is_homed(one.param))

        own = [list(filter(is_own, group)) for group in groups]
        spare_bytes = self.policy.snapshot_bytes - self.plan.spare_bytes
        look = partial(_look_at_parameter, weakref.ref(self))
        move_home = self.weights.move_home
        # Also parameters with state: one that the user has added to a param group by hand is not in ``names``.
        trained = ChainMap[Tensor, object](self.plan.shards, self.names)  # type: ignore[arg-type]
        self.plan.of_parameters = move_home(own, look, self.plan.take_region, spare_bytes, trained)
        self._take_plan()

    # The plan ---------------------------------------------------------------------------------------------------------

    @_alone
    def settle(self) -> None:
        """Bring all items home before homes are written, or planned anew. Do not raise an error of the CPU's update."""
        self.speculation.roll_back()
        if self.host is not None:
            self.host.wait()
        self.core.wait_updated()
        self.core.settle()

    def _take_plan(self) -> None:
        """Give the buckets of a changed plan to the core. Call only after :meth:`settle`."""
        core, buckets, streamed = self.core, self.plan.buckets, self.weights.items
        core.cache.release()
        for bucket in buckets:
            bucket.state.exists = False  # until note_made looks for state
        numbers = sorted({self.plan.together.get(param, ELSEWHERE) for param in self.plan.shards} | {ELSEWHERE})
        fixed = {number: self.weights.fixed.setdefault(number, FixedHome()) for number in numbers}
        weights = {number: Item(f"parameters of group {number}", home=home) for number, home in fixed.items()}
        core.take(buckets, weights | streamed)
        limit = None if self.policy.device_bytes == "auto" else self.policy.device_bytes
        whole = self.layouts.capabilities.moves_whole  # state of such an optimizer does not pass through blocks
        state = [bucket.state for bucket in buckets if bucket.state.nbytes and not whole]
        joins = self.policy.updates_in_backward and self.layouts.capabilities.joins
        sizes = self.plan.bucket_bytes, limit
        pools = core.cache.pools = pools_for(state, [*streamed.values()], buckets, *sizes, joins=joins)
        share_out(pools, limit)
        # Not with storages of their own (``place_values``: ``apart``), which keep the address they were bound at.
        core.cache.keeps_bound = self.layouts.capabilities.known and all(
            one.on_locals for one in self.plan.shards.values()
        )
        core.choose_kept()
        learns = limit is None and not whole and self.policy.moves_beside_model and core.cache.stopwatch is not None
        self.room = Room.for_pools(pools, [*state, *streamed.values()]) if learns else None
        self.speculation.old.forget()
        self._is_taken = True

    def note_made(self, states: StateStore) -> None:
        """Note which buckets have state by now."""
        if not self._is_taken:  # an interrupt came after the plan had changed
            self._take_plan()
        for bucket in self.core.buckets:
            bucket.state.exists = bucket.state.exists or any(map(states.get, bucket.params))

    @_alone
    def take_all_blocks(self) -> None:
        """Allocate all blocks before there are activations, so that blocks do not lie among activations.

        First free memory that the allocator caches from state that is at home now: activations would not fit it.
        """
        device_link(self.device).empty_cache()
        self._take_blocks()

    def _take_blocks(self) -> None:
        try:
            self.core.cache.take_all()
        except torch.OutOfMemoryError:
            logger.info("no room for all blocks yet; they are taken when they are needed")

    # A step -----------------------------------------------------------------------------------------------------------

    @_alone
    def step(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> bool:
        """Update every parameter that has a gradient, and count the step as the optimizer would.

        Return, once all updates are issued, whether there was any gradient. Later work of the current stream sees new
        parameters; if updates overlap with the forward, each gather waits for the updates of what it reads.
        """
        try:
            with self.core.timed_call():
                updated, is_steady = self._step(optimizer, states, kwargs)
        except BaseException:
            if self.core.cache.stopwatch is not None:
                self.core.cache.stopwatch.forget()  # else the next step would end two iterations
            raise
        self._measure(is_steady)
        return updated

    def _step(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
        """Return whether there was any gradient, and whether this iteration repeated the one before."""
        core, speculation = self.core, self.speculation
        self.check_usable("step()", mid_step=True)
        self.lending.check_step()
        if lost := self.lending.lost_writes():
            warnings.warn(
                f"State of {listed(lost)} was written through a tensor that was fetched before an asynchronous save. "
                "Steps have moved this state since, and the write is lost. Fetch it from optimizer.state again before "
                "writing.",
                stacklevel=3,
            )
        self._make_zeroed_gradients(self.plan.shards)
        speculation.look()
        core.away = False
        core.come("step")
        problem = speculation.problem(optimizer, states, kwargs)
        if problem and (not speculation.made or speculation.written()):
            self.refuse("step()", problem)  # a roll-back would overwrite the user's write
        if problem or (speculation.made and speculation.ahead.way_back.is_written()):
            speculation.roll_back()
        try:
            if core.updates is None:
                self._follow_groups(optimizer, states)
            self._check_gradients(
                speculation.ahead.freed,
                "Nothing has been changed." if core.updates is None else "Put this right, and call step() again.",
            )
            updated = self._shards_with_grad(optimizer, states)
            self.note_made(states)
        except BaseException:
            speculation.roll_back()
            raise
        try:
            speculation.settle()  # last, since it waits for the norm
        except BaseException as error:
            self._note_failure(error, core.buckets)
            raise
        ended = speculation.ahead.ended
        numbers = {number for shard in updated if shard.param not in ended for number in shard.buckets}
        self._see_who_holds()
        wanted, made = [bucket for bucket in core.buckets if bucket.number in numbers], core.cache.lasting_bytes
        try:
            if speculation.step is None:
                speculation.ahead.is_speculative = False  # the backward may have chosen to speculate, and begun nothing
                core.updates = Step(self.contents, optimizer, states, kwargs)
            step = speculation.step
            assert step is not None
            step.leave_out(ended)
            self._leave_room([bucket for bucket in wanted if not bucket.state.exists])
            core.step(wanted, set(filter(step.is_late, core.done)))
            if self.host is not None:
                self.host.finish()
            new = [param for param in step.without_state if states.get(param)]
            step.finish(core, optimizer, states, new)
            if core.cache.restore_room() or new:
                self._take_blocks()
        except BaseException as error:
            self._note_failure(error, wanted)
            raise
        step.commit()
        try:
            repeats = core.end()
        finally:  # also after an interrupt: all updates have been issued
            speculation.step_ended(scaler_decides(optimizer, kwargs))
        for heard in step.heard:
            heard.committed()
        return bool(wanted), repeats and not new and core.cache.lasting_bytes == made

    def _see_who_holds(self) -> None:
        """Before the first update on the CPU, which itself holds tensors over homes, note which homes others hold."""
        if self.host is None or self.core.updates is not None:
            return
        for bucket in self.core.buckets:
            if bucket.on_host and not bucket.state.home.waits_for_step():
                bucket.state.home.exposed_at = None

    def _leave_room(self, creating: Iterable[Bucket]) -> None:
        """Allow one block less while updates of ``creating`` create state, which takes as much memory."""
        for bucket in creating:
            if bucket.state.pool is not None:
                self.core.cache.leave_room(bucket.state.pool)
                return

    def _note_failure(self, error: BaseException, wanted: list[Bucket]) -> None:
        core = self.core
        if self.speculation.made:
            self.speculation.roll_back()
            core.reset()
            return
        if (core.done or core.torn) and (self.host is None or error is not self.host.error):
            done, torn = (
                listed(self.plan.shards[param].name for bucket in buckets for param in bucket.params) or "none"
                for buckets in (core.done, core.torn)
            )
            self.failure = (
                f"an earlier step() stopped with {type(error).__name__}: {error}. {len(core.done)} of {len(wanted)} "
                f"buckets had been updated (parameters {done}); {torn} may be half updated; the others are as before "
                "that step"
            )
        try:
            core.abandon()
        finally:
            core.cache.restore_room()
            self.speculation.forget()

    def _measure(self, steady: bool) -> None:
        core, room, link = self.core, self.room, device_link(self.device)
        if core.cache.stopwatch is None:
            return
        reductions, is_read = core.reductions, core.steps % SAMPLED == 0  # the iteration before is timed
        is_settled = core.steps > 4 * SAMPLED if room is None else room.is_settled
        reading = core.cache.stopwatch.end(
            reads=room is not None or (reductions.chooses and is_read),
            times_next=not is_settled or core.steps % SAMPLED == SAMPLED - 2,
        )
        if steady and reading is not None and reading.link_ms:  # 0: all copies were put off, and none is timed
            may_wait = reductions.chooses and (room is None or room.is_full)
            reductions.choose_later(core.buckets if may_wait else (), reading)
        if core.curve.is_new:
            core.curve.is_new = False
            link.empty_cache()  # free gaps between activations, which blocks would not fit; waits for the device
        more = 0
        if room is not None and not core.curve.is_awaited:  # wait for the curve: blocks in its room cost less
            # Users read the statistics: do not reset them. The peak since the last reset bounds that of an iteration.
            more = room.end(reading, steady=steady, free_bytes=partial(link.room_bytes, "peak"))
        if room is not None and more:
            for pool, count in zip(core.cache.pools, room.counts(core.cache.pools), strict=True):
                core.cache.resize(pool, count)
            core.choose_kept()
            if more > 0:
                link.empty_cache()  # free memory that only the first steps needed; waits for the device
            self._take_blocks()

    # In the backward --------------------------------------------------------------------------------------------------

    def reduced(
        self, number: int, params: Sequence[Tensor], event: object, optimizer: Optimizer, states: StateStore
    ) -> None:
        """Handle the reduction of gradients of a group's ``params``: update ready buckets, and load the next items."""
        core = self.core
        self._see_who_holds()
        self.speculation.note(params)
        core.away = False
        self.speculation.ahead.ended = set()  # these gradients come from a backward after the load
        may_begin = False
        if core.mode.begin == "final" and core.updates is None and not self.failure:
            may_begin = core.frees_all or self.speculation.is_clean
            if self.speculation.announced and not core.frees_all:
                self.speculation.choose(optimizer, states)
                may_begin = self.speculation.ahead.is_speculative
            # Last: with many groups it takes long. Trained parameters without a plan are taken over by step().
            as_before = may_begin and self.groups.are_as_before(optimizer)
            may_begin = as_before and not any(map(is_trained, self.groups.unplanned))
        try:
            before = set(core.done)
            with torch.no_grad():
                # A parameter without a part in this reduction gets no other gradient: make its zeros now.
                if core.frees_gradients and self._make_zeroed_gradients(filter(self.names.__contains__, params)):
                    core.lanes.compute.wait(core.lanes.event(event))
                    event = None  # mark the end of compute instead, which writes the zeros
                final = core.reduced(number, event, goes_on=may_begin or core.updates is not None)
                ready = self.speculation.takes(final)
                if ready and core.updates is None and (step := self._begin(optimizer, states)) is not None:
                    core.begin(step)
                core.run(ready)
        except BaseException as error:
            self._note_failure(error, core.buckets)
            raise
        if core.frees_all and not core.reductions.held.isdisjoint(core.done):
            warnings.warn(
                "tensors over optimizer state or parameters are held (a state dict, an entry of optimizer.state), and "
                "the backward changes them: the GPU has no room for the gradients with which step() could. Let go of "
                "them before the backward, or keep copies.",
                stacklevel=2,
            )
        new = dict.fromkeys([param for bucket in core.done.keys() - before for param in bucket.params])
        if new and self.speculation.made and self.contents.writes_gradients:
            self.refuse("written gradients")
        if core.frees_gradients:
            self.speculation.spend(new)
        else:
            self.speculation.watch_used(new)

    def expect_gradients(self, optimizer: Optimizer, states: StateStore) -> None:
        """Decide before the first reduction of a step whether gradients may wait for ``step()``: only if all fit.

        If not, follow edits of param groups now rather than in ``step()``: an edit may divide state anew.
        """
        core = self.core
        if not core.frees_gradients or self.failure or core.done:
            return
        if not self.speculation.is_clean and self.layouts.capabilities.elementwise:
            core.frees_all = core.frees_all or not self._gradients_fit()
        if not core.frees_all:
            return
        core.reductions.least = 1
        with suppress(ValueError):  # step() raises it again: an error here would lose the gradients of this backward
            self._follow_groups(optimizer, states)
            self.add(optimizer, [param for param in self.groups.unplanned if is_trained(param)], states)
            self._follow_groups(optimizer, states)
            self.note_made(states)

    def _gradients_fit(self) -> bool:
        if self.device.type == "cpu":
            return True
        trained = (shard.param for shard in self.plan.shards.values() if shard.param.requires_grad)
        room_bytes = device_link(self.device).room_bytes("current")
        return sum(local_shard(param).nbytes for param in trained) <= room_bytes

    def _begin(self, optimizer: Optimizer, states: StateStore) -> Step | None:
        if self.core.frees_gradients and any(map(is_freed, self.plan.shards)):
            return None  # this backward or step() will refuse freed gradients, before which no bucket may be updated
        self.lending.check_step()
        expected = self.core.reductions.is_expected  # a bucket that never gets a gradient creates nothing
        creating = [bucket for bucket in self.core.buckets if not bucket.state.exists]
        self._leave_room([bucket for bucket in creating if any(map(expected, bucket.groups))])
        self.adopt_exchanged(states, optimizer)
        ahead = self.speculation.ahead
        return Step(self.contents, optimizer, states, {}, way_back=ahead.way_back if ahead.is_speculative else None)

    # Parameters and state of a step -----------------------------------------------------------------------------------

    def _shards_with_grad(self, optimizer: Optimizer, states: StateStore) -> list[StateShard]:
        """Return the shards to update; take over parameters with their first gradient, and exchanged state."""
        eager, gradient = self.conventions.state_without_gradient, self.conventions.gradient
        self.add(optimizer, [one for one in self.groups.unplanned if eager or gradient(one) is not None], states)
        # Also of shards without a gradient, which move with their bucket. ``problem`` has looked at those used already.
        step = self.speculation.step
        self.adopt_exchanged(states, optimizer, () if step is None else step.used_shards())
        return [
            shard
            for param, shard in self.plan.shards.items()
            if shard.group >= 0 and (gradient(param) is not None or (eager and not states.get(param)))
        ]

    def adopt_exchanged(
        self, states: StateStore, optimizer: Optimizer | None = None, used: Container[StateShard] = ()
    ) -> None:
        """Copy tensors that the user has put in place of homes into these; all at once, since one may be another home.

        Shards that are ``used``, and that the device updates, are known to have their homes.

        Raises:
            RuntimeError: see :meth:`Lending.check_unspoiled`; nothing has begun yet.
            ValueError: ``optimizer`` cannot step: state lacks a part, or a counter is not one element.
        """
        self.lending.check_unspoiled()
        entries = [(one, states.get(one.param)) for one in self.plan.shards.values() if one.on_host or one not in used]
        if optimizer is not None and self.layouts.capabilities.known:
            self.groups.check_entries(optimizer, entries)
        others = [
            (shard, state) for shard, state in entries if (shard.existed and not state) or is_exchanged(shard, state)
        ]
        self.leave_to_holders(others, {})
        exchanged = [(shard, state) for shard, state in others if state]
        if exchanged:
            self.settle()  # R2: such a tensor may be another parameter's home, still being stored
            self.lending.wait()
            adopt(exchanged)

    def leave_to_holders(self, entries: Iterable[tuple[StateShard, UserState]], before: Entries) -> None:
        """Leave home tensors that ``entries`` of the user's state do not hold any more to those who do.

        ``before``: entries of which they take the place, by parameter.
        """
        for shard, state in entries:
            old = before.get(shard.param, {})
            if shard.held_without(state, old):
                self.lending.wait()  # R4: a checkpoint's writer is no holder; and new tensors have not its versions
                self.wait_home(shard.param)
                shard.leave(shard.held_without(state, old))

    def _check_gradients(self, used: Container[Tensor], outcome: str) -> None:
        """Refuse gradients that updates cannot use; skip those that the backward has ``used`` and freed."""
        for param in (*self.groups.unplanned, *self.plan.shards):
            grad = None if param in used else self.conventions.gradient(param)
            if grad is not None:
                problem, shard = unsupported_gradient(param, grad), self.plan.shards.get(param)
                if (
                    not problem
                    and shard is not None
                    and len(shard.buckets) > 1
                    and not local_shard(param).is_contiguous()
                ):
                    problem = _OTHER_LAYOUT.format(local_shard(param).stride())
            elif self.conventions.reads_param_grad and getattr(param, "decoupled_grad", None) is not None:
                problem = _DECOUPLED
            else:
                continue
            if problem:
                name = self.names.get(param, "a parameter")
                raise RuntimeError(f"{name} cannot be updated: {problem}. {outcome}")

    def _follow_groups(self, optimizer: Optimizer, states: StateStore) -> None:
        """Follow param groups that were edited, and hyperparameters that decide which state there is."""
        if regrouped := ids_of(optimizer) != self.groups.ids:
            self.settle()  # an update on the CPU may still be reading the groups
            self.groups.follow(optimizer)
        if self.groups.ask_for_others(optimizer, states, regrouped=regrouped):
            self.rebuild(optimizer, states)
        made = {param for param, shard in self.plan.shards.items() if not shard.existed and states.get(param)}
        # A step hook, as torchtitan's, may have created the first state outside of its homes, in other dtypes.
        new = [(shard, states.get(param)) for param, shard in self.plan.shards.items() if param in made]
        others = [one for one in new if one[0].group >= 0 and is_exchanged(*one)]
        if any(in_dtypes_of(shard.layout, state).values != shard.layout.values for shard, state in others):
            self.rebuild(optimizer, states, as_made=made)
        for param in made:
            self.plan.shards[param].existed = True

    # May this be done now? --------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Return why the state is half updated, by the device or by the CPU; empty if it is whole."""
        return self._failure or str((self.host is not None and self.host.error) or "")

    @failure.setter
    def failure(self, failure: str) -> None:
        self._failure = failure
        if self.host is not None and not failure:
            self.host.error = None

    @_looking
    def check_whole(self, what: str) -> None:
        """Refuse to return or to use state that an earlier step has half updated."""
        if self.failure:
            raise RuntimeError(
                f"{what} refused: {self.failure}. Load a checkpoint of this optimizer (load_state_dict "
                "or get_optimizer_state_dict(for_load=True), which work now) and then of the model before going on."
            ) from (None if self.host is None else self.host.error)

    @_looking
    def check_usable(self, what: str, *, mid_step: bool = False) -> None:
        """Refuse half updated state; ``mid_step``: allow what the backward has updated ahead of ``step()``."""
        self.check_whole(what)
        if mid_step:
            return
        self.speculation.roll_back()
        if self.core.done:
            raise RuntimeError(
                f"{what} refused: the backward has updated a part of it (OffloadPolicy(overlap='iteration')). "
                "Call step() first."
            )

    @_alone
    def skip_step(self) -> None:
        """Prepare for the clearing of gradients; refuse if the backward has updated without a ``step()``."""
        self.speculation.skip()
        self.core.reductions.held.clear()
        if self.core.done:
            self.refuse("zero_grad()")

    @_alone
    def refuse(self, what: str, problem: str = "") -> NoReturn:
        """Refuse an action ``what`` that must not follow an update in the backward: the state is half updated now."""
        self.speculation.roll_back()
        self.failure = _REFUSALS[what].format(", with OffloadPolicy(overlap='iteration')", problem)
        self.core.abandon()
        self.speculation.forget()
        raise RuntimeError(f"{self.failure}.")

    # By hand ----------------------------------------------------------------------------------------------------------

    @_looking
    def offload(self, states: StateStore) -> None:
        """Begin to store state that is newer in its place than at home, and copy users' tensors into their homes."""
        self.speculation.roll_back()
        if not (self.core.done or self.core.away):
            self.adopt_exchanged(states)
            self.core.cache.flush()
            self.core.away = True

    @_alone
    def release(self) -> None:
        """Free the device memory, in the order of the current stream; the host does not wait."""
        if self.core.away:
            self.core.wait_updated()
            self.core.cache.release()

    @_alone
    def reload(self, states: StateStore) -> None:
        """Allow loads again, and begin to load the items that are used next."""
        if self.core.away:
            self.adopt_exchanged(states)
            self.core.away = False
        self.core.prefetch()

    # The parameters and their state -----------------------------------------------------------------------------------

    @_alone
    def add(self, optimizer: Optimizer, params: Iterable[Tensor], states: StateStore) -> None:
        """Take over the state of ``params``: make homes, and move existing state into them.

        Raises:
            MemoryError: host memory does not suffice; nothing has changed.
            ValueError: the optimizer cannot be offloaded with these parameters.
        """
        params = list(params)
        if not params:
            return
        self.check_usable("taking over more parameters")
        self.groups.keys += self.groups.keys_of(optimizer)[len(self.groups.keys) :]
        self.groups.ids = []  # have the groups followed again
        for param in params:
            state = states.get(param)
            for name in state.keys() - self.conventions.without_dispensable(param, state).keys():
                del state[name]
        self.settle()
        self._is_taken = False
        self.plan.add(optimizer, params, states, self.names)
        self._take_plan()
        adopt((self.plan.shards[param], states.get(param)) for param in params)
        for param in params:
            self.plan.shards[param].existed = bool(states.get(param))
        self.note_made(states)

    @_alone
    def rebuild(self, optimizer: Optimizer, states: StateStore, as_made: Set[Tensor] = frozenset()) -> None:
        """Plan anew, for state whose layout changed. Old and new homes both exist until this returns.

        Args:
            optimizer: the offloaded optimizer.
            states: all of its state.
            as_made: parameters whose state keeps its own layout, rather than one that is learnt.
        """
        self.settle()
        if self.host is not None:
            self.host.counters_as_made(self.plan.host_shards(), states)
        dead = [param for param, shard in self.plan.shards.items() if is_dead(shard, states)]
        kept = [param for param in self.plan.shards if self.plan.shards[param].group >= 0]
        old = {param: dict(states.get(param)) for param in kept}
        homes = {param: self.plan.shards[param].home for param in kept}
        exposed = {param for one in self.core.buckets if one.state.home.exposed_at is not None for param in one.params}
        for param in dead:
            self.names.pop(param, None)
        self.clear()
        for param in old.keys() - as_made:
            states.get(param).clear()  # so that ``Plan.add`` learns the layout under the new hyperparameters
        try:
            self.add(optimizer, old, states)
        finally:
            for param, state in old.items():
                if state and param not in as_made:
                    states.of(param).update(state)
        adopt((self.plan.shards[param], states.get(param)) for param in old)
        for param in exposed & homes.keys():
            self.plan.shards[param].carry_over(homes[param], old[param])
        for bucket in self.core.buckets:
            if not exposed.isdisjoint(bucket.params):
                bucket.state.home.expose(self.core.steps)

    @_alone
    def install(self, optimizer: Optimizer, states: StateStore, loaded: Entries, before: Entries) -> None:
        """Make ``loaded`` the state in place of ``before``; ``states`` is empty, and the param groups have been loaded.

        Discard a step that the backward has begun. Tensors of ``loaded`` have the form of a state dict. Convert them to
        the form that the optimizer keeps, one parameter at a time, which limits the device memory that this takes.
        """
        self.speculation.roll_back()
        ended = {param for bucket in self.core.done for param in bucket.params}
        self.core.abandon()
        self.speculation.forget()
        self.speculation.ahead.ended = ended
        self.settle()
        self._follow_groups(optimizer, states)
        self.add(optimizer, [param for param in loaded if param not in self.plan.shards], states)
        self.lending.wait()
        self.leave_to_holders(((self.plan.shards[param], saved) for param, saved in loaded.items()), before)
        self.failure = "a load of optimizer state did not come to its end, and some of it may be loaded"
        if self.conventions.keeps_raw_state:
            for param, saved in loaded.items():
                states.of(param).update(saved)
            adopt((self.plan.shards[param], states.of(param)) for param in loaded)
        else:
            loaded = apart(loaded, self.plan.shards)
        for param, saved in loaded.items():
            shard, state = self.plan.shards[param], states.of(param)
            shard.existed = True
            if not self.conventions.keeps_raw_state:
                state.update(self.conventions.as_kept(optimizer, param, saved, shard.homes))
                adopt([(shard, state)])
            home = shard.homes.get(MASTER)
            if home is not None and state.get(MASTER) is None and can_rebuild(local_shard(home).dtype):
                weights = over_local(home, local_shard(param).detach().float())
                state.update(self.conventions.as_kept(optimizer, param, {MASTER: weights}, shard.homes))
                adopt([(shard, state)])
        self.failure = ""

    @_alone
    def reserved_state(self, optimizer: Optimizer, states: StateStore) -> dict[Tensor, UserState]:
        """Return targets of a load for parameters without state: their homes, and counters at zero.

        The targets are not in ``states``, and the contents of the homes mean nothing. First give a home to parameters
        that were frozen when the optimizer was offloaded, and are trained now.
        """
        self._follow_groups(optimizer, states)
        self.add(optimizer, [param for param in self.groups.unplanned if is_trained(param)], states)
        self._follow_groups(optimizer, states)
        if self.layouts.capabilities.moves_whole and not any(states.get(param) for param in self.plan.shards):
            raise ValueError(
                f"for_load=True: {self.cls.__name__} has no state yet, and which it keeps is not known before its "
                "first step, so there is nothing to load into. Call get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict once, which makes the state by a step that changes nothing; "
                "or load with load_state_dict()."
            )
        return {
            param: {name: zero_like(example) for name, example in shard.layout.scalars.items()} | shard.homes
            for param, shard in self.plan.shards.items()
            if shard.group >= 0 and not states.get(param)
        }

    @_alone
    def return_to_device(self, states: StateStore) -> None:
        """Replace every home in ``states`` by a tensor on the device of the type that the optimizer made.

        Then move parameters back to the device.
        """
        self.settle()
        self.speculation.forget()
        self.core.cache.release()
        self.lending.wait()
        # Take over tensors that the user has put into the state since the last step.
        adopt((shard, states.get(param)) for param, shard in self.plan.shards.items())
        for param, shard in self.plan.shards.items():
            state = states.get(param)
            for name, home in shard.homes.items():
                if state.get(name) is home:  # or None: SGD's momentum that the user has reset
                    state[name] = shard.on_device(name, self.device)
        self._make_zeroed_gradients(self.plan.shards)
        for param in filter(is_freed, self.plan.shards):
            param.grad = None  # fully_shard would add to the spent gradient
        if self.host is not None:
            self.host.counters_as_made(self.plan.host_shards(), states)
        self.weights.return_to_device(self.device)
        self.plan.of_parameters = None

    @_alone
    def clear(self) -> None:
        """Drop all homes, after the last store."""
        self.settle()
        self.groups.ids = []  # first: after an interrupt, the next step follows the groups, and adds what is missing
        self.plan.clear()
        self._take_plan()

    def _make_zeroed_gradients(self, params: Iterable[Tensor]) -> bool:
        """Materialize gradients that were zeroed after they had been freed; return whether there were any."""
        zeroed = list(filter(is_zeroed, params)) if self.policy.parameters else []
        for param in zeroed:
            param.grad = over_local(param, torch.zeros_like(local_shard(param), device=self.device))
        return bool(zeroed)

    # Reads by the user ------------------------------------------------------------------------------------------------

    def between_steps(self) -> AbstractContextManager[None]:
        """Hold the lock in the block; a thread that does not train first waits for the end of the step under way.

        Raises:
            RuntimeError: the step does not end; or this thread writes a checkpoint, and might wait for its own end.
        """
        if self.core.is_foreign and self.lending.is_read_here():
            raise RuntimeError(
                "the thread that writes an asynchronous save looks at the optimizer or its parameters, or one within a "
                "loop over weights(model), and what it looks at may wait for the end of that save or loop. It has all "
                "of them in the state dict that it was given, or gets them in the loop."
            )
        return self.core.between_steps()

    @_looking
    def wait_home(self, param: Tensor) -> None:
        """Block the host until the home of this parameter's state is up to date."""
        shard = self.plan.shards.get(param)
        self._wait([] if shard is None else [self.plan.buckets[number].state for number in shard.buckets])

    @_looking
    def wait_parameter_home(self, param: Tensor) -> None:
        """Block the host until the home of a streamed parameter is up to date."""
        self._wait([self.weights.items[self.weights.parts[param].number]])

    @_looking
    def wait_all_home(self, *, may_write: bool = True) -> None:
        """Block the host until every home is up to date."""
        state = (bucket.state for bucket in self.plan.buckets)
        self._wait([*state, *self.weights.items.values()], may_write=may_write)

    def _wait(self, items: Sequence[Item], *, may_write: bool = True) -> None:
        self.speculation.roll_back()
        had_failed = bool(self.failure)
        self.core.wait_home(items, may_write=may_write)
        if not had_failed:
            self.check_whole("a look at the state")  # an update on the CPU may have failed during the wait

    @_looking
    def wait_updated(self) -> None:
        """Roll back a speculative step; make the current stream wait for all updates of parameters and counters."""
        self.speculation.roll_back()
        self.core.wait_updated(lets_go=not self.core.is_foreign)

    def synchronize(self) -> None:
        """Block the host until every transfer and every update has finished."""
        self.wait_updated()
        self.wait_all_home(may_write=False)


@contextmanager
def _look_at_parameter(engine: "weakref.ref[Engine]", param: Tensor) -> Iterator[None]:
    found = engine()
    with nullcontext() if found is None else found.between_steps():
        if found is not None:
            found.wait_parameter_home(param)
        yield


_DECOUPLED = (
    "its gradient is in param.decoupled_grad, and this optimizer reads param.grad. Use Transformer Engine's "
    "FusedAdam(use_decoupled_grad=True), or leave Megatron's use_precision_aware_optimizer off"
)

_OTHER_LAYOUT = (
    "it was contiguous when its state was divided into buckets, and now has strides {}; attach again, or give it the "
    "layout that it had"
)

_REFUSALS = {
    "second backward": "a second backward before step(){}, or a second pass in it (as of a loss through weights it "
    "does not train): parameters have been updated with the gradients of the first one. The number of backwards before "
    "each step must not change (it was learnt in the first steps; one is expected where not all gradients fit on the "
    "device); use overlap='forward', or one step for each backward",
    "recomputation": "activation checkpointing of a block that runs twice before one backward{}: it is computed again "
    "with parameters that have been updated since. Use overlap='forward', use_reentrant=False, or one backward for "
    "each forward",
    "zero_grad()": "zero_grad() before step(){}: parameters have been updated in the backward, and a step cannot be "
    "skipped any more. A loop that skips steps, or clears the gradients that another loss has left (GANs), has to use "
    "overlap='forward'",
    "written gradients": "this optimizer has begun to write the gradients that it is given, so that an update in the "
    "backward{} cannot be repeated after fsdp_offload.clip_grad_norm_. Use overlap='forward'",
    "step()": "step(){}: parameters have been updated in the backward, and {}. Load a checkpoint. A loop that does so "
    "has to do it from the first step on, or use overlap='forward'",
}
"""Reasons for refusals after an update in the backward; ``format`` inserts the policy and the problem."""


def engine_of(optimizer: object) -> Engine | None:
    attachment = getattr(optimizer, "__dict__", {}).get(ENGINE_ATTRIBUTE)
    engine: Engine | None = None if attachment is None else attachment.engine
    return engine


def states_of(optimizer: Optimizer) -> OffloadedState:
    """Return ``optimizer.state``; adopt another mapping that the user has put there."""
    engine = engine_of(optimizer)
    assert engine is not None, "it is offloaded"
    if not isinstance(optimizer.state, OffloadedState):
        optimizer.state = OffloadedState(engine, optimizer.state)
    if engine.lending.entries() is not optimizer.state:  # the user has put an earlier mapping back
        engine.lending.entries = weakref.ref(optimizer.state)
    return optimizer.state


def find_offloaded(optimizer: object) -> Optimizer | None:
    """Return the offloaded optimizer that ``optimizer`` is or wraps; ``None`` if there is none."""
    target, seen = optimizer, set[int]()
    while target is not None and id(target) not in seen:  # two wrappers may hold each other
        if engine_of(target) is not None:
            return target if isinstance(target, Optimizer) else None
        seen.add(id(target))
        target = inside(target)
    return None


def inside(wrapper: object) -> Optimizer | None:
    """Return the optimizer that ``wrapper`` holds under one of the usual names; ``None`` without one."""
    attributes = getattr(wrapper, "__dict__", {})
    held = (attributes.get(name) for name in ("optimizer", "_optimizer"))
    return next((one for one in held if isinstance(one, Optimizer) and one is not wrapper), None)
