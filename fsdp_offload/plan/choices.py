"""The policies that a plan compares. The plan knows the fields of ``OffloadPolicy`` from nowhere else. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..core.plan import JOINED_BYTES, LARGEST_BYTES, PASSING
from ..policy import MIB, OffloadPolicy, OverlapKind
from .training import Masters


@dataclass(frozen=True)
class Choice:
    """One way to offload."""

    overlap: OverlapKind  # what hides the transfers; each asks more of a loop than the one before: docs/policy.md
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
        fields: dict[str, Any] = {"parameters": True} if self.parameters else {}
        if self.overlap != "step":
            fields["overlap"] = self.overlap
        if isinstance(self.device_bytes, int):
            fields["device_bytes"] = self.device_bytes
        elif self.device_bytes is None and not self.parameters and self.overlap != "step":
            bucket_bytes = min(LARGEST_BYTES, max(JOINED_BYTES, state_bytes // 64 // MIB * MIB))
            fields["device_bytes"] = (PASSING + 1) * bucket_bytes  # what passes, in few operations, and nothing kept
        return fields

    def policy(self, state_bytes: int) -> OffloadPolicy:
        """Make it."""
        return OffloadPolicy(**self.fields(state_bytes))


CHOICES = (
    Choice("step"),
    Choice("forward"),
    Choice("forward", "auto"),
    Choice("iteration"),
    Choice("iteration", "auto"),
    Choice("step", parameters=True),
    Choice("iteration", "auto", parameters=True),
)


def lines_to_write(choice: Choice | None, state_bytes: int, masters: Masters = "none") -> str:
    """The code of a choice; no offload needs none, unless masters are wanted."""
    lines = [] if masters == "none" else [f'add_masters(optimizer, "{masters}")']
    return "\n".join(lines if choice is None else [*lines, _line_of(choice.fields(state_bytes))])


def _line_of(fields: Mapping[str, Any]) -> str:
    texts = {name: f'"{value}"' if isinstance(value, str) else str(value) for name, value in fields.items()}
    texts |= {name: f"{value // MIB} << 20" for name, value in fields.items() if name.endswith("bytes")}
    said = ", ".join(f"{name}={text}" for name, text in texts.items())
    return f"offload_optimizer(optimizer, model=model{f', policy=OffloadPolicy({said})' if said else ''})"
