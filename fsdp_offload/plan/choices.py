"""The policies that a plan compares. The plan knows the fields of ``OffloadPolicy`` from nowhere else. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..policy import MIB, OffloadPolicy
from .device_share import DeviceShare, device_share
from .training import Masters

Overlap = Literal["step", "forward", "iteration"]  # each asks more of a loop than the one before: docs/policy.md


@dataclass(frozen=True)
class Choice:
    """One way to offload."""

    overlap: Overlap  # what hides the transfers
    device_bytes: Literal["auto"] | int | None = None  # "auto" keeps on the device what cannot be hidden; of a number,
    # buckets pass through some, and state may stay in the rest; None keeps nothing
    parameters: bool = False  # whether the model's parameters live on the host too

    @property
    def name(self) -> str:
        """For tables."""
        words = [self.overlap, *(["parameters"] if self.parameters else [])]
        if isinstance(self.device_bytes, int):
            words.append(f"{self.device_bytes // MIB} MiB")
        elif self.device_bytes == "auto" and not self.parameters:
            words.append("keeping")
        return ", ".join(words)

    def fields(self, state_bytes: int) -> dict[str, Any]:
        """What differs from ``OffloadPolicy()``."""
        fields: dict[str, Any] = {"bucket_bytes": _LARGE_BUCKET_BYTES} if state_bytes >= _LARGE_BYTES else {}
        if self.parameters:
            fields["parameters"] = True
        if self.overlap != "step":
            fields["overlap"] = self.overlap
        if isinstance(self.device_bytes, int):
            fields["device_bytes"] = self.device_bytes
        elif self.device_bytes is None and not self.parameters and (self.overlap != "step" or fields):
            fields["device_bytes"] = _DEVICE_BUCKETS * fields.get("bucket_bytes", OffloadPolicy.bucket_bytes)
        return fields

    def policy(self, state_bytes: int) -> OffloadPolicy:
        """Make it."""
        return OffloadPolicy(**self.fields(state_bytes))

    def share(self, state_bytes: int, group_bytes: Sequence[int] = ()) -> DeviceShare:
        """How it divides device memory."""
        return device_share(self.policy(state_bytes), elementwise=True, group_bytes=group_bytes)

    def ring_bytes(self, state_bytes: int) -> int:
        """Buckets that are on their way."""
        return self.share(state_bytes).ring_bytes(self.policy(state_bytes).bucket_bytes)

    def staging_bytes(self, state_bytes: int, parameter_bytes: int = 0) -> int:
        """Staging that is there all the time, if so many bytes of parameters pass with the state."""
        if self.share(state_bytes).passing_is_learnt:
            return (state_bytes + parameter_bytes) // _LASTING_SHARE
        return self.ring_bytes(state_bytes)


CHOICES = (
    Choice("step"),
    Choice("forward"),
    Choice("forward", "auto"),
    Choice("iteration"),
    Choice("iteration", "auto"),
    Choice("step", parameters=True),
    Choice("iteration", "auto", parameters=True),
)

_LASTING_SHARE = 25  # with device_bytes="auto", 1/25 of the state is permanent staging: as homes.py has it
_LARGE_BYTES, _LARGE_BUCKET_BYTES = 4 << 30, 128 * MIB  # of so much state, buckets of the default size are very many
_DEVICE_BUCKETS = 5  # on the device if nothing is kept to hide transfers: as many as the measured policies had


def lines_to_write(choice: Choice | None, state_bytes: int, masters: Masters = "none") -> str:
    """The code of a choice; no offload needs none, unless masters are wanted."""
    lines = [] if masters == "none" else [f'add_masters(optimizer, "{masters}")']
    return "\n".join(lines if choice is None else [*lines, _line_of(choice.fields(state_bytes))])


def _line_of(fields: Mapping[str, Any]) -> str:
    texts = {name: f'"{value}"' if isinstance(value, str) else str(value) for name, value in fields.items()}
    texts |= {name: f"{value // MIB} << 20" for name, value in fields.items() if name.endswith("bytes")}
    said = ", ".join(f"{name}={text}" for name, text in texts.items())
    return f"offload_optimizer(optimizer, model=model{f', policy=OffloadPolicy({said})' if said else ''})"
