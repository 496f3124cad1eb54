"""The last iteration: how long it took, and how long the model stood still in it for state.

::

    end of step() ──▶ the forward, with waits for new parameters ──▶ the backward begins ──▶ ... ──▶ end of step()

Marks on the compute stream: the host never waits for them in training, and they are used again and again. Reading them
waits for the device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .lanes import Lane, Mark


@dataclass(frozen=True)
class LiveIteration:
    """An iteration as the compute stream saw it, from the end of a ``step()`` to the end of the next.

    Attributes:
        ms: all of it.
        forward_ms: until the first backward began, without the time in which the stream stood still.
        stalled_ms: in which it stood still for updates or copies that it had been made to wait for.
        repeats: both of these steps updated and moved the same.
    """

    ms: float
    forward_ms: float
    stalled_ms: float
    repeats: bool


@dataclass(eq=False)
class _Marks:
    """Marks of one iteration; ``updated``: the previous step's buckets."""

    updated: tuple[object, ...]
    began: Mark
    backward: Mark | None = None
    ended: Mark | None = None
    repeats: bool = False
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)  # before and after each
    waits_in_forward: int = 0

    def all(self) -> list[Mark]:
        marks = [self.began, self.backward, self.ended, *(mark for pair in self.waits for mark in pair)]
        return [mark for mark in marks if mark is not None]


_MOST_WAITS = 1000
"""In one iteration. With more, something other than training makes the stream wait again and again."""


class IterationMarks:
    """Marks the iterations of one optimizer, from its first ended step on.

    Only whole iterations count: with a backward, and without a step that an exception has ended. Without a call of
    :meth:`step_ended` nothing is ever marked.
    """

    def __init__(self, compute: Lane) -> None:
        self._compute = compute
        self._now: _Marks | None = None
        self._last: _Marks | None = None
        self._free: list[Mark] = []
        self._in_step = False
        self._in_wait = False

    def step_begins(self) -> None:
        """Note that ``step()`` has been called."""
        if self._in_step:
            self.forget()  # an exception has ended the one before
        self._in_step = True

    def step_ended(self, updated: tuple[object, ...]) -> None:
        """Note that ``step()`` has issued everything, its waits as well.

        Args:
            updated: what it updated and moved; equal to that of another step if both did the same.
        """
        self._in_step = False
        ended, before, now = self._mark(), self._last, self._now
        self._last = None
        if now is not None:
            now.ended, now.repeats = ended, now.updated == updated
            if now.backward is not None:
                self._last = now
            else:
                self._recycle(now, kept=ended)
        if before is not None:
            self._recycle(before, kept=before.ended if now is not None else None)
        self._now = _Marks(updated, began=ended)

    def backward_begins(self) -> None:
        """Note that a backward is about to do its first work, or some of it."""
        now = self._now
        if now is not None and now.backward is None:
            now.backward, now.waits_in_forward = self._mark(), len(now.waits)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, the compute stream is made to wait: for marks, or by a host that waits."""
        if self._now is None or self._in_wait:
            yield
            return
        self._in_wait, before = True, self._mark()
        try:
            yield
        finally:
            self._in_wait, after = False, self._mark()
            if self._now is not None:
                self._now.waits.append((before, after))
                if len(self._now.waits) > _MOST_WAITS:
                    self.forget()

    def forget(self) -> None:
        """Forget the iteration in progress: it does not count."""
        if self._now is not None:
            self._recycle(self._now, kept=None if self._last is None else self._last.ended)
            self._now = None

    def last(self) -> LiveIteration | None:
        """Return the iteration that the last ``step()`` ended, if it was a whole one. Waits for the device."""
        last = self._last
        if last is None:
            return None
        assert last.backward is not None and last.ended is not None
        all_ms = _ms(last.began, last.ended)
        waits_ms = [_ms(before, after) for before, after in last.waits]
        forward_ms = _ms(last.began, last.backward) - sum(waits_ms[: last.waits_in_forward])
        return LiveIteration(all_ms, max(0.0, forward_ms), min(all_ms, sum(waits_ms)), last.repeats)

    def _mark(self) -> Mark:
        return self._compute.mark(self._free.pop() if self._free else None)

    def _recycle(self, marks: _Marks, *, kept: Mark | None) -> None:
        self._free += [mark for mark in marks.all() if mark is not kept]


def _ms(before: Mark, after: Mark) -> float:
    before.synchronize()  # each of its own: the current stream need not always have been the same
    after.synchronize()
    return max(0.0, after.elapsed_ms_since(before))
