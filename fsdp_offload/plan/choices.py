"""The policies that a plan compares, in its words, and the fields that these have today.

The plan knows the fields of ``OffloadPolicy`` from nowhere else. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..planning.bound import Bound, Times, bound
from ..planning.device_share import DeviceShare, device_share
from ..policy import MIB, MasterKind, OffloadPolicy

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
        device_bytes: a number instead: what passes through takes some of it, and the rest may be kept.
        parameters: whether the model's parameters live on the host too.
    """

    overlap: Overlap
    keeps: Literal["none", "auto"] = "none"
    device_bytes: int | None = None
    parameters: bool = False

    @property
    def keeps_some(self) -> bool:
        """Whether some of the state may stay on the device."""
        return self.keeps == "auto" or self.device_bytes is not None

    @property
    def name(self) -> str:
        """For tables."""
        words = [self.overlap, *(["parameters"] if self.parameters else [])]
        if self.device_bytes is not None:
            words.append(f"{self.device_bytes // MIB} MiB")
        elif self.keeps == "auto" and not self.parameters:
            words.append("keeping")
        return ", ".join(words)

    def fields(self, state_bytes: int) -> dict[str, Any]:
        """What differs from ``OffloadPolicy()``."""
        fields: dict[str, Any] = {"bucket_bytes": _LARGE_BUCKET_BYTES} if state_bytes >= _LARGE_BYTES else {}
        if self.parameters:
            fields["parameters"] = True
        if self.overlap != "step":
            fields["overlap"] = self.overlap
        if self.device_bytes is not None:
            fields["device_bytes"] = self.device_bytes
        elif self.keeps == "none" and not self.parameters and (fields.get("bucket_bytes") or self.overlap != "step"):
            fields["device_bytes"] = _DEVICE_BUCKETS * fields.get("bucket_bytes", OffloadPolicy.bucket_bytes)
        return fields

    def policy(self, state_bytes: int) -> OffloadPolicy:
        """Make it."""
        return OffloadPolicy(**self.fields(state_bytes))

    def share(self, state_bytes: int, group_bytes: Sequence[int] = ()) -> DeviceShare:
        """How it divides device memory."""
        return device_share(self.policy(state_bytes), elementwise=True, group_bytes=group_bytes)

    def staging_bytes(self, state_bytes: int, parameter_bytes: int = 0) -> int:
        """Staging that is there all the time, where so much of parameters passes with the state."""
        if self.share(state_bytes).passing_is_learnt:
            return (state_bytes + parameter_bytes) // _LASTING_SHARE
        return self._ring_bytes(state_bytes)

    def ahead_bytes(self, group_bytes: int, state_bytes: int) -> int:
        """How far loads can be ahead: where staging is learnt, by the state of one group, beside what passes."""
        learnt_bytes = group_bytes if self.share(state_bytes).passing_is_learnt else 0
        return learnt_bytes + self._ring_bytes(state_bytes)

    def _ring_bytes(self, state_bytes: int) -> int:
        return self.share(state_bytes).ring_bytes(self.policy(state_bytes).bucket_bytes)

    def bound(self, times: Times, state_bytes: int, kept_share: float, staged_share: float) -> Bound:
        """What an iteration takes at least, with that share of the state on the device, and of the rest in staging.

        With parameters on the host, the copies of ``times`` are theirs as well.
        """
        return bound(self.policy(state_bytes), times, offloaded=1 - kept_share, staged=staged_share)


CHOICES = (
    Choice("step"),
    Choice("forward"),
    Choice("forward", "auto"),
    Choice("iteration"),
    Choice("iteration", "auto"),
    Choice("step", parameters=True),
    Choice("iteration", "auto", parameters=True),
)


_LASTING_SHARE = 25
"""One part in so many of the state is staging that lasts, with ``device_bytes="auto"``: as ``homes.py`` has it."""

_LARGE_BYTES = 4 << 30
"""Of state: then a bucket of the default size would be one of very many."""

_LARGE_BUCKET_BYTES = 128 * MIB

_DEVICE_BUCKETS = 5
"""On the device where nothing is kept to hide transfers: as many as the measured policies had."""


def lines_to_write(choice: Choice | None, state_bytes: int, master_weights: MasterKind = "none") -> str:
    """The code of a choice; ``None`` is no offload, which needs none unless masters are wanted."""
    if choice is None and master_weights == "none":
        return ""
    fields: dict[str, Any] = {"device_bytes": 1 << 60} if choice is None else choice.fields(state_bytes)
    if master_weights != "none":
        fields["master_weights"] = master_weights
    said = ", ".join(f"{name}={_said(value)}" for name, value in fields.items())
    policy = f", policy=OffloadPolicy({said})" if said else ""
    return f"offload_optimizer(optimizer, model=model{policy})"


def _said(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value // MIB} << 20"
    return f'"{value}"' if isinstance(value, str) else str(value)
