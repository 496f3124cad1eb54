"""What an attached optimizer consists of, and how one logical step uses it.

    optimizer.state ──▶ Plan: shards, buckets, homes ──▶ which buckets have gradients now
                                                               │
              new parameters ◀── pipeline ◀── schedule ◀───────┘

The engine never refers to the optimizer (it is handed in on each call), so dropping the optimizer frees everything.
"""

import itertools
import logging
import math
import weakref
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device.bucket_times import BucketTimes, StepTimes
from ..device.iteration import IterationMarks
from ..device.lanes import EventMark, HostMark, Mark
from ..device.link import Allocated, DeviceLink, device_link
from ..optimizers import Capabilities
from ..optimizers.kept_state import LayoutKey, Layouts, layout_key
from ..optimizers.masters import MASTER
from ..optimizers.saved_form import as_kept, as_saved, drop_master, rebuild_master
from ..optimizers.shared_values import ENGINE_ATTRIBUTE
from ..planning.bound import PartsAlone
from ..planning.device_share import device_share
from ..planning.schedule import BucketStep
from ..policy import OffloadPolicy
from ..state.adopt import adopt, adopt_weights, is_exchanged
from ..state.layout import StateLayout, in_dtypes_of, is_trained
from ..state.shard import StateShard
from ..state.store import StateStore, UserState
from ..torch_compat.dtensor import local_shard, over_local
from ..torch_compat.optim import unsupported_gradient
from ..torch_compat.sharded_parameter import ShardedParameter
from ..torch_compat.spent_gradient import is_freed, is_zeroed
from .begun_step import BegunStep, StepPhase
from .cpu_updates import CpuUpdates
from .executor import Pipeline
from .homes import Plan
from .lending import Lending
from .phases import Phases
from .step import Stepping, scaler_decides
from .window import Window, group_nbytes

logger = logging.getLogger(__name__)


