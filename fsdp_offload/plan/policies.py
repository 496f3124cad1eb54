"""The policies that a plan chooses among, in its words, and what they are called today.

The only file of the plan that knows the fields of ``OffloadPolicy``.
"""

from dataclasses import dataclass
from typing import Any, Literal

from ..bound import Bound, Times, bound, staged_share
from ..policy import MIB, OffloadPolicy

Overlap = Literal["step", "forward", "iteration"]
Loop = Literal["any", "synchronizes", "no_clipping"]

OVERLAPS: dict[Loop, tuple[Overlap, ...]] = {
    "any": ("step",),
    "synchronizes": ("step", "forward"),
    "no_clipping": ("step", "forward", "iteration"),
}
"""What a loop allows: any loop; one that calls ``synchronize()`` before it touches parameters or gradients between
``step()`` and the next forward; one that, besides, neither clips by a global norm nor touches gradients."""


@dataclass(frozen=True)
class Choice:
    """One way to offload.

    Attributes:
        overlap: what hides the transfers.
        keeps: ``"auto"`` keeps what they cannot hide on the device; with ``"none"`` everything passes through.
    """

    overlap: Overlap
    keeps: Literal["none", "auto"] = "none"

    @property
    def name(self) -> str:
        """For tables."""
        return self.overlap if self.keeps == "none" else f"{self.overlap}, keeping"

    def fields(self, state_bytes: int) -> dict[str, Any]:
        """What differs from ``OffloadPolicy()``."""
        fields: dict[str, Any] = {}
        if state_bytes >= _LARGE_BYTES:
            fields |= {"staging_bytes": 640 * MIB, "bucket_bytes": 128 * MIB}
        if self.overlap == "iteration":
            fields["update"] = "backward"
        if self.overlap != "step":
            fields["overlap_forward"] = True
        if self.keeps == "auto":
            fields["resident_bytes"] = "auto"
        return fields

    def policy(self, state_bytes: int) -> OffloadPolicy:
        """Make it."""
        return OffloadPolicy(**self.fields(state_bytes))

    def bound(self, times: Times, state_bytes: int, kept_share: float) -> Bound:
        """What an iteration takes at least."""
        policy = self.policy(state_bytes)
        moving_bytes = int(state_bytes * (1 - kept_share))
        staged = staged_share(policy.ring_bytes, moving_bytes)
        return bound(policy, times, offloaded=1 - kept_share, staged=staged)


CHOICES = (
    Choice("step"),
    Choice("forward"),
    Choice("forward", "auto"),
    Choice("iteration"),
    Choice("iteration", "auto"),
)

_LARGE_BYTES = 4 << 30
"""Of state: then a bucket of the default size would be one of very many."""


def lines_to_write(choice: Choice | None, state_bytes: int) -> str:
    """The code of a choice; ``None`` is no offload."""
    if choice is None:
        return ""
    fields = choice.fields(state_bytes)
    said = ", ".join(f"{name}={_said(value)}" for name, value in fields.items())
    policy = f", policy=OffloadPolicy({said})" if said else ""
    return f"offload_optimizer(optimizer, model=model{policy})"


def _said(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value // MIB} << 20"
    return f'"{value}"' if isinstance(value, str) else str(value)
