"""Updates in the backward that are guesses: gradients stay as they are until ``step()``, or are multiplied by 1.

::

    clip_grad_norm_() is called ──▶ host memory for the way back ──▶ in each backward, while few are taken back:
        old parameters ──▶ host      updates; state and parameters that stream ──▶ spare homes; counters: copies
                                                     │
        factor 1, nothing else was touched ──▶ commit: spare homes become the homes, counters are written
        anything else                      ──▶ take back: places are forgotten, and step() updates as ever
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..core.buckets import Bucket
from ..core.loop import Core
from ..core.way_back import WayBack
from ..device.lanes import HostFlag
from ..fsdp.gradients import USED_UP, is_spent, is_watched, unwatch, watch
from ..optimizers import Capabilities
from ..state.store import OwnCounters, StateStore
from .homes import Plan
from .old_parameters import OldParameters
from .updates import BucketUpdates

logger = logging.getLogger(__name__)

REMEMBERED, STOPS_ABOVE, GOES_ON_BELOW = 20, 1 / 5, 1 / 10
"""Stop guessing above 20 % taken-back steps, resume at 10 %, over the last 20 steps."""

Version = tuple[int, int]
Scale = Callable[[Sequence[Tensor]], None]


class Guesses:
    """Decides when the updates of one optimizer are guesses, and watches what makes them wrong.

    Attributes:
        announced: the loop clips with ``clip_grad_norm_`` of this package.
        unavailable: why updates wait for ``step()``; empty if they need not.
        blocked: this step has been taken back: its updates wait for ``step()``.
        committed, taken_back: steps.
        used: by parameter, the gradient that an update of this step has used or would have; its version, and that of
            the parameter then.
    """

    def __init__(
        self,
        core: Core,
        plan: Plan,
        updates: BucketUpdates,
        capabilities: Capabilities,
        device: torch.device,
        pin: bool,
    ) -> None:
        self._core, self._plan, self._updates = core, plan, updates
        self._old = OldParameters(plan, device, pin=pin)
        self.announced = self.blocked = False
        self.committed = self.taken_back = 0
        self.unavailable = ""
        if not (capabilities.elementwise and capabilities.known):
            self.unavailable = "this optimizer does not work element by element, or is not in the tested table"
        self.way_back = WayBack(core, self._old.pairs_of)
        self.guard, self.updated = self.way_back.guard, self.way_back.updated
        self.used: dict[Tensor, tuple[Tensor, Version, Version]] = {}
        self._own: OwnCounters | None = None
        self._without_state: set[Tensor] = set()
        self._is_on = True
        self._history: deque[bool] = deque(maxlen=REMEMBERED)
        self._changed = self._learns_later = False
        self._flags = HostFlag(device), HostFlag(device)  # of this step, and of the one before
        self._all_one: Tensor | None = None  # the factors of this step
        self._put_off: list[tuple[list[Tensor], Scale]] = []
        self._watched: list[TensorWeakRef] = []  # gradients
        self._written: list[TensorWeakRef] = []  # parameters
        self._shared = WeakTensorKeyDictionary()  # gradients of which somebody may have a view, from an earlier step

    @property
    def made(self) -> bool:
        """Return whether this step has guesses that are neither committed nor taken back."""
        return self._core.guess is not None and self._core.begun

    @property
    def is_ready(self) -> bool:
        """Return whether updates in the backward are guesses."""
        ready = self.announced and self._is_on and not self.unavailable and not self._core.frees_all
        return ready and bool(self._old.buckets) and self._old.are_of_this_plan

    @property
    def sentence(self) -> str:
        """For the report; empty where the loop does not clip with our function."""
        if not self.announced:
            return ""
        begun = 'overlap="iteration": the loop clips; '
        if self.unavailable:
            return f"{begun}updates wait for step(), as {self.unavailable}."
        taken = f"{self.taken_back} of {self.committed + self.taken_back} such steps were taken back"
        changed = f"in {sum(self._history)} of the last {len(self._history)} steps gradients were changed"
        if not self._is_on:
            return f"{begun}{changed}, so that updates wait for step() until few are. {taken}."
        return f"{begun}updates run ahead of it. {taken}; {changed}."

    # A step -----------------------------------------------------------------------------------------------------------

    def may_begin(self) -> bool:
        """Return whether the updates of the backward that runs are guesses."""
        if not self.is_ready or self.blocked or self._updates.writes_gradients:
            return False
        # A checkpoint's writer may still be reading the spare homes: then there are no guesses in this step.
        return not any(one.spare is not None and one.spare.is_read() for one in self._plan.housed())

    def choose(self, optimizer: Optimizer, states: StateStore) -> None:
        """Ahead of an update in the backward: choose whether the updates of this step are guesses."""
        # Updates with Nesterov's momentum write gradients, where they are those of torch._foreach_*.
        is_guess = self.may_begin() and not any(group.get("nesterov") for group in optimizer.param_groups)
        self._core.guess = self if is_guess else None
        shards = self._plan.shards.items() if is_guess else ()
        self._without_state = {param for param, shard in shards if shard.homes and not states.get(param)}

    def begin(self, states: StateStore) -> None:
        """A step begins with guesses: updates see copies of what they may write in ``states``."""
        self._own = OwnCounters(states, self._plan.shards)
        self._updates.begin_guesses(self._own)

    def takes(self, bucket: Bucket) -> bool:
        """Return whether the update of ``bucket`` may be a guess now; if not, it waits for ``step()``."""
        if self.blocked or bucket.number not in self._old.buckets:
            return False
        if any(item.nbytes and item.is_held() for item in bucket.weights):
            return False
        shards = [self._plan.shards[param] for param in bucket.params]
        return not any(
            (grad is None and len(shard.buckets) > 1)  # its bytes would stay behind when its neighbours move
            or (
                grad is not None
                and (grad in self._shared or not is_watched(grad) or shard.param in self._without_state)
            )
            for shard in shards
            for grad in [shard.param.grad]
        )

    def keep_ahead(self, number: int) -> None:
        """A forward uses the parameters of a group: store them now if it is the last forward before its updates."""
        core = self._core
        if core.begun or self.blocked or not core.reductions.next_is_final(number) or not self.is_ready:
            return
        for bucket in core.buckets_of(number):
            if bucket.number in self._old.buckets:
                self.way_back.keep(bucket)

    def settle(self) -> None:
        """``step()`` is called: commit the guesses, or take them back. The host waits only for the factor."""
        if not self.made:
            return
        if self._all_one is not None and not self._flags[0].get():
            self.take_back()
            return
        core, own = self._core, self._own
        assert own is not None
        lane = core.lanes.update
        lane.wait(core.lanes.compute.mark())  # R1: the user may still be reading counters there
        lane.run(own.commit)
        core.updated = lane.mark()
        self._updates.commit_guesses(own.states)
        self.committed += 1
        self._put_off, self._own = [], None
        self.way_back.end()

    def take_back(self) -> None:
        """Undo what this step has updated: parameters, state and counters are those from before the backward."""
        if not self.made:
            return
        self.blocked = self._changed = True
        self.taken_back += 1
        self.way_back.roll_back()
        self._updates.drop_guesses()
        self._own = None
        self.used = {}  # they are still watched: a view of a gradient is noticed
        _unwatch(self._written)
        self._scale_now()

    def step_ended(self) -> None:
        """``step()`` has issued everything, or gradients were cleared instead: decide about the next one."""
        if self._learns_later:
            self._history.append(not self._flags[1].get())
        self._learns_later = False
        if self._changed or self._all_one is None:
            self._history.append(self._changed)
        else:
            self._flags, self._learns_later = self._flags[::-1], True
        self._changed = self.blocked = False
        self._all_one, self._put_off = None, []
        self.way_back.end()
        if not self.announced or self.unavailable:
            return
        share, was_on = sum(self._history) / max(1, len(self._history)), self._is_on
        self._is_on = share <= (STOPS_ABOVE if was_on else GOES_ON_BELOW)
        if was_on != self._is_on:
            logger.info("%s", self.sentence)
        if self._is_on and not self._old.are_of_this_plan and not self._core.frees_all:
            self.unavailable = self._old.take()
            if self.unavailable:
                logger.warning("%s", self.sentence)

    def skip(self) -> None:
        """Gradients are about to be cleared; if there was a backward, this ends its step."""
        self.take_back()
        if self.blocked or self._all_one is not None:
            self.unwatch()
            self.step_ended()

    # Clipping ---------------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """``clip_grad_norm_`` is called.

        Raises:
            RuntimeError: the backward has updated with gradients that may be clipped, and that cannot be undone.
        """
        core = self._core
        if core.mode.begin != "final":
            return
        if (core.done and not self.made) or any(map(is_spent, self._plan.shards)):
            raise RuntimeError(USED_UP)
        self.announced, core.frees_gradients = True, False
        self._decide_now()

    def put_off(self, is_one: Tensor, scale: Scale) -> set[int]:
        """Note whether a factor is 1. Returns ids of gradients that updates have used: only take-back scales these."""
        self._all_one = is_one if self._all_one is None else self._all_one & is_one
        self._flags[0].put(self._all_one)
        if not self.made:
            return set()
        used = [grad for grad, _, _ in self.used.values()]
        self._put_off.append((used, scale))
        return {id(grad) for grad in used}

    def _decide_now(self) -> None:
        """Somebody looks at gradients whose scaling was put off."""
        if self._put_off and self.made and not self._flags[0].get():
            self.take_back()
        self._put_off = []

    def _scale_now(self) -> None:
        put_off, self._put_off = self._put_off, []
        for grads, scale in put_off:
            scale(grads)

    # What is done with gradients and parameters (:class:`Watcher`) --------------------------------------------------

    def watch(self, gradients: Iterable[Tensor], written: Iterable[Tensor] = ()) -> None:
        """Watch gradients that updates may use, and parameters that they have ``written``."""
        for tensors, references in ((gradients, self._watched), (written, self._written)):
            for tensor in tensors:
                if not is_watched(tensor):
                    watch(tensor, self)
                    references.append(TensorWeakRef(tensor))

    def unwatch(self) -> None:
        """Watch nothing any more."""
        _unwatch(self._watched)
        _unwatch(self._written)

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`: parameters are what they were before, and gradients what clipping has left."""
        if any(tensor.requires_grad for tensor in tensors):
            self.take_back()
        else:
            self._decide_now()

    def writes(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`."""
        self.take_back()
        self.blocked = self._changed = True

    def shares(self, tensors: Sequence[Tensor]) -> None:
        """As :class:`Watcher`: what becomes of that memory is not seen any more, in this step and in later ones."""
        self._shared.update((tensor, None) for tensor in tensors)
        self.writes(tensors)


def _unwatch(references: list[TensorWeakRef]) -> None:
    for reference in references:
        if (tensor := reference()) is not None:
            unwatch(tensor)
    references.clear()