class Engine:
    """The offloaded state of one optimizer, and its steps.

    Attributes:
        cls: the user's optimizer class.
        steps: its logical steps.
        host: updates the CPU's share of its state; ``None`` if there is none.
        window: parameters that live on the host, for as long as they are on the device; ``None``: all stay there.
        share: device memory that its state may take.
        loads_in_backward: whether loads begin before ``step()``: hooks on a model tell when a backward does.
        pinned: whether host memory is page-locked.
        holds_back: nothing is begun before ``step()``, so that the model can be measured alone.
        frees_all_gradients: each in the backward of every step, the first one included: they would not fit together.
        alone: what has been measured so.
        tuning_of_residents, tuning_of_staging: what ``"auto"`` has chosen, and why,
            in sentences.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        capabilities: Capabilities,
        policy: OffloadPolicy,
        device: torch.device,
        names: dict[Tensor, str],
        together: Mapping[Tensor, int],
        sharded: Mapping[Tensor, ShardedParameter],
        host: CpuUpdates | None,
    ) -> None:
        self.cls = cls
        self.policy = policy
        gathered = _group_bytes(together) if policy.parameters else ()
        self.share = device_share(policy, elementwise=capabilities.elementwise, group_bytes=gathered)
        self.loads_in_backward = False
        self.holds_back = self.frees_all_gradients = False
        self.alone: PartsAlone | None = None
        self.device = device
        self.names = names
        self.layouts = Layouts(cls, capabilities, policy.master_weights)
        self.conventions = capabilities.conventions
        self.pinned = policy.pins(device.type)
        self._link: DeviceLink = device_link(device)
        for one in sharded.values():
            one.wait = partial(_wait_home, weakref.ref(self))
        self.host = host
        self._pipeline = Pipeline(
            self._link,
            serial=policy.serial,
            beside_compute=policy.runs_on_into_forward,
            host=host,
        )
        self.plan = Plan(
            *(self.layouts, policy, self.share, device),
            pin=self.pinned,
            staged=self._pipeline.buckets,
            together=together,
            sharded=sharded,
            host=host,
        )
        self.window: Window | None = None
        self.lending = Lending(self.plan, self._pipeline)
        self.steps = Stepping(
            *(cls, self.layouts, policy, names, self.plan, self._pipeline, self.lending, self._link), pin=self.pinned
        )
        self.phases = Phases(self.plan, self._pipeline, self.steps, self.lending)
        self._param_ids: list[list[int]] = []  # of each group
        self._unplanned: list[Tensor] = []  # in the groups, but without room: they never had a gradient
        self._layout_keys: list[LayoutKey] = []  # of each group, when its state was last planned
        self._peak_bytes = 0  # that iterations took, beside state that stays
        self.tuning_of_residents = self.tuning_of_staging = ""
        self._link.join()
        # Ring and arena must not go while a copy still uses them. This runs before the attributes are dropped.
        weakref.finalize(self, _let_go, self._link, self._pipeline.number).atexit = False

    def stream_parameters(self, groups: Sequence[Sequence[ShardedParameter]]) -> None:
        """Bring parameters that live on the host to the device for each gather, group by group.

        Those of this optimizer live with their state already. Frozen ones that no optimizer updates move home now; all
        others stay where they are.

        Raises:
            MemoryError: host memory does not suffice.
        """
        frozen = [one for group in groups for one in group if is_frozen(one) and one.param not in self.plan.shards]
        self.plan.add_frozen(frozen)
        here = {one.param for one in frozen} | {p for p, shard in self.plan.shards.items() if shard.sharded}
        streamed = [[one for one in group if one.param in here] for group in groups]
        self.window = Window(
            *(streamed, self.plan, self._pipeline, self._link),
            self.share.window_bytes([group_nbytes(group) for group in streamed]),
            serial=self.policy.serial,
        )
        self._pipeline.weights = self.window

    # What is offloaded -------------------------------------------------------------------------------------------

    def add(self, optimizer: Optimizer, params: Iterable[Tensor], states: StateStore) -> None:
        """Take over the state of ``params``: what exists moves home, for the rest there is room.

        Raises:
            MemoryError: host memory does not suffice; nothing has changed.
            ValueError: the optimizer cannot be offloaded with these parameters.
        """
        params = list(params)
        if not params:
            return
        if self.steps.begun is not None and self.steps.begun.has_updated:
            self.steps.check_usable("taking over more parameters")
        self.steps.drop()
        self._layout_keys += self._keys(optimizer)[len(self._layout_keys) :]
        self._param_ids = []  # look at the groups again
        for param in params:
            state = states.get(param)
            for name in state.keys() - self.conventions.without_dispensable(param, state).keys():
                del state[name]
        self._pipeline.synchronize()  # places in the ring may change, and waits know only the new ones
        self.plan.add(optimizer, params, states, self.names)
        self.steps.backward_order = []  # of other buckets
        self.phases.park_new_state(self.plan.shards[param] for param in params)
        self.steps.forget_places()
        adopt((self.plan.shards[param], states.get(param)) for param in params)
        adopt_weights(self.plan.shards[param] for param in params)
        for param in params:
            self.plan.shards[param].existed = bool(states.get(param))

    def clear(self) -> None:
        """Drop all homes, after the last store."""
        self.steps.drop()
        self._pipeline.synchronize()
        self.phases.forget()
        self.plan.clear()
        self.steps.forget_places()
        self.steps.measured_order = []  # of other buckets

    def rebuild(self, optimizer: Optimizer, states: StateStore, as_made: Set[Tensor] = frozenset()) -> None:
        """Plan anew, for state whose layout changed. Old and new homes exist side by side until this returns.

        Args:
            optimizer: whose state.
            states: all of it.
            as_made: parameters whose state has the layout that somebody gave it, rather than one that is learnt.
        """
        self._pipeline.synchronize()
        self._counters_as_made(states)
        dead = [param for param, shard in self.plan.shards.items() if self._is_dead(shard, states)]
        kept = [param for param in self.plan.shards if self.plan.shards[param].group >= 0]
        old = {param: dict(states.get(param)) for param in kept}
        for param in dead:
            self.names.pop(param, None)
        self.clear()
        for param in old.keys() - as_made:
            states.get(param).clear()  # so that the layout is learnt under the new hyperparameters
        try:
            self.add(optimizer, old, states)
        finally:
            for param, state in old.items():
                if state and param not in as_made:
                    states.of(param).update(state)
        adopt((self.plan.shards[param], states.get(param)) for param in old)

    def install(self, optimizer: Optimizer, states: StateStore, loaded: Mapping[Tensor, UserState]) -> None:
        """Make ``loaded`` the whole state; ``states`` is empty, and param groups are those loaded with it.

        Tensors of ``loaded`` are as in a state dict. What the optimizer keeps in another form is made one parameter at
        a time, so that it takes no more device memory than that.
        """
        self.steps.drop()
        self.steps.wait_for_all()
        self._pipeline.synchronize()
        self._follow_groups(optimizer, states)
        self.add(optimizer, [param for param in loaded if param not in self.plan.shards], states)
        self.lending.wait()
        if self.conventions.keeps_raw_state:
            for param, saved in loaded.items():
                states.of(param).update(saved)
            adopt((self.plan.shards[param], states.of(param)) for param in loaded)
        for param, saved in loaded.items():
            shard, state = self.plan.shards[param], states.of(param)
            if not self.conventions.keeps_raw_state:
                state.update(as_kept(self.conventions, optimizer, shard, saved))
                adopt([(shard, state)])
            if rebuild_master(self.conventions, optimizer, shard, state):
                adopt([(shard, state)])
        self.steps.failure = ""

    def as_saved(self, optimizer: Optimizer, param: Tensor, state: UserState, *, empty: bool = False) -> UserState:
        """The state of one parameter as a state dict has it: homes, or tensors in host memory made from them.

        Args:
            optimizer: whose.
            param: of which.
            state: as the optimizer keeps it.
            empty: what it holds means nothing; it is to be loaded into.
        """
        homes = self.plan.shards[param].homes if param in self.plan.shards else {}
        return as_saved(self.conventions, optimizer, param, state, homes, empty=empty)

    def reserved_state(self, optimizer: Optimizer, states: StateStore) -> dict[Tensor, UserState]:
        """What parameters without state have room for: their homes, and counters like those they will get, at zero.

        For a load to write into. Nothing of it is in ``states``, and what the homes hold means nothing. A parameter
        that was frozen when the optimizer was attached, and no longer is, gets room now.
        """
        self._follow_groups(optimizer, states)
        self.add(optimizer, [param for param in self._unplanned if is_trained(param)], states)
        self._follow_groups(optimizer, states)
        if self.layouts.capabilities.moves_whole and not any(states.get(param) for param in self.plan.shards):
            raise ValueError(
                f"for_load=True: {self.cls.__name__} has no state yet, and which it keeps is not known before its "
                "first step, so there is nothing to load into. Call get_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict once, which makes the state by a step that changes nothing; "
                "or load with load_state_dict()."
            )
        return {
            param: {name: _zero_like(example) for name, example in shard.layout.scalars.items()} | shard.homes
            for param, shard in self.plan.shards.items()
            if shard.group >= 0 and not states.get(param)
        }

    def keep_on_device(self, buckets: Collection[int], states: StateStore) -> None:
        """From now on the state of whole buckets stays on the device. Not in the middle of a step; waits for the last.

        Raises:
            torch.OutOfMemoryError: there is no room; nothing has changed.
        """
        self.steps.drop()
        self.phases.reload(states)
        self.synchronize()
        self.lending.wait()
        shards = self.plan.keep_on_device(buckets)
        self._forget_places()
        adopt((shard, states.get(shard.param)) for shard in shards)
        adopt_weights(shards)
        if self._pipeline.ring.nbytes > self.plan.ring_bytes:  # less passes through it now
            self.steps.give_back_ring()
            self.take_staging()

    def has_left_device(self) -> None:
        """Hand back the memory of what is home now: it came in blocks that activations do not fit."""
        self._link.empty_cache()

    def take_staging(self) -> None:
        """Have the staging memory before there are activations, if there is room; else the first step takes it.

        Taken out of what activations have freed, it would lie where the largest of them was, which would then need as
        much once more.
        """
        try:
            self._pipeline.take_ring(self.plan.ring)
        except torch.OutOfMemoryError:
            logger.info("no room for %.2f GB of staging yet; the first step takes it", self.plan.ring_bytes / 1e9)

    def passing_bytes(self) -> int:
        """Device memory that buckets may pass through."""
        return self.share.ring_bytes(self.policy.bucket_bytes)

    def largest_bytes(self) -> int:
        """Device memory that the largest bucket needs."""
        return max(self.plan.ring.nbytes, default=0)

    def staging_bytes(self) -> int:
        """Device memory through which buckets pass."""
        return self.plan.ring_bytes

    def resize_staging(self, passing_bytes: int) -> None:
        """Let so much staging memory come and go from the next step on. Not in the middle of one; waits for it."""
        self.steps.drop()
        self.synchronize()
        self.plan.resize_ring(passing_bytes)  # blocks of a size that fits stay where they are
        self._forget_places()

    def give_back_staging(self, keep_bytes: int) -> None:
        """Free staging memory that comes and goes, in the order of the current stream, unless it is in use.

        What has been stored first goes first, until no more than ``keep_bytes`` of it are there. What has been loaded
        ahead does not count as use where activations need its room: the backward that it was for had no gradients.
        """
        begun, passing_bytes = self.steps.begun, self._pipeline.ring.passing_bytes
        if (
            begun is not None
            and begun.phase is StepPhase.AHEAD
            and passing_bytes > keep_bytes
            and torch.is_grad_enabled()
        ):
            self.steps.drop()
        if self.steps.begun is None:
            self.steps.give_back_ring(keep_bytes)

    def let_staging_last(self) -> None:
        """Let all staging memory be there always, from the next step on. Not in the middle of one; waits for it."""
        self.steps.drop()
        self.synchronize()
        self.plan.let_ring_last()
        self._forget_places()

    def _forget_places(self) -> None:
        """Buckets pass through other places, or none: the next step will still be about those of the last one.

        So it can begin in the backward; else that would keep all gradients, which may have room no more.
        """
        last = self.steps.last
        self.steps.forget_places()
        self.steps.last = self._in_order(
            step if self._pipeline.buckets[step.bucket].copies else BucketStep(step.bucket, load=False, store=False)
            for step in last
        )

    @property
    def has_all_staging(self) -> bool:
        """Whether all of the staging memory is there."""
        return self._pipeline.ring.nbytes >= self.plan.ring_bytes

    def allocated_bytes(self) -> Allocated:
        """Device memory that is in use, without what comes and goes and without state that stays. On the CPU, all zero.

        State that comes to stay later changes nothing about what else there is room for.
        """
        now, peak = self._link.allocated_bytes()
        if self.device.type == "cpu":
            return Allocated(now, peak)
        passing_bytes = 0 if self.window is None else self.window.passing_bytes
        return Allocated(now - self.plan.resident_bytes - passing_bytes, peak - self.plan.resident_bytes)

    def note_peak(self) -> None:
        """Remember how much an iteration took at its highest point: loops may reset the statistics after it."""
        self._peak_bytes = max(self._peak_bytes, self._link.taken_bytes().peak - self.plan.resident_bytes)

    def room_bytes(self) -> int:
        """Device memory that would still be free at the highest point so far, less a reserve."""
        self.note_peak()
        return self._link.room_beside(self._peak_bytes + self.plan.resident_bytes)

    def return_to_device(self, states: StateStore) -> None:
        """Replace every home in ``states`` by a tensor on the device, of the type that the optimizer made."""
        self.steps.drop()
        self.steps.wait_for_all()
        self._pipeline.synchronize()
        # What the user has exchanged since the last step counts.
        self.lending.wait()
        adopt((shard, states.get(param)) for param, shard in self.plan.shards.items())
        for param, shard in self.plan.shards.items():
            state = states.get(param)
            for name in shard.homes.keys() & state.keys():
                state[name] = shard.on_device(name, self.device)
            if shard.master != "none":
                drop_master(shard, state)
            if shard.sharded is not None:
                shard.sharded.live_on(self.device)
        if self.window is not None:
            self.window.return_to_device()
        self._make_zeroed_gradients(self.plan.shards)
        self._counters_as_made(states)

    def _make_zeroed_gradients(self, params: Iterable[Tensor]) -> bool:
        """Where a gradient was zeroed that was gone by then, and no other has come, make zeros after all."""
        zeroed = list(filter(is_zeroed, params))
        for param in zeroed:
            param.grad = over_local(param, torch.zeros_like(local_shard(param), device=self.device))
        return bool(zeroed)

    def _counters_as_made(self, states: StateStore) -> None:
        if self.host is not None:
            self.host.counters_as_made(self.plan.host_shards(), states)

    # A step ------------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> bool:
        """Update every parameter that has a gradient, and count the step as the optimizer would.

        Returns when everything is issued: whether there was any gradient. Parameters are new in the order of the
        current stream; where it runs on into the forward, only once :meth:`Stepping.wait_for` has been called for them.
        """
        steps = self.steps
        steps.check_usable("step()", mid_step=True)
        self._make_zeroed_gradients(self.plan.shards)
        self.phases.reload(states)
        ended = self._resume(optimizer, states, kwargs)
        try:
            self._follow_groups(optimizer, states)
            if ended is None or ended.speculated is not None:  # else they have been checked
                self._check_gradients((), "Nothing has been changed.")
            updated = self._shards_with_grad(optimizer, states)
            needed = self._bucket_steps(updated, states)
        except BaseException as error:
            steps.give_up(ended, error)
            raise
        if ended is not None and ended.speculated is not None:
            # Only now: what has been found so far, the host has found while the device computed the norm.
            ended = steps.settle(ended, states)
            if ended is not None:
                steps.end(ended, states)
        steps.speculation.step_begins(scaler_decides=scaler_decides(optimizer, kwargs))
        created = [shard.param for shard in updated if not states.get(shard.param)]
        if ended is not None:
            created += [shard.param for shard in ended.without_state if states.get(shard.param)]
        if steps.begun is not None and not steps.fits(steps.begun, needed, states):
            steps.drop()
        begun = ended or steps.begun or steps.begin(optimizer, kwargs, needed, states)
        left = steps.left_of(begun, needed)
        if begun.has_updated and left:
            steps.go_on(begun, left)
        if left or not needed:
            steps.end_left(begun, states)
        try:
            self._take_results(begun, optimizer, created, states)
        except BaseException as error:  # Ctrl-C as well, while this waits for the host
            steps.note_not_taken_over(begun, error)
            raise
        self._pipeline.end_updates()
        steps.begun, steps.last = None, needed
        steps.speculation.step_ended()
        if not self.policy.runs_on_into_forward:
            steps.wait_for_all()
            if self.window is not None:
                self.wait_all_home()  # whoever reads a parameter now, in whatever way, finds the new one
        return bool(needed)

    def _resume(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> BegunStep | None:
        """The step of which the backward has updated a part, ended unless it was speculation."""
        begun, same_groups = self.steps.begun, _param_ids(optimizer) == self._param_ids
        if same_groups and begun is not None and begun.has_updated and begun.speculated is None:
            self._check_gradients(
                begun.spent,
                "step() has changed nothing, but the backward has updated others (OffloadPolicy(overlap='iteration')): "
                "put this right, and call step() again.",
            )
        ended = self.steps.resume(optimizer, states, kwargs, same_groups=same_groups)
        if ended is not None and ended.speculated is None:
            self.steps.end(ended, states)
        return ended

    def _take_results(self, begun: BegunStep, optimizer: Optimizer, created: list[Tensor], states: StateStore) -> None:
        """Put into ``optimizer`` what the updates have made beside what they wrote in place."""
        if self.host is not None:
            for param, state in self.host.take_created().items():
                homes = self.plan.shards[param].homes
                states.of(param).update({name: homes.get(name, value) for name, value in state.items()})
        if created:
            # In the order of the param groups: as without offload, and the same on every rank, whatever its buckets.
            new = set(created)
            states.move_last([param for group in optimizer.param_groups for param in group["params"] if param in new])
        with self._pipeline.updating():
            self.steps.count_rest(begun, optimizer)
            self._commit(begun, optimizer)

    # In the backward ---------------------------------------------------------------------------------------------

    def gradients_reduced(
        self, optimizer: Optimizer, states: StateStore, final: Set[Tensor], event: object, room_bytes: float
    ) -> None:
        """The backward has reduced more gradients: load, and update what may be updated.

        Args:
            optimizer: whose backward this may be.
            states: its state.
            final: all parameters whose gradients are final by now, once ``event`` has passed.
            event: of torch, or ``None``: they are there.
            room_bytes: for staging memory that comes and goes; loads go as far as that reaches.
        """
        begun = self._go_on(optimizer, states) or self._begin_early(optimizer, states)
        if begun is None:
            return
        self._pipeline.updates_after(HostMark() if event is None else EventMark(event))  # type: ignore[arg-type]
        if begun.uncleared is None:
            # This backward, or step(), will refuse these: nothing may have been updated by then.
            begun.uncleared = any(map(is_freed, self.plan.shards))

        def may_update(number: int) -> bool:
            covers = (shard for shard in self.plan[number].covers() if shard.group >= 0)
            may = not begun.uncleared and self.steps.may_update_early(begun, number)
            return may and all(shard.param in final for shard in covers)

        with torch.no_grad():
            # A group may be reduced without some of its parameters: for these no other gradient comes.
            if self._make_zeroed_gradients(param for param in self.plan.shards if param in final):
                self._pipeline.updates_after_compute()  # which writes the zeros
            self.steps.advance(begun, states, may_update, room_bytes)
        self.steps.hide_spent(begun)
        self.steps.let_go_of_spent(begun)

    def load_ahead(self, optimizer: Optimizer, states: StateStore, room_bytes: float = math.inf) -> None:
        """Begin to load for the next step before it has gradients, if it is known what that needs.

        Args:
            optimizer: whose step it will be.
            states: its state.
            room_bytes: for staging memory that comes and goes; loads go as far as that reaches.
        """
        begun = self.steps.begun or self._begin_early(optimizer, states)
        if begun is not None and not begun.has_updated:
            if self.window is not None and begun.phase is not StepPhase.AHEAD:
                # Gathers that have been issued, those of the forward, want theirs before any update does.
                self._pipeline.loads_after(self.window.mark_loaded())
            begun.enter(StepPhase.AHEAD)
            with torch.no_grad():
                self.steps.advance(begun, states, lambda number: False, room_bytes)

    def keep_ahead(self, buckets: Collection[int]) -> None:
        """The last forward before a step uses the parameters in these buckets: store them, if they may come back."""
        if not self.holds_back and (self.steps.begun is None or not self.steps.begun.has_updated):
            with torch.no_grad():
                self.steps.speculation.keep_ahead(buckets)

    @property
    def frees_gradients(self) -> bool:
        """Whether a backward frees gradients behind their updates: not where they may be changed until ``step()``."""
        return self.policy.parameters and self.policy.updates_in_backward and not self.steps.speculation.announced

    @property
    def would_keep_gradients(self) -> bool:
        """Whether the backward that begins updates nothing: it is measured, or not begun by what the last step did."""
        return self.holds_back or (self.steps.begun is None and not self.steps.is_whole(self.steps.last))

    def must_free_gradients(self) -> bool:
        """Return whether the backward that begins has to update, as its gradients do not fit on the device together.

        Not where the optimizer sees DTensors: its collectives must come in the same order on each rank, whatever room
        that has.
        """
        if self.frees_gradients and self.layouts.capabilities.elementwise:
            self.frees_all_gradients = self.frees_all_gradients or not self._gradients_fit()
            self.holds_back = self.holds_back and not self.frees_all_gradients
        return self.frees_all_gradients

    def follow_changes(self, optimizer: Optimizer, states: StateStore) -> None:
        """Follow what was edited since the last step, ahead of a backward that updates: it may divide state anew."""
        if self.steps.failure or (self.steps.begun is not None and self.steps.begun.has_updated):
            return  # step() will refuse it
        if not self._groups_as_before(optimizer):
            self.steps.drop()  # loads only
        with suppress(ValueError):  # step() says it: an error here would cost the gradients of this backward
            self._follow_groups(optimizer, states)

    def _gradients_fit(self) -> bool:
        if self.device.type == "cpu":
            return True
        trained = (shard.param for shard in self.plan.shards.values() if shard.param.requires_grad)
        room_bytes = self._link.room_beside(self._link.taken_bytes().now)
        return sum(local_shard(param).nbytes for param in trained) <= room_bytes

    def _go_on(self, optimizer: Optimizer, states: StateStore) -> BegunStep | None:
        """What has begun. Ahead of the gradients, it had begun with what may have changed since."""
        begun = self.steps.begun
        if begun is None or begun.phase is not StepPhase.AHEAD:
            return begun
        begun.enter(StepPhase.BACKWARD)
        if not self._groups_as_before(optimizer) or not self.steps.fits(begun, begun.steps, states):
            self.steps.drop()
            return None
        self.steps.start_from(begun, optimizer, {})
        self._pipeline.step_is_called()  # what has passed since the loads began was the model's time
        self._pipeline.updates_after_compute()  # where hyperparameters that are tensors are copied only now
        return begun

    def _begin_early(self, optimizer: Optimizer, states: StateStore) -> BegunStep | None:
        """Begin a step in the backward, if it will be like the last one."""
        steps = self.steps
        if self.holds_back or steps.failure or not self._groups_as_before(optimizer):
            return None
        wanted = steps.last
        if not steps.is_whole(wanted) and self.frees_all_gradients:
            # Nothing is known of the last step, or where state lives has changed since: it will be about all of them.
            trained = [s for s in self.plan.shards.values() if s.group >= 0 and s.param.requires_grad]
            wanted = self._bucket_steps(trained, states)
        if not steps.is_whole(wanted):
            return None
        self.phases.reload(states)
        self.lending.adopt_user_tensors(self.plan.shards.values(), states)  # the backward may update with it
        order = steps.in_backward_order(wanted) if steps.updates_early else wanted
        return steps.begin(optimizer, {}, order, states, early=True)

    def _groups_as_before(self, optimizer: Optimizer) -> bool:
        """Whether param groups have the parameters, and the hyperparameters that decide on state, of the last plan."""
        return _param_ids(optimizer) == self._param_ids and self._keys(optimizer) == self._layout_keys

    # By hand -----------------------------------------------------------------------------------------------------

    def reload(self, optimizer: Optimizer, states: StateStore, *, awake: bool = True) -> None:
        """Bring back what has left the device, and begin to load for the next step if it is known what that needs.

        Args:
            optimizer: whose state.
            states: all of it.
            awake: whether parameters and gradients are in memory; if not, nothing can be told of the next step.
        """
        self.phases.reload(states)
        if awake:
            self.load_ahead(optimizer, states)

    # Measuring ---------------------------------------------------------------------------------------------------

    @property
    def iteration(self) -> IterationMarks:
        """Marks the iterations of the model, for the report."""
        return self._pipeline.iteration

    def mark(self) -> Mark:
        """A mark at what the current stream has been given so far."""
        return self._pipeline.mark()

    def ms_since_begin(self, mark: Mark) -> float:
        """When the current stream passed ``mark``, since the schedule of the last step was taken up; waits for it."""
        return self._pipeline.ms_since_begin(mark)

    def wait_moved(self) -> None:
        """Let what follows on the current stream start only after everything that was issued."""
        self.steps.wait_for_all()
        self._pipeline.wait_moved()

    def bucket_times(self) -> dict[int, BucketTimes]:
        """Of the last step; waits for it."""
        return self._pipeline.bucket_times()

    def step_times(self) -> StepTimes:
        """Of the last step; waits for it."""
        return self._pipeline.last_step_times()

    # Which buckets a step needs ----------------------------------------------------------------------------------

    def _other_layout(self, param: Tensor) -> str:
        """Why the buckets of ``param`` are not its ranges any more; empty if they are."""
        shard = self.plan.shards.get(param)
        if shard is None or len(shard.buckets) < 2 or local_shard(param).is_contiguous():
            return ""
        return (
            "it was contiguous when its state was divided into buckets, and now has strides "
            f"{local_shard(param).stride()}; attach again, or give it the layout that it had"
        )

    def _shards_with_grad(self, optimizer: Optimizer, states: StateStore) -> list[StateShard]:
        """The shards to update. Takes over parameters that have a gradient for the first time, and exchanged state."""
        eager, gradient = self.conventions.state_without_gradient, self.conventions.gradient
        new = [param for param in self._unplanned if eager or gradient(param) is not None]
        if new:
            self.add(optimizer, new, states)
        shards = self.plan.shards.values()
        updated = [
            shard
            for shard in shards
            if shard.group >= 0 and (gradient(shard.param) is not None or (eager and not states.get(shard.param)))
        ]
        self.lending.adopt_user_tensors(
            shards, states
        )  # also of neighbours without a gradient, whose bytes move as well
        return updated

    def _check_gradients(self, used: Container[Tensor], outcome: str) -> None:
        """Refuse gradients that cannot be updated with; not those that the backward has ``used`` and let go."""
        for param in (*self._unplanned, *self.plan.shards):
            grad = None if param in used else self.conventions.gradient(param)
            problem = grad is not None and (unsupported_gradient(param, grad) or self._other_layout(param))
            if problem:
                name = self.names.get(param, "a parameter")
                raise RuntimeError(f"{name} cannot be updated: {problem}. {outcome}")

    def _follow_groups(self, optimizer: Optimizer, states: StateStore) -> None:
        """Follow param groups that were edited, and hyperparameters that decide which state there is."""
        ids = _param_ids(optimizer)
        regrouped = ids != self._param_ids
        if regrouped:
            self._pipeline.synchronize()  # the host may be at an update that looks at the groups
            self._param_ids = ids
            self._unplanned = []
            for shard in self.plan.shards.values():
                shard.group = -1  # no longer in any group, unless found below
            for number, group in enumerate(optimizer.param_groups):
                for param in group["params"]:
                    if param in self.plan.shards:
                        self.plan.shards[param].group = number
                    else:
                        self._unplanned.append(param)
        keys = self._keys(optimizer)
        if keys != self._layout_keys:
            live = [shard for shard in self.plan.shards.values() if shard.group >= 0]
            try:
                self._check_state_is_complete(optimizer, live, states)
                still_fit = all(self._still_fits(optimizer, shard) for shard in live)
            except ValueError as error:
                cause = error.__cause__
                why = error if cause is None else f"{type(cause).__name__}: {str(cause).strip()}."
                raise ValueError(
                    f"step() cannot run with {_changed_entries(self._layout_keys, keys, optimizer)}: {why} Correct it "
                    "and call step() again. Nothing has been changed."
                ) from None
            self._layout_keys = keys
            if not still_fit:
                self.rebuild(optimizer, states)
        elif regrouped and self._mostly_dead(states):
            self.rebuild(optimizer, states)
        made = {param for param, shard in self.plan.shards.items() if not shard.existed and states.get(param)}
        if any(self._made_otherwise(self.plan.shards[param], states) for param in made):
            self.rebuild(optimizer, states, as_made=made)
        for param in made:
            self.plan.shards[param].existed = True

    def _made_otherwise(self, shard: StateShard, states: StateStore) -> bool:
        """Whether somebody made the first state of a parameter, in a step hook as torchtitan does, in other dtypes."""
        state = states.get(shard.param)
        if shard.group < 0 or shard.master != "none" or not is_exchanged(shard, state):
            return False
        return in_dtypes_of(shard.layout, state).dtypes != shard.layout.dtypes

    def _check_state_is_complete(self, optimizer: Optimizer, shards: Sequence[StateShard], states: StateStore) -> None:
        """The optimizers of torch look for all of their state once there is some; better before a step than in it."""
        if not self.layouts.capabilities.known:
            return
        for shard in shards:
            state = states.get(shard.param)
            # A master of ours is made in the next step, whenever that is.
            needed = self._learnt(optimizer, shard).values.keys() - ({MASTER} if shard.master != "none" else set())
            missing = [name for name in needed if name not in state]
            if state and missing:
                raise RuntimeError(
                    f"The hyperparameters of param_groups[{shard.group}] now need state {missing}, which {shard.name} "
                    "does not have: it was created under other ones. Set them back, or add that state. Nothing has "
                    "been changed."
                )

    def _mostly_dead(self, states: StateStore) -> bool:
        """Whether most of the memory belongs to parameters that the user has taken out, with their state."""
        shards = self.plan.shards.values()
        dead_bytes = sum(shard.nbytes for shard in shards if self._is_dead(shard, states))
        return 2 * dead_bytes > sum(shard.nbytes for shard in shards)

    def _is_dead(self, shard: StateShard, states: StateStore) -> bool:
        return shard.group < 0 and not states.get(shard.param)

    def _keys(self, optimizer: Optimizer) -> list[LayoutKey]:
        return [layout_key(group, self.layouts.counters) for group in optimizer.param_groups]

    def _commit(self, begun: BegunStep, optimizer: Optimizer) -> None:
        shared = begun.shared
        shared.commit(optimizer)
        begun.logical.finish()
        if not shared.changed_entries <= self.layouts.counters:
            self.layouts.count(shared.changed_entries)
            self._layout_keys = self._keys(optimizer)

    def _still_fits(self, optimizer: Optimizer, shard: StateShard) -> bool:
        if len(shard.buckets) > 1 and not self.plan.may_cut(shard, optimizer.param_groups[shard.group]):
            return False  # another implementation now, which rounds pieces differently
        # State that exists keeps its place, also where the new hyperparameters would no longer create it.
        return self._learnt(optimizer, shard).values.keys() <= shard.layout.values.keys()

    def _learnt(self, optimizer: Optimizer, shard: StateShard) -> StateLayout:
        return self.layouts.learn(optimizer, shard.param, optimizer.param_groups[shard.group], shard.name)

    def _bucket_steps(self, updated: Sequence[StateShard], states: StateStore) -> tuple[BucketStep, ...]:
        active = {number for shard in updated for number in shard.buckets}
        steps = []
        for number in active:
            moves = bool(self._pipeline.buckets[number].copies)
            # Also for state of parameters without a gradient: the whole bucket is stored afterwards.
            exists = moves and (
                self._pipeline.buckets[number].has_weights
                or any(states.get(shard.param) for shard in self.plan[number].covers())
            )
            steps.append(BucketStep(number, load=exists, store=moves))
        return self._in_order(steps)

    def _in_order(self, steps: Iterable[BucketStep]) -> tuple[BucketStep, ...]:
        """As ``step()`` takes them: state that is on the device already is updated while the first loads arrive.

        Not where the optimizer sees DTensors: which buckets move differs between ranks, and its collectives must come
        in the same order.
        """
        resident_first = self.layouts.capabilities.elementwise
        return tuple(sorted(steps, key=lambda step: (resident_first and step.store, step.bucket)))

    # Looking at it -----------------------------------------------------------------------------------------------

    def wait_home(self, param: Tensor) -> None:
        """Block the host until the home of this parameter's state is up to date. Whoever asked may write there."""
        self.steps.looks += 1
        shard = self.plan.shards.get(param)
        if shard is not None:
            for number in shard.buckets:
                self._pipeline.wait_home(number)
            self.phases.wait(shard)
        self.steps.wait_counted()

    def wait_all_home(self) -> None:
        """Block the host until every home is up to date. Whoever asked may write there."""
        self.steps.looks += 1
        for number in range(len(self._pipeline.buckets)):
            self._pipeline.wait_home(number)
        for shard in self.plan.resident_shards():
            self.phases.wait(shard)
        self.steps.wait_counted()

    def synchronize(self) -> None:
        """Block the host until every transfer and every update has finished, but for those that are not certain yet."""
        self.steps.take_back()
        with self._pipeline.waiting():
            self._pipeline.synchronize()
            self.steps.wait_for_all()  # also raises what has failed


