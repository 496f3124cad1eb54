"""The most device memory that an iteration takes. The first iterations may take more than all that come after them.

::

    iteration 1:  forward, loss ──▶ the first gradients: the peak before them
    iteration 2:  backward, which updates nothing ──▶ what is allocated at its end, all gradients included
    from then on: a backward frees gradients behind their updates, where parameters live on the host
"""

from ..engine.engine import Engine
from .clock import Clock


class Peak:
    """What the allocator counts around gradients, of one model.

    Attributes:
        gradients_fit: where activations were, once these are gone; after the second iteration. Then updates may wait
            for others. Elsewhere each update frees gradients: those of a group lie in one tensor.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.gradients_fit = True
        self._clock = clock
        self._at_attach_bytes = engine.allocated_bytes().peak
        self._before_gradients_bytes = 0
        self._with_gradients_bytes = 0

    def backward_begins(self, engine: Engine) -> None:
        """Note what is there with all that the loss came from: the peak tells nothing if it was before attaching."""
        if not self._clock.steps and not self._with_gradients_bytes:
            self._before_gradients_bytes = engine.allocated_bytes().now

    def reduced(self, engine: Engine) -> None:
        """The gradients of a group have been reduced."""
        if self._clock.steps < 2:
            now_bytes = engine.allocated_bytes().now
            if not self._with_gradients_bytes:
                seen_bytes = max(self._before_gradients_bytes, now_bytes)
                self._before_gradients_bytes = self._since_attach(engine, seen_bytes)
            self._with_gradients_bytes = now_bytes

    def highest_bytes(self, engine: Engine, seen_bytes: int) -> int:
        """Compute what an iteration takes at its highest point.

        Args:
            engine: whose staging and residents do not count.
            seen_bytes: the most that was seen at some points of an iteration; between them it may have been more.
        """
        if engine.frees_gradients and not self._clock.adds_up:
            return max(seen_bytes, self._before_gradients_bytes)
        return self._since_attach(engine, seen_bytes)

    def find_room(self, gradient_bytes: int, engine: Engine) -> None:
        """Note whether all gradients may be there at the end of a backward, and as much again for transfers."""
        fit = self._with_gradients_bytes + gradient_bytes <= self._before_gradients_bytes
        self.gradients_fit = not engine.frees_gradients or (fit and not engine.frees_all_gradients)

    def _since_attach(self, engine: Engine, seen_bytes: int) -> int:
        peak_bytes = engine.allocated_bytes().peak
        # What was there before attaching held state that is offloaded now.
        return peak_bytes if peak_bytes > self._at_attach_bytes else seen_bytes
