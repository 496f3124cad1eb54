"""How an optimizer's state is offloaded: plain data, validated when it is made, used by every other room."""

from dataclasses import dataclass
from typing import Literal, get_args

MIB = 1 << 20

MasterKind = Literal["none", "fp32", "remainder"]
"""Masters kept for an optimizer that keeps none: whole ones, or the lower 16 bits of one in int16."""


@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """How much state may be on the device, and how it passes through.

    Attributes:
        staging_bytes: device memory for state in passing. It is taken once, when the optimizer is attached (in its
            first step if there is no room yet), and stays allocated: so it does not lie where activations have been,
            which the allocator would have to reserve once more. One ``bucket_bytes`` of it is kept free for state that
            the optimizer is just creating; the rest is a ring through which buckets are loaded, updated and stored.
            Three or more buckets in the ring let loads, updates and stores overlap. ``"auto"``, with loads or updates
            in the backward, begins with four buckets. Of these, what makes up no more than a twenty-fifth of the state
            stays; beyond that it takes as much as fits under the peak that training has anyway, in each backward as
            activations are freed, and gives it back in the next forward before they need it, both block by block: an
            allocation of about ``bucket_bytes`` each, so that the memory of activations is used again. Smaller
            buckets leave less of what the allocator has reserved unused. With ``update="backward"`` it stays as it
            begins if all transfers take longer than a backward, and with an optimizer that is not elementwise.
        resident_bytes: state that never leaves the device, in addition to ``staging_bytes``: whole parameters' state,
            taken in bucket order as long as it fits. ``"auto"`` begins with none, measures some iterations, and then
            keeps just the part without which the model would wait for transfers, or the link would be busy for more
            than half of the time (of three quarters of the forward, where updates come after the backward): together
            with ``overlap_forward``, ``prefetch="backward"`` or ``update="backward"``, for optimizers that work element
            by element. Its host memory stays reserved.
        resident_limit_bytes: the most that ``resident_bytes="auto"`` may keep. ``None``: as much as would have been
            free at the highest point so far, less a twentieth of the device's memory.
        bucket_bytes: about how much state is loaded, updated and stored together. A parameter with more state than
            this is cut into several buckets when its optimizer works element by element, and is a bucket of its own
            otherwise.
        master_weights: masters for bf16 and fp16 parameters, kept as state under ``"master_param"``. ``"fp32"``: the
            optimizer updates an fp32 master, with fp32 state, and the parameter is rounded from it; the result is that
            of the same optimizer on an fp32 copy of the model. 12 bytes of state for each parameter with Adam.
            ``"remainder"``: the same, but of the master only the 16 bits are kept that a bf16 parameter does not say:
            10 bytes. For elementwise optimizers of ``torch.optim``; parameters in fp32 are their own masters.
        snapshot_bytes: host memory kept for asynchronous saves, pinned when the optimizer is attached: a second home
            for as much of the state as fits. While a checkpoint writer still reads one home, steps store into the
            other. Without it, or beyond it, a step during an asynchronous save waits for the writer. Only
            ``fsdp_offload.checkpoint.ArenaStager`` makes use of it.
        prefetch: ``"backward"`` begins to load when the last backward before the step begins (where all groups stay
            gathered: with its first gradients), as far as staging reaches. ``"step"`` loads in ``step()``.
        update: ``"backward"`` updates each bucket as soon as its gradients are final, in the last backward before
            ``step()``, which then only waits. For loops that neither clip by a global norm nor touch gradients after
            the backward; how many backwards there are before a step must not change. ``"step"`` updates in ``step()``.
        overlap_forward: ``step()`` returns when everything is queued, and the next forward waits in each
            ``fully_shard`` module for that module's parameters only. Call ``synchronize()`` before touching parameters
            or gradients in between by any other way than a forward, ``state_dict`` and the optimizer.
        host_fraction: that share of the state's bytes is updated on the CPU, by the same class (its fused CPU kernel
            where there is one), while the device streams the rest: whole parameters, from the end of the forward. The
            result is bitwise that of the same optimizer on CPU copies of these parameters; what is saved does not
            depend on it. These parameters are mirrored in host memory. ``"auto"`` measures both sides once, when the
            optimizer is attached, and takes the share with which they end together, on each rank by itself. For
            elementwise optimizers of ``torch.optim``.
        debug: with ``overlap_forward``, raise an error where parameters or gradients are touched between ``step()`` and
            the next forward without ``synchronize()``. For one run of a loop that is new to ``overlap_forward``: each
            step costs a little more. Not noticed are views and local tensors that were taken earlier.
        pin_memory: whether the host memory is page-locked. ``None`` pins where the parameters are on an accelerator.
            Copies from memory that is not pinned are several times slower and do not overlap.
        serial: run the same schedule one action after the other, waiting for each. Slow; to find out whether a
            difference comes from overlap. The bits are the same either way.
        host_limit_bytes: host memory that the state may take. ``None`` asks the kernel (cgroup limit, available
            memory, and what all ranks of this host would need together). Give a number where the machine grows its
            memory on use, so that what the kernel reports is too little.

    Raises:
        ValueError: a size is negative, a fraction is not between 0 and 1, or ``staging_bytes`` holds fewer than two
            buckets.
        TypeError: a size is not an integer.
    """

    staging_bytes: int | Literal["auto"] = 256 * MIB
    resident_bytes: int | Literal["auto"] = 0
    resident_limit_bytes: int | None = None
    bucket_bytes: int = 64 * MIB
    master_weights: MasterKind = "none"
    snapshot_bytes: int = 0
    prefetch: Literal["step", "backward"] = "step"
    update: Literal["step", "backward"] = "step"
    overlap_forward: bool = False
    host_fraction: float | Literal["auto"] = 0.0
    pin_memory: bool | None = None
    serial: bool = False
    debug: bool = False
    host_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_autos()

    def _check_sizes(self) -> None:
        for name, minimum in _MINIMUM_BYTES.items():
            value = getattr(self, name)
            if not (value == "auto" and name in _MAY_BE_AUTO) and not (value is None and name in _MAY_BE_NONE):
                _check_size(name, value, minimum=minimum)
        if self.staging_bytes != "auto" and self.staging_bytes < 2 * self.bucket_bytes:
            raise ValueError(
                "OffloadPolicy: staging_bytes must hold at least two buckets, one in the ring and room for one that "
                f"is being created; got staging_bytes={self.staging_bytes} with bucket_bytes={self.bucket_bytes}. "
                f"Raise staging_bytes to {2 * self.bucket_bytes} (four buckets overlap best) or lower bucket_bytes."
            )

    def _check_choices(self) -> None:
        if self.master_weights not in get_args(MasterKind):
            raise ValueError(
                f"OffloadPolicy: master_weights must be one of {get_args(MasterKind)}, got {self.master_weights!r}"
            )
        for name in ("prefetch", "update"):
            if getattr(self, name) not in ("step", "backward"):
                raise ValueError(f"OffloadPolicy: {name} must be 'step' or 'backward', got {getattr(self, name)!r}")
        for name in ("serial", "debug", "overlap_forward"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"OffloadPolicy: {name} must be a bool, got {getattr(self, name)!r}")
        _check_fraction("host_fraction", self.host_fraction)
        if self.pin_memory is not None and not isinstance(self.pin_memory, bool):
            raise TypeError(f"OffloadPolicy: pin_memory must be a bool or None, got {self.pin_memory!r}")

    def _check_autos(self) -> None:
        if self.staging_bytes == "auto" and not self.uses_backward:
            raise ValueError(
                "OffloadPolicy: staging_bytes='auto' takes the memory of activations that the backward has freed. Add "
                "prefetch='backward' or update='backward', or give a number of bytes."
            )
        if self.resident_bytes == "auto" and not self.overlaps:
            raise ValueError(
                "OffloadPolicy: resident_bytes='auto' keeps what overlap cannot hide, and nothing overlaps. Add "
                "overlap_forward=True, prefetch='backward' or update='backward', or give a number of bytes."
            )

    @property
    def uses_backward(self) -> bool:
        """Whether anything happens before ``step()``."""
        return self.prefetch == "backward" or self.update == "backward"

    @property
    def updates_beside_compute(self) -> bool:
        """Whether updates run beside a forward or a backward."""
        return self.update == "backward" or self.overlap_forward

    @property
    def overlaps(self) -> bool:
        """Whether anything hooks into the model."""
        return self.uses_backward or self.overlap_forward

    @property
    def given_resident_bytes(self) -> int:
        """What is resident from the first."""
        return 0 if self.resident_bytes == "auto" else self.resident_bytes

    @property
    def ring_bytes(self) -> int:
        """Device bytes through which buckets pass: staging without the room for state under creation.

        What there is at first, where that is left to be found out.
        """
        return (5 * self.bucket_bytes if self.staging_bytes == "auto" else self.staging_bytes) - self.bucket_bytes


_MINIMUM_BYTES = {
    "staging_bytes": 1,
    "bucket_bytes": 1024,
    "resident_bytes": 0,
    "resident_limit_bytes": 0,
    "snapshot_bytes": 0,
    "host_limit_bytes": 0,
}
_MAY_BE_AUTO = ("staging_bytes", "resident_bytes")
_MAY_BE_NONE = ("resident_limit_bytes", "host_limit_bytes")


def _check_size(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        or_auto = " or 'auto'" if name in _MAY_BE_AUTO else ""
        raise TypeError(f"OffloadPolicy: {name} must be an integer number of bytes{or_auto}, got {value!r}")
    if value < minimum:
        raise ValueError(f"OffloadPolicy: {name} must be at least {minimum} bytes, got {value}")


def _check_fraction(name: str, value: object) -> None:
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"OffloadPolicy: {name} must be a number from 0 to 1 or 'auto', got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"OffloadPolicy: {name} must be from 0 to 1, got {value!r}")