def engine_of(optimizer: object) -> Engine | None:
    """The engine of an offloaded optimizer; ``None`` for anything else."""
    attachment = getattr(optimizer, "__dict__", {}).get(ENGINE_ATTRIBUTE)
    engine: Engine | None = None if attachment is None else attachment.engine
    return engine


def find_offloaded(optimizer: object) -> Optimizer | None:
    """The offloaded optimizer that ``optimizer`` is or wraps, whoever made the wrapper; ``None`` if there is none."""
    target = optimizer
    while target is not None and engine_of(target) is None:
        target = inside(target)
    return target if isinstance(target, Optimizer) else None


def inside(wrapper: object) -> Optimizer | None:
    """The optimizer that ``wrapper`` holds under one of the usual names."""
    attributes = getattr(wrapper, "__dict__", {})
    held = (attributes.get(name) for name in ("optimizer", "_optimizer"))
    return next((optimizer for optimizer in held if isinstance(optimizer, Optimizer)), None)


def _param_ids(optimizer: Optimizer) -> list[list[int]]:
    return [[id(param) for param in group["params"]] for group in optimizer.param_groups]


def _changed_entries(before: Sequence[LayoutKey], after: Sequence[LayoutKey], optimizer: Optimizer) -> str:
    """Name the entries of param groups that differ, with their values."""
    return ", ".join(
        f"param_groups[{number}][{name!r}] = {optimizer.param_groups[number][name]!r}"
        for number, (old, new) in enumerate(itertools.zip_longest(before, after, fillvalue=()))
        for name, kind in new
        if (name, kind) not in old
    )


def _wait_home(engine: "weakref.ref[Engine]", param: Tensor) -> None:
    found = engine()
    if found is not None:
        found.wait_home(param)


def is_frozen(sharded: ShardedParameter) -> bool:
    """Whether a parameter is one that nobody trains, of a type that can live on the host."""
    return not is_trained(sharded.param) and sharded.is_plain


def _group_bytes(together: Mapping[Tensor, int]) -> list[int]:
    """Sum up what the parameters of each group take here, unpadded: before there is a window."""
    nbytes: Counter[int] = Counter()
    for param, group in together.items():
        nbytes[group] += local_shard(param).nbytes
    return list(nbytes.values())


def _zero_like(example: object) -> object:
    return torch.zeros_like(example) if isinstance(example, Tensor) else type(example)()


def _let_go(link: DeviceLink, user: int) -> None:
    link.synchronize()
    link.leave(user)
