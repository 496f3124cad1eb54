"""What others ask about the steps of one optimizer: may this be done now, and why is the state only half updated."""

from ..cpu_update.updates import HostUpdates
from .guesses import Guesses
from .loop import Core


class Steps:
    """Answer others who ask about the steps of a core."""

    def __init__(self, core: Core, guesses: Guesses, host: HostUpdates | None) -> None:
        self._core, self._guesses, self._host = core, guesses, host
        self._failure = ""

    @property
    def failure(self) -> str:
        """Why the state is only half updated, by the device or by the CPU; empty if it is whole."""
        return self._failure or (self._host.failure if self._host is not None else "")

    @failure.setter
    def failure(self, failure: str) -> None:
        self._failure = failure
        if self._host is not None and not failure:
            self._host.failure = ""

    @property
    def begun(self) -> bool:
        """Whether the backward has updated something of a step."""
        return bool(self._core.done)

    def check_whole(self, what: str) -> None:
        """Refuse to hand out, or to go on with, what an earlier step has half updated."""
        if self._host is not None:
            self._host.raise_failure()
        if self.failure:
            raise RuntimeError(
                f"{what} refused: {self.failure}. Load a checkpoint of the model and of this optimizer "
                "(load_state_dict) before going on."
            )

    def check_usable(self, what: str, *, mid_step: bool = False) -> None:
        """Refuse to go on with half updated state; with ``mid_step``, not if the backward alone has updated a part."""
        self.check_whole(what)
        if not mid_step:
            self._guesses.take_back()
        if not mid_step and self._core.done:
            raise RuntimeError(
                f"{what} refused: the backward has updated part of the state (OffloadPolicy(overlap='iteration')). "
                "Call step() first."
            )

    def skip(self) -> None:
        """Gradients are about to be cleared: refuse if the backward has updated, and no ``step()`` came."""
        self._guesses.skip()
        if self._core.done:
            self.failure = (
                "gradients were cleared instead of stepping, after the backward had updated parameters with them"
            )
            self._core.abandon()
            raise RuntimeError(
                "zero_grad() before step(), with OffloadPolicy(overlap='iteration'): parameters have been updated in "
                "the backward, and a step cannot be skipped any more. A loop that skips steps, or clears the gradients "
                "that another loss has left (GANs), has to use overlap='forward'."
            )

    def wait_for_all(self) -> None:
        """Let what follows on the current stream see all parameters and counters new."""
        self._guesses.take_back()
        self._core.wait_updated()
