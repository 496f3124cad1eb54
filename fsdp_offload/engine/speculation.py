"""Updates in the backward that stand only if nothing changes the gradients before ``step()``: clipping, above all.

::

    the loop is seen to touch gradients ──▶ memory for the way back ──▶ in each backward, while few are taken back:
        old parameters ──▶ host        updates, as if gradients were final; state ──▶ spare homes; counters: copies
                                                     │
        the factor is 1, nothing was written ──▶ commit: spare homes are the homes, counters are written
        anything else                        ──▶ take back: parameters come up again, and step() updates as ever

``clip_grad_norm_`` multiplies by 1 where the norm is within bounds, which changes no bit. What else is done with
gradients is found by watching them, so that a wrong guess costs time and nothing else. Which steps are taken back
follows from the norm, which is the same on every rank.
"""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..device.host_flag import HostFlag
from ..device.host_limits import check_host_memory
from ..optimizers.kept_state import Layouts
from ..policy import OffloadPolicy
from ..state.shard import StateShard
from ..state.store import StateStore, UserState
from ..torch_compat.dtensor import is_replicated, local_shard, version_of
from ..torch_compat.spent_gradient import SpentGradient
from ..torch_compat.watched_gradient import Multiply, bare, is_watched, unwatch, watch
from .executor import Pipeline
from .homes import Plan
from .way_back import WayBack, is_flat, parameter_nbytes

logger = logging.getLogger(__name__)

_REMEMBERED = 20
_STOPS_ABOVE = 1 / 5
_GOES_ON_BELOW = 1 / 10
"""Of the last steps that were remembered: so many with other gradients than the backward had left."""


@dataclass(eq=False)
class Used:
    """A gradient that an update has used.

    Attributes:
        grad: what ``param.grad`` was.
        grad_version: before the first update that used it.
        param_version: after the last one.
    """

    grad: Tensor
    grad_version: tuple[int, int]
    param_version: tuple[int, int]


@dataclass(eq=False)
class Speculated:
    """What one step has updated before its gradients were certain.

    Attributes:
        states: counters as they will be; the user's are as before the step.
        started: the buckets of which an update has begun to write parameters.
        used: by parameter, the gradients.
    """

    states: "OwnCounters"
    started: list[int] = field(default_factory=list)
    used: dict[Tensor, Used] = field(default_factory=dict)

    def note_used(self, shards: Iterable[StateShard]) -> None:
        """An update of these has been issued."""
        for shard in shards:
            param, grad = shard.param, shard.param.grad
            if grad is None:
                continue
            before = self.used.get(param)
            first = version_of(grad) if before is None else before.grad_version
            self.used[param] = Used(grad, first, version_of(param))


class OwnCounters:
    """The entries of ``optimizer.state`` with copies of all that is not a home: a step may write them."""

    def __init__(self, states: StateStore, plan: Plan) -> None:
        self._states = states
        self._plan = plan
        self._own: dict[Tensor, UserState] = {}

    def get(self, param: Tensor) -> UserState:
        """The state of ``param``; an empty one that is not kept if there is none."""
        if param not in self._own:
            state = self._states.get(param)
            if not state:
                return {}
            homes = self._plan.shards[param].homes
            self._own[param] = {
                name: value.clone() if isinstance(value, Tensor) and value is not homes.get(name) else value
                for name, value in state.items()
            }
        return self._own[param]

    def of(self, param: Tensor) -> UserState:
        """The state of ``param``, made if there is none."""
        return self.get(param) or self._own.setdefault(param, {})

    def move_last(self, params: Iterable[Tensor]) -> None:
        """Never called: what a step has made is put in order when it counts."""
        raise NotImplementedError

    def compare(self) -> "CounterChanges":
        """What :meth:`CounterChanges.commit` has to do, found ahead of the time when the host is waited for."""
        changes = CounterChanges()
        for param, own in self._own.items():
            state, shard = self._states.get(param), self._plan.shards[param]
            changes.gone += [(param, name) for name in state.keys() - own.keys()]
            for name, value in own.items():
                current = state.get(name)
                if name in shard.homes:
                    changes.homes += [(shard, name)] if current is None else []
                elif isinstance(value, Tensor) and isinstance(current, Tensor) and _alike(value, current):
                    changes.targets.append(current)
                    changes.sources.append(value)
                elif value is not current:
                    changes.values.append((param, name, value))
        return changes


