"""Updates in the backward: the gradients that they used, changes that the user made since, and speculative steps.

A speculative step assumes that its gradients do not change before ``step()``, except for a factor of 1.

::

    clip_grad_norm_() is called ──▶ host memory for roll-back ──▶ in each backward, while few steps are rolled back:
        old parameters ──▶ host      updates; state and parameters that stream ──▶ spare homes; counters: copies
                                                     │
        factor 1, no other change          ──▶ commit: spare homes become the homes, counters are written
        anything else                      ──▶ roll back: places are forgotten, and step() updates as usual
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..core.buckets import Bucket
from ..core.loop import Core, WayBack
from ..device.arena import Region, aligned
from ..device.lanes import Copy, HostFlag
from ..fsdp.dtensor import has_inner_tensors, local_shard, version_of, versions_of, world_size
from ..fsdp.gradients import USED_UP, SpentGradient, is_spent, is_watched, note_freed, unwatch, watch
from ..fsdp.optim import scaler_decides
from ..state.shard import StateShard
from ..state.store import StateStore, is_exchanged
from .homes import Plan, home_of
from .step import Contents, Step

logger = logging.getLogger(__name__)

REMEMBERED, STOPS_ABOVE, GOES_ON_BELOW = 20, 1 / 5, 1 / 10
"""Stop speculating above 20 % rolled-back steps, resume at 10 %, over the last 20 steps."""

_CLEAN_STEPS = 2
"""Updates move into the backward after this many steps in which gradients did not change before ``step()``."""

Version = tuple[int, int]
Scale = Callable[[Sequence[Tensor]], None]


AnyMethod = TypeVar("AnyMethod", bound=Callable[..., Any])


def _from_any_thread(method: AnyMethod) -> AnyMethod:
    """Run ``method`` under the lock and on the training stream, so that this stream waits for a roll-back."""

    @functools.wraps(method)
    def call(self: "Speculation", *args: Any) -> Any:
        core = self._core
        with core.lock, core.stream.running() if core.is_foreign else nullcontext():
            return method(self, *args)

    return cast(AnyMethod, call)


class Ahead:
    """Records updates ahead of one ``step()``, and how the loop treats their gradients. It is dropped with that step.

    Attributes:
        way_back: undoes the updates; a forward already stores old parameters for it.
        is_speculative: the step is speculative, and rolled back if its assumption proves wrong.
        is_off: updates wait for ``step()``: earlier ones were rolled back, or new ones would be.
        is_touched: a loop that does not clip has changed gradients.
        used: by parameter, the gradient that an update in the backward has used or would use; the versions of gradient
            and parameter then.
        freed: by parameter whose gradient was freed with its update, the parameter's version then, and what took the
            gradient's place.
        without_state: parameters without state.
        all_one: bool tensor on the device: all factors of clipping are 1.
        put_off: gradients that clipping has not scaled yet, and the function that scales them.
        ended: parameters whose early update a load discarded; ``step()`` skips their used gradients.
    """

    def __init__(self, way_back: WayBack) -> None:
        self.way_back = way_back
        self.is_speculative = self.is_off = self.is_touched = False
        self.used: dict[Tensor, tuple[Tensor, Version, Version]] = {}
        self.freed: dict[Tensor, tuple[Version, Tensor]] = {}
        self.without_state: set[Tensor] = set()
        self.all_one: Tensor | None = None
        self.put_off: list[tuple[list[Tensor], Scale]] = []
        self.ended: set[Tensor] = set()


class Speculation:
    """Decides which steps of one optimizer are speculative, and watches for changes that make them wrong.

    Attributes:
        announced: the loop clips with ``clip_grad_norm_`` of this package.
        unavailable: why updates of a loop that clips wait for ``step()``; empty if they need not.
        committed, rolled_back: counts of speculative steps that were committed, and rolled back.
        old: host memory for old parameters.
        ahead: record of the updates ahead of the next ``step()``.
    """

    def __init__(self, core: Core, contents: Contents, names: Mapping[Tensor, str]) -> None:
        self._core, self._contents, self._names = core, contents, names
        capabilities = contents.layouts.capabilities
        self.old = OldParameters(contents.plan)
        self.announced = False
        self.committed = self.rolled_back = 0
        self.unavailable = ""
        if not (capabilities.elementwise and capabilities.known):
            self.unavailable = "this optimizer does not work element by element, or is not in the tested table"
        self.ahead = Ahead(WayBack(core))
        self._is_on = True
        self._history: deque[bool] = deque(maxlen=REMEMBERED)
        self._learns_later = False
        self._flags = HostFlag(core.cache.device), HostFlag(core.cache.device)  # of this step, and of the one before
        self._watched: list[TensorWeakRef] = []  # gradients
        self._written: list[Tensor] = []  # parameters
        self._shared = WeakTensorKeyDictionary()  # gradients of which the user may hold a view since an earlier step
        # -1: the loop has changed gradients, or the order of collectives counts; updates stay in step() for good
        self._clean_steps = -1 if self._keeps_order else 0

    @property
    def _keeps_order(self) -> bool:
        """Return whether no update may run in the backward, since ranks could choose other ones.

        What others hold, and whether the loop changes gradients, may differ between ranks. Collectives of updates, some
        in the backward and some in ``step()``, would pair wrongly: other values, without a word, or a hang.
        """
        communicates = self._contents.layouts.capabilities.communicates
        return self._core.mode.begin == "final" and communicates and world_size() > 1

    @property
    def made(self) -> bool:
        """Return whether a speculative step is under way, neither committed nor rolled back."""
        return self.ahead.is_speculative and self._core.updates is not None

    @property
    def step(self) -> Step | None:
        """Return the step under way."""
        return cast(Step | None, self._core.updates)

    @property
    def is_ready(self) -> bool:
        """Return whether the next updates in the backward may be speculative."""
        ready = self.announced and self._is_on and not self.unavailable and not self._core.frees_all
        return ready and bool(self.old.begins)

    @property
    def is_clean(self) -> bool:
        """Return whether the first steps have shown that the loop does not change gradients before ``step()``."""
        return self._clean_steps >= _CLEAN_STEPS

    @property
    def sentence(self) -> str:
        """Describe speculation for the report; empty if updates need no speculation."""
        if not self.announced and self._clean_steps >= 0:
            return ""
        if self._keeps_order:
            return (
                'overlap="iteration": updates of this optimizer run collectives, in one order on all ranks, so they '
                "wait for step()."
            )
        if not self.announced:
            return (
                'overlap="iteration": the loop changes gradients before step(), so all updates wait for it. To clip, '
                "call fsdp_offload.clip_grad_norm_(optimizer, max_norm) from the first step on."
            )
        begun = 'overlap="iteration": the loop clips; '
        if self.unavailable:
            return f"{begun}updates wait for step(), as {self.unavailable}."
        begins = self.committed + self.rolled_back
        taken = f"{self.rolled_back} of {begins} steps that it began were undone before step()"
        changed = f"clipping changed gradients in {sum(self._history)} of the last {len(self._history)} steps"
        if not self._is_on:
            return f"{begun}{changed}, so that updates wait for step() until it changes few. Of the backward, {taken}."
        return f"{begun}updates run in the backward. {taken}; {changed}."

    # A step -----------------------------------------------------------------------------------------------------------

    def choose(self, optimizer: Optimizer, states: StateStore) -> None:
        """Choose, ahead of an update in the backward, whether this step is speculative."""
        ahead, contents = self.ahead, self._contents
        ahead.is_speculative = (
            self.is_ready
            and not (ahead.is_off or contents.writes_gradients)
            # R4: while a checkpoint's writer reads spare homes, no update may store there.
            and not [one for one in contents.plan.housed() if (spare := one.spare) is not None and spare.is_read()]
            # With Nesterov's momentum, torch._foreach_* updates write gradients.
            and not any(group.get("nesterov") for group in optimizer.param_groups)
        )
        shards = contents.plan.shards.items() if ahead.is_speculative else ()
        ahead.without_state = {param for param, shard in shards if not states.get(param) and shard.homes}

    def takes(self, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Return those of ``buckets`` that may be updated now; the others of a speculative step wait for ``step()``."""
        if not self.ahead.is_speculative:
            return buckets
        found: list[Bucket] = []
        waiting: set[int] = set()
        for bucket in () if self.ahead.is_off else buckets:
            is_next = waiting.isdisjoint(bucket.after)  # ranges of a parameter are updated in order
            if is_next and bucket in self.old.begins and all(map(self._may_use, bucket.params)):
                bucket.old = self.old.pairs_of(bucket)
                found.append(bucket)
            else:
                waiting.add(bucket.number)
        return found

    def _may_use(self, param: Tensor) -> bool:
        if (grad := param.grad) is None:
            # Without a gradient, the shard's other buckets may not be updated, and would not follow to the spare home.
            return len(self._contents.plan.shards[param].buckets) == 1
        return grad not in self._shared and is_watched(grad, self) and param not in self.ahead.without_state

    def keep_ahead(self, number: int) -> None:
        """Store the parameters of a group that a forward uses, if that is the last forward before their update."""
        core = self._core
        is_last = core.updates is None and core.reductions.next_is_final(number)
        for bucket in core.of_group.get(number, ()) if is_last and not self.ahead.is_off and self.is_ready else ():
            if bucket in self.old.begins:
                self.watch((), self._on_device(bucket.params))
                bucket.old = self.old.pairs_of(bucket)
                self.ahead.way_back.keep(bucket)

    def before_gather(self, number: int) -> None:
        """Roll back a speculative step that has changed parameters of a group, which is about to be read."""
        if self.made and self._core.has_updated(number):
            self.roll_back()

    def settle(self) -> None:
        """Commit or roll back a speculative step when ``step()`` is called. The host waits only for the factor."""
        if not self.made:
            return
        ahead = self.ahead
        if ahead.all_one is not None and not self._flags[0].get():
            self.roll_back()
            return
        core, step = self._core, self.step
        assert step is not None and step.own is not None
        step.way_back, ahead.is_speculative = None, False  # first: after an interrupt, the step is certain
        lane = core.lanes.update
        lane.wait(core.lanes.compute.mark())  # R1: the user may still be reading counters on compute
        lane.wait(*core.updated.values())  # R3: updates in another lane may still be writing copies of counters
        lane.run(step.own.commit)
        core.updated = {lane.name: (mark := lane.mark())}
        core.lanes.update_kept.wait(mark)  # R3: updates of step() in that lane read these counters
        step.certain()
        self.committed += 1
        ahead.put_off = []

    def roll_back(self) -> None:
        """Roll back a speculative step: restore parameters, state and counters from before the backward."""
        if not self.made:
            return
        ahead = self.ahead
        ahead.is_off = True
        self.rolled_back += 1
        for bucket in (*self._core.done, *self._core.torn):
            bucket.old = self.old.pairs_of(bucket)  # the user may have given parameters other memory
        ahead.way_back.roll_back()
        ahead.is_speculative = False
        ahead.used = {}  # gradients are still watched, so that a view of one is noticed
        self._unwatch_parameters()
        put_off, ahead.put_off = ahead.put_off, []
        for grads, scale in put_off:
            scale(grads)

    def step_ended(self, scaler_decides: bool) -> None:
        """Learn from a step that has been issued. If a GradScaler decides about it, gradients count as changed."""
        ahead = self._end()
        for param in ahead.freed:
            note_freed(param)
        if ahead.used and 0 <= self._clean_steps < _CLEAN_STEPS and not self.announced:
            if ahead.is_touched or _exchanged(ahead.used) or scaler_decides:
                logger.info("gradients are changed between the backward and step(): all updates stay in step()")
                self._clean_steps = -1
            else:
                self._clean_steps += 1
        self._decide_on_next(ahead)

    def _end(self) -> Ahead:
        """Exchange ``ahead`` for a new record; return the old one. Call it first: an interrupt then leaves no part."""
        ahead, self.ahead = self.ahead, Ahead(WayBack(self._core))
        return ahead

    def _decide_on_next(self, ahead: Ahead) -> None:
        if self._learns_later:
            self._history.append(not self._flags[1].get())
        self._learns_later = False
        if ahead.is_off or ahead.all_one is None:
            self._history.append(ahead.is_off)
        else:
            self._flags, self._learns_later = self._flags[::-1], True
        if not self.announced or self.unavailable:
            return
        share, was_on = sum(self._history) / max(1, len(self._history)), self._is_on
        self._is_on = share <= (STOPS_ABOVE if was_on else GOES_ON_BELOW)
        if was_on != self._is_on:
            logger.info("%s", self.sentence)
        if self._is_on and not self.old.is_known and not self._core.frees_all:
            self.unavailable = self.old.take()
            if self.unavailable:
                logger.warning("%s", self.sentence)

    def skip(self) -> None:
        """Roll back before gradients are cleared; end ``ahead`` if updates were rolled back, or gradients clipped."""
        self.roll_back()
        if self.ahead.is_off or self.ahead.all_one is not None:
            self.unwatch()
            self._decide_on_next(self._end())

    # Clipping ---------------------------------------------------------------------------------------------------------

    @_from_any_thread
    def announce(self) -> None:
        """Note that ``clip_grad_norm_`` is called.

        Raises:
            RuntimeError: the backward has updated with gradients that may be clipped now, and cannot be rolled back.
        """
        core = self._core
        if core.mode.begin != "final":
            return
        if (core.done and not self.made) or any(map(is_spent, self._contents.plan.shards)):
            raise RuntimeError(USED_UP)
        if not self.announced:
            self.unwatch()  # gradients watched before the loop was known to clip
        self.announced, core.frees_gradients = True, False
        self._decide_now()

    @_from_any_thread
    def put_off(self, is_one: Tensor, scale: Scale) -> set[int]:
        """Note whether the factor is 1; return ids of gradients that updates used, which only a roll-back scales."""
        ahead = self.ahead
        ahead.all_one = is_one if ahead.all_one is None else ahead.all_one & is_one
        self._flags[0].put(ahead.all_one)
        if not self.made:
            return set()
        used = [grad for grad, _, _ in ahead.used.values()]
        ahead.put_off.append((used, scale))
        return {id(grad) for grad in used}

    def _decide_now(self) -> None:
        """Roll back if a factor is not 1, before gradients whose scaling was put off are read."""
        if self.ahead.put_off and self.made and not self._flags[0].get():
            self.roll_back()
        self.ahead.put_off = []

    # Gradients that updates ahead of step() have used, or would use ---------------------------------------------------

    def note(self, params: Iterable[Tensor]) -> None:
        """Watch gradients for user changes before deciding whether to update early."""
        if self.announced:
            if not (self._core.frees_all or self.unavailable):
                shards = self._contents.plan.shards
                self.watch([grad for param in params if param in shards and (grad := param.grad) is not None])
        elif self._core.mode.begin == "final" and 0 <= self._clean_steps < _CLEAN_STEPS and not self._core.frees_all:
            self.watch_used(params)

    def watch_used(self, params: Iterable[Tensor]) -> None:
        """Watch gradients with which the backward has updated ``params``."""
        used = {param: grad for param in params if (grad := param.grad) is not None}
        grads = used.values()
        self.watch(() if self.made else grads, self._on_device(params))
        self.ahead.used.update(zip(used, zip(grads, versions_of(grads), versions_of(used), strict=True), strict=True))

    def _on_device(self, params: Iterable[Tensor]) -> Iterable[Tensor]:
        streamed = self._contents.plan.streamed
        return [param for param in params if param not in streamed] if streamed else params

    def spend(self, params: Iterable[Tensor]) -> None:
        """Free gradients of ``params`` whose updates have all been issued."""
        done = {bucket.number for bucket in self._core.done}
        for param in params:
            shard = self._contents.plan.shards[param]
            if shard.group < 0:
                continue  # it has left the param groups: its gradient is not used, and keeps accumulating
            if param.grad is not None and not is_spent(param) and done.issuperset(shard.buckets):
                self.ahead.freed[param] = version_of(param), (spent := SpentGradient(param))
                param.grad = spent  # the caller keeps the gradient for the update

    def forget(self) -> None:
        """Forget which gradients updates of this step have used: ``step()`` uses all of them."""
        self.unwatch()
        self._end()

    def look(self) -> None:
        """Stop watching when ``step()`` is called, and note whether the loop has written parameters."""
        self.unwatch()
        self.ahead.is_touched |= bool(self.written())

    def written(self) -> list[Tensor]:
        """List parameters that the user has written since their update, as their versions tell."""
        ahead = self.ahead
        seen = {param: version for param, (_, _, version) in ahead.used.items()}
        seen |= {param: version for param, (version, _) in ahead.freed.items()}
        now = versions_of(seen)
        return [param for param, version in zip(seen, now, strict=True) if version != seen[param]]

    def problem(self, optimizer: Optimizer, states: StateStore, kwargs: Mapping[str, Any]) -> str:
        """Name a difference between this step and the one that the backward has begun; empty if there is none."""
        step, ahead = self.step, self.ahead
        if step is None:
            return ""
        if ahead.is_touched and (written := self.written()):
            return f"{self._names.get(written[0], 'a parameter')} has been written since then"
        exchanged = [p for p, (_, spent) in ahead.freed.items() if p.grad is not spent or not is_spent(p)]
        exchanged += _exchanged(ahead.used)
        if exchanged:
            return f"the gradient of {self._names.get(exchanged[0], 'a parameter')} has been changed since then"
        if ahead.is_touched:
            return "gradients have been changed since then"
        used = step.used_shards()
        exposed = [home for bucket in self._core.done if (home := bucket.state.home).exposed_at is not None]
        is_written = any(home.seen != home.version() for home in exposed)
        if is_written or self._are_exchanged(step, used, states) or step.are_counters_written():
            return "optimizer.state has changed since then"
        if scaler_decides(optimizer, kwargs):
            return "a GradScaler decides only now whether there is a step"
        is_same = step.divided.still_starts_from(optimizer) and self._contents.groups.are_as_before(optimizer)
        return "" if is_same else "hyperparameters have changed since then"

    def _are_exchanged(self, step: Step, used: set[StateShard], states: StateStore) -> bool:
        """Return whether the user has replaced homes by other tensors, or deleted state of shards in ``used``."""
        moved, new, done = used, set(step.without_state), {bucket.number for bucket in self._core.done}
        if self.made:  # all bytes of a bucket move to the spare home, also those of shards that get no update
            moved = {shard for bucket in self._core.done for shard in home_of(bucket).shards}
        for shard in moved:
            state = states.get(shard.param)
            is_gone = not state and shard in used and bool(shard.homes)
            if shard.on_host:
                is_gone &= not states.has(shard.param)  # the CPU fills an entry later
            elif shard.param in new:
                is_gone &= shard.buckets[-1] in done  # the update of the last range fills it
            if is_gone or is_exchanged(shard, state):
                return True
        return False

    # Accesses of gradients and parameters by the user (:class:`Watcher`) ----------------------------------------------

    def watch(self, gradients: Iterable[Tensor], written: Iterable[Tensor] = ()) -> None:
        """Watch gradients that updates may use, and parameters that updates have ``written``."""
        self._watched += map(TensorWeakRef, watch(gradients, self))
        self._written += watch(written, self)

    def unwatch(self) -> None:
        unwatch([tensor for reference in self._watched if (tensor := reference()) is not None])
        self._watched.clear()
        self._unwatch_parameters()

    def _unwatch_parameters(self) -> None:
        unwatch(self._written)
        self._written.clear()

    @_from_any_thread
    def reads(self, tensors: Sequence[Tensor]) -> None:
        """Prepare for a read by the user: roll back for a parameter; for a gradient, only if a factor is not 1."""
        if self._tell_by_version(tensors):
            return
        if any(tensor.requires_grad for tensor in tensors):
            self.roll_back()
        else:
            self._decide_now()

    @_from_any_thread
    def writes(self, tensors: Sequence[Tensor]) -> None:
        if self._tell_by_version(tensors):
            self.ahead.way_back.distrust(tensors)
        else:
            self._note_write()

    def _note_write(self) -> None:
        if not self.announced:
            self.ahead.is_touched = True
            return
        self.roll_back()
        self.ahead.is_off = True

    @_from_any_thread
    def shares(self, tensors: Sequence[Tensor]) -> None:
        """Treat a view as a write: later writes through it cannot be seen, in this step or in later ones."""
        if not self._tell_by_version(tensors):
            self._shared.update((tensor, None) for tensor in tensors if not tensor.requires_grad)
        self.writes(tensors)

    def _tell_by_version(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether versions suffice: all are parameters that no speculative update has written."""
        written = self.ahead.used if self.made else ()
        return all(tensor.requires_grad and tensor not in written for tensor in tensors)


def _exchanged(used: Mapping[Tensor, tuple[Tensor, Version, Version]]) -> list[Tensor]:
    now = versions_of([grad for grad, _, _ in used.values()])
    changed = zip(used.items(), now, strict=True)
    return [param for (param, (grad, seen, _)), version in changed if param.grad is not grad or version != seen]


class OldParameters:
    """Host memory for the parameters from before a speculative step.

    Attributes:
        begins: by bucket whose updates can be rolled back, the offset in this memory of its parameters.
        is_known: ``begins`` has been determined.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._region: Region | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all buckets: the plan has others now."""
        self.begins: dict[Bucket, int] = {}
        self.is_known = False
        self._pairs: dict[Bucket, tuple[list[int], list[Copy]]] = {}
        for bucket in self._plan.buckets:
            bucket.old = ()  # else these views would keep the memory

    def take(self) -> str:
        """Take the memory; return an empty string, or the reason why there is not enough."""
        plan = self._plan
        self.forget()

        def is_takeable(shard: StateShard) -> bool:
            fixed = local_shard(shard.param).is_contiguous() and not has_inner_tensors(shard.param)
            return not (shard.on_host or shard.layout.left_out) and (fixed or shard.param in plan.streamed)

        # All buckets of a shard can be rolled back, or none, as its ranges are updated in order.
        shards = {bucket.number: home_of(bucket).shards for bucket in plan.buckets}
        left = {number for number, its in shards.items() if all(map(is_takeable, its))}
        while torn := {n for n in left if any(not left.issuperset(shard.buckets) for shard in shards[n])}:
            left -= torn
        self.is_known = True
        begins, nbytes = {}, 0
        for bucket in (one for one in plan.buckets if one.number in left):
            begins[bucket] = nbytes
            nbytes += sum(aligned(param.numel()) for param in self._ranges(bucket))
        plan.others = [one for one in plan.others if one is not self._region]
        self._region = None
        needed_bytes = plan.missing_spare_bytes() + nbytes
        try:
            plan.check_host_memory(needed_bytes)
            region = plan.region(nbytes)
            plan.take_spare_homes()
        except (MemoryError, RuntimeError) as error:
            return f"to take a step back needs {needed_bytes} bytes of host memory ({error})"
        self._region = region
        plan.others.append(region)
        self.begins = begins
        return ""

    def _ranges(self, bucket: Bucket) -> Iterable[Tensor]:
        """Yield the flat bytes of the bucket's parameter ranges that stay on the device."""
        home = home_of(bucket)
        for piece, shard in zip(home.packed.ranges, home.shards, strict=True):
            if shard.param not in self._plan.streamed:
                flat = local_shard(shard.param).detach().view(-1)
                yield flat[piece.start : piece.stop].view(torch.uint8)

    def pairs_of(self, bucket: Bucket) -> Sequence[Copy]:
        addresses = [local_shard(param).data_ptr() for param in bucket.params]
        known, pairs = self._pairs.get(bucket, ([], []))
        if known != addresses:
            assert self._region is not None, "speculation begins when there is memory"
            pairs, at = [], self.begins[bucket]
            for param in self._ranges(bucket):
                pairs += [(self._region.bytes[at : at + param.numel()], param)] if param.numel() else []
                at += aligned(param.numel())
            self._pairs[bucket] = addresses, pairs
        return pairs
