"""Between steps everything leaves the device and comes back, as Megatron's loop (in three calls) and RL ask for."""

from ..state.store import StateStore
from .guesses import Guesses
from .homes import Plan
from .lending import Lending
from .loop import Core


class Phases:
    """Everything leaves the device, and comes back."""

    def __init__(self, core: Core, guesses: Guesses, plan: Plan, lending: Lending) -> None:
        self._core, self._guesses, self._plan, self._lending = core, guesses, plan, lending

    @property
    def away(self) -> bool:
        """Return whether everything has left the device, or is on its way."""
        return self._core.away

    def offload(self, states: StateStore) -> None:
        """Start storing state that is newer on the device than at home; tensors put there by users move home, too."""
        self._guesses.take_back()
        if not (self._core.done or self.away):
            self._lending.adopt_user_tensors(self._plan.shards.values(), states)
            self._core.cache.flush()
            self._core.away = True

    def release(self) -> None:
        """Free the device memory, in the order of the current stream; the host does not wait."""
        if self.away:
            self._core.wait_updated()
            self._core.cache.release()

    def reload(self, states: StateStore) -> None:
        """Let items come back."""
        if self.away:
            self._lending.adopt_user_tensors(self._plan.shards.values(), states)
            self._core.away = False