@dataclass(eq=False)
class CounterChanges:
    """What updates have made of counters.

    Attributes:
        targets, sources: tensors that are written in place.
        values: what else is new.
        homes: names of state that an update has made, which is where it lives by now.
        gone: what there is no more.
    """

    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    values: list[tuple[Tensor, str, object]] = field(default_factory=list)
    homes: list[tuple[StateShard, str]] = field(default_factory=list)
    gone: list[tuple[Tensor, str]] = field(default_factory=list)

    def commit(self, states: StateStore) -> None:
        """Make them those of the user."""
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources)
        for param, name, value in self.values:
            states.of(param)[name] = value
        for shard, name in self.homes:
            states.of(shard.param)[name] = shard.homes[name]
        for param, name in self.gone:
            del states.of(param)[name]


@dataclass(frozen=True)
class _Scaling:
    """Gradients, what they are to be multiplied by, and how."""

    grads: list[Tensor]
    factor: Tensor | float
    multiply: Multiply


class _Parameters:
    """Watches parameters that have been updated: whoever uses one sees what it was before."""

    def __init__(self, take_back: "weakref.WeakMethod[Callable[[], None]]") -> None:
        self._take_back = take_back

    def reads(self, params: Sequence[Tensor]) -> None:
        """As :class:`Watcher`."""
        del params
        take_back = self._take_back()
        if take_back is not None:
            take_back()

    writes = shares = reads

    def scales(self, params: Sequence[Tensor], factor: Tensor | float, multiply: Multiply) -> Sequence[Tensor]:
        """As :class:`Watcher`."""
        del factor, multiply
        self.reads(params)
        return []


class Speculation:
    """Watches the gradients of one optimizer, and decides when to update before they are certain.

    Attributes:
        announced: the loop has been seen to touch gradients between the backward and ``step()``.
        unavailable: why updates have to wait for ``step()``; empty if they need not.
        blocked: something has been taken back since the last step: no more updates before the next.
        committed, taken_back: steps.
    """

    def __init__(
        self,
        plan: Plan,
        pipeline: Pipeline,
        layouts: Layouts,
        policy: OffloadPolicy,
        device: torch.device,
        *,
        pin: bool,
        take_back: Callable[[], None],
    ) -> None:
        """``take_back``, a method that is not kept alive, gives up what the step that has begun has updated."""
        self.announced = False
        self.unavailable = ""
        self.blocked = False
        self.committed = self.taken_back = 0
        self._plan = plan
        self._pipeline = pipeline
        self._policy = policy
        self._device = device
        self._pin = pin
        self._method = weakref.WeakMethod(take_back)
        if not layouts.capabilities.elementwise or not layouts.capabilities.known:
            self.unavailable = "this optimizer does not work element by element, or is not in the tested table"
        elif policy.parameters:
            self.unavailable = "there is no way back for parameters that live on the host"
        self._generation = -1  # of the plan, for which there is memory
        self._way_back: WayBack | None = None
        self._with_memory: frozenset[int] = frozenset()  # buckets of that generation
        self._is_on = False
        self._watched: list[TensorWeakRef] = []
        self._watched_params: list[TensorWeakRef] = []
        self._shared = WeakTensorKeyDictionary()  # gradients of which somebody may have a view, from an earlier step
        self._parameters = _Parameters(self._method)
        self._pending: list[_Scaling] = []  # of used gradients, put off
        self._factors: dict[int, tuple[Tensor, int, Tensor]] = {}  # by id, of this step: with its version, and a copy
        self._all_one: Tensor | None = None
        self._flags = HostFlag(device), HostFlag(device)  # of this step, and of the last one
        self._learns_later = False
        self._changed = False  # in this step, as far as the host knows
        self._history: deque[bool] = deque(maxlen=_REMEMBERED)
        self._step: Speculated | None = None

    # What a step asks ---------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether updates may run ahead of what becomes of their gradients."""
        return self._is_on and self._way_back is not None and bool(self._takeable) and not self.unavailable

    @property
    def _takeable(self) -> frozenset[int]:
        """Buckets that may be updated early; of a new generation none, until a step has ended."""
        return self._with_memory if self._generation == self._plan.generation else frozenset()

    def may_update(self, number: int) -> bool:
        """Whether the update of a bucket can be taken back. Others wait for ``step()``."""
        return number in self._takeable and not self.blocked

    def keep_ahead(self, numbers: Iterable[int]) -> None:
        """The last forward before a step uses the parameters of these buckets, and nothing is updated yet."""
        if not self.is_ready or self.blocked or (self._step is not None and self._step.started):
            return
        assert self._way_back is not None
        for number in filter(self.may_update, numbers):
            self._way_back.keep(number)

    def begin(self, states: StateStore) -> Speculated | None:
        """A step begins in the backward. ``None`` if nothing of it is to be updated there."""
        if not self.is_ready or self.blocked or self._is_read():
            return None
        assert self._way_back is not None
        self._pipeline.before_load = self._way_back.keep
        self._step = Speculated(OwnCounters(states, self._plan))
        return self._step

    def before_update(self, step: Speculated, number: int) -> None:
        """The update of a bucket is about to be issued, on the current stream."""
        assert self._way_back is not None
        self._way_back.wait(number)
        step.started.append(number)

    def after_update(self, step: Speculated, shards: Iterable[StateShard], number: int) -> None:
        """The update of a bucket with these shards has been issued."""
        assert self._way_back is not None
        self._way_back.note_updated(number)
        shards = list(shards)
        step.note_used(shards)
        for shard in shards:
            if shard.param in step.used and not is_watched(shard.param):
                watch(shard.param, self._parameters)
                self._watched_params.append(TensorWeakRef(shard.param))

    def _is_read(self) -> bool:
        """Whether somebody reads a place into which state would be stored, for an asynchronous save."""
        shards = dict.fromkeys(shard for number in self._takeable for shard in self._plan[number].covers())
        return any(shard.places[1 - shard.side].is_read() for shard in shards)

    def stores_elsewhere(self, shards: Iterable[StateShard]) -> list[StateShard]:
        """Those of ``shards`` that a step is to store into their other place."""
        return [shard for shard in shards if self._takeable.issuperset(shard.buckets)]

    def problem_of(self, step: Speculated) -> str:
        """What was done to gradients that were used; empty if nothing. Waits for what they are scaled by."""
        for param, used in step.used.items():
            if param.grad is not used.grad:
                return "a gradient has been exchanged"
            if version_of(used.grad) != used.grad_version:
                return "a gradient has been written"
        if any(isinstance(one.factor, Tensor) for one in self._pending) and not self._flags[0].get():
            return "gradients have been scaled"
        return ""

    def restore(self, step: Speculated) -> None:
        """Give parameters the values that they had before ``step``, and gradients what was put off."""
        assert self._way_back is not None
        self._way_back.restore(step.started)
        self._way_back.forget()
        self._pipeline.before_load = None
        self._step, self.blocked, self._changed = None, True, True
        self.taken_back += 1
        self.unwatch()
        with torch.no_grad():
            for scaling in self._pending:
                scaling.multiply(scaling.grads, scaling.factor)
        self._pending = []

    def commit(self, step: Speculated, changes: CounterChanges, states: StateStore) -> None:
        """What was updated counts."""
        with self._pipeline.updating():
            changes.commit(states)
        self.committed += 1
        if self._pending:
            self._all_one = None  # the host knows it
        self.forget(step)

    def forget(self, step: Speculated | None) -> None:
        """Nothing of ``step`` is to be taken back: it counts, or it has updated nothing."""
        self._pipeline.before_load = None
        if self._step is step:
            self._step, self._pending = None, []

    # The steps ----------------------------------------------------------------------------------------------------

    def watch(self, params: Iterable[Tensor]) -> None:
        """Gradients of these have been reduced."""
        for param in params:
            grad = param.grad
            known = is_watched(grad) or isinstance(grad, SpentGradient)
            if grad is not None and param in self._plan.shards and not known:
                watch(grad, self)
                self._watched.append(TensorWeakRef(grad))
                if grad in self._shared:
                    self._changed = self.blocked = True

    def unwatch(self) -> None:
        """What is done with gradients and parameters from now on is none of ours."""
        _unwatch(self._watched)
        _unwatch(self._watched_params)

    def step_begins(self, *, scaler_decides: bool) -> None:
        """``step()`` has been called; what has begun of it has been kept or taken back."""
        self.unwatch()
        self._changed = self._changed or scaler_decides
        self.announced = self.announced or scaler_decides

    def step_ended(self) -> None:
        """``step()`` has issued everything."""
        if self._way_back is not None:
            self._way_back.forget()
        if self._learns_later:
            self._learns_later = False
            self._history.append(not self._flags[1].get())
        if self._changed or self._all_one is None:
            self._history.append(self._changed)
        else:
            self._flags, self._learns_later = self._flags[::-1], True
        self._changed = self.blocked = False
        self._all_one, self._factors, self._pending = None, {}, []
        if not self.announced or self.unavailable:
            return
        self._decide()
        if self._is_on and self._generation != self._plan.generation:
            self._generation, self._with_memory = self._plan.generation, frozenset()
            self._take_memory()

    def _decide(self) -> None:
        if not self._history:
            return
        share = sum(self._history) / len(self._history)
        was_on = self._is_on
        self._is_on = share <= (_STOPS_ABOVE if was_on else _GOES_ON_BELOW)
        if was_on != self._is_on:
            logger.info("%s", self.sentence)

    @property
    def sentence(self) -> str:
        """For the report; empty where the loop leaves gradients alone."""
        if not self.announced:
            return ""
        begun = 'overlap="iteration": the loop clips or touches gradients after the backward; '
        if self.unavailable:
            return f"{begun}updates wait for step(), as {self.unavailable}."
        taken = f"{self.taken_back} of {self.committed + self.taken_back} such steps were taken back"
        changed = f"in {sum(self._history)} of the last {len(self._history)} steps gradients were changed"
        if not self._is_on:
            return f"{begun}{changed}, so that updates wait for step() until few are. {taken}."
        return f"{begun}updates run ahead of it. {taken}; {changed}."

    @property
    def kept_bytes(self) -> int:
        """What of the parameters goes down in a step, beside the state."""
        return self._way_back.nbytes if self._way_back is not None and self.is_ready else 0

    def _take_memory(self) -> None:
        """Take what it needs to take a step back, if there is as much."""
        plan = self._plan
        numbers = _takeable_buckets(plan)
        kept = self._way_back is not None and self._way_back.fits(numbers)
        needed_bytes = plan.spare_nbytes() + (0 if kept else parameter_nbytes(plan, numbers))
        self._pipeline.synchronize()
        if self._way_back is not None and not kept:
            self._way_back.free()
            self._way_back = None
        try:
            check_host_memory(needed_bytes, self._policy.host_limit_bytes, sum(one.nbytes for one in plan.regions))
            plan.take_spare_homes()
            if not kept:
                self._way_back = WayBack(plan, self._pipeline, numbers, self._device, pin=self._pin)
            self._with_memory = frozenset(numbers)
        except (MemoryError, RuntimeError) as error:
            self._way_back = None
            self.unavailable = f"to take a step back needs {needed_bytes} bytes of host memory ({error})"
            logger.warning("%s", self.sentence)

    # What is done with gradients ----------------------------------------------------------------------------------

    def reads(self, grads: Sequence[Tensor]) -> None:
        """As :class:`Watcher`."""
        self.announced = True
        looked_at = {id(grad) for grad in grads}
        if any(id(grad) in looked_at for scaling in self._pending for grad in scaling.grads):
            self._settle()

    def writes(self, grads: Sequence[Tensor]) -> None:
        """As :class:`Watcher`."""
        del grads
        self.announced = self._changed = True
        self._take_back()

    def shares(self, grads: Sequence[Tensor]) -> None:
        """As :class:`Watcher`."""
        others = (grad for reference in self._watched if (grad := reference()) is not None)
        self._shared.update((grad, None) for grad in (*grads, *others))  # what follows is not watched any more
        self.writes(grads)

    def scales(self, grads: Sequence[Tensor], factor: Tensor | float, multiply: Multiply) -> Sequence[Tensor]:
        """As :class:`Watcher`: what updates have used is multiplied only where the factor is not 1."""
        self.announced = True
        own = self._note_factor(factor)
        if own is None:
            self._changed = True
            self._take_back()
        if own is None or self._step is None:
            return []
        used = {id(one.grad) for one in self._step.used.values()}
        mine = [grad for grad in grads if id(grad) in used]
        if not all(map(_keeps_bits, mine)):
            self._take_back()
            return []
        if mine:
            self._pending.append(_Scaling(mine, own, multiply))
        return mine

    def _note_factor(self, factor: Tensor | float) -> Tensor | float | None:
        """The factor, of which the host may have yet to learn whether it is 1; ``None`` if it is not."""
        if not isinstance(factor, Tensor):
            return factor if factor == 1 else None
        if not is_replicated(factor):
            return None
        seen = self._factors.get(id(factor))
        if seen is not None and seen[0] is factor and seen[1] == factor._version:
            return seen[2]
        own = factor.detach().clone()
        self._factors[id(factor)] = factor, factor._version, own
        is_one = local_shard(own) == 1
        self._all_one = is_one if self._all_one is None else self._all_one & is_one
        self._flags[0].put(self._all_one)
        return own

    def _take_back(self) -> None:
        take_back = self._method()
        assert take_back is not None, "this is an attribute of its object"
        take_back()

    def _settle(self) -> None:
        """What was put off has to be decided now: somebody looks."""
        if self._step is not None and self.problem_of(self._step):
            self._take_back()
        else:
            self._pending = []


def _unwatch(references: list[TensorWeakRef]) -> None:
    for reference in references:
        tensor = reference()
        if tensor is not None:
            unwatch(tensor)
    references.clear()


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _keeps_bits(grad: Tensor) -> bool:
    """Whether a product with 1 has the same bits: that of a complex number may have another zero."""
    with bare([grad]):
        return grad.is_floating_point()


def _is_takeable(shard: StateShard) -> bool:
    """Whether there may be a way back for what an update of ``shard`` writes."""
    return not (shard.resident or shard.on_host or shard.layout.left_out) and is_flat(shard.param)


def _takeable_buckets(plan: Plan) -> list[int]:
    """Buckets with nothing but shards all of which is in such buckets: ranges of a parameter are updated in order."""
    left = {number for number in range(plan.bucket_count) if all(map(_is_takeable, plan[number].covers()))}
    while True:
        torn = {n for n in left if any(not left.issuperset(shard.buckets) for shard in plan[n].covers())}
        if not torn:
            return sorted(left)
        left -= torn
