"""The policy of an offload: plain data that is validated when it is made, and the checks of arguments."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

if TYPE_CHECKING:
    Bytes = int
    Auto = Literal["auto"]
else:  # wider at run time: command lines that frameworks generate from the fields have to accept "8GB"
    Bytes = Auto = int | str

MIB = 1 << 20

OverlapKind = Literal["step", "forward", "iteration"]
"""Part of an iteration that hides transfers and updates."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def tells(line: str, **others: str) -> Callable[[_Function], _Function]:
    """Add ``line``, a correct call, to TypeErrors for wrong arguments; ``others``: advice by argument name."""

    def told(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = told(function.__init__)  # type: ignore[misc]
            return function
        signature = inspect.signature(function)
        known = signature.parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError:
                try:  # only after an error: steps call these functions, and binding can take longer than the call
                    signature.bind(*args, **kwargs)
                except TypeError as error:
                    problem = str(error)
                else:
                    raise
            unknown = [name for name in kwargs if name not in known]
            advice = [f" {others[name]}" if name in others else nearest_to(name, known) for name in unknown]
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{name}: {problem}.{''.join(advice)} Write {line}.")

        return call

    return told


def nearest_to(name: object, known: Iterable[str]) -> str:
    """Return a question that names the most similar of the ``known`` names; empty if none is similar."""
    if name == "masters":
        return " add_masters(optimizer, kind) adds masters, before offload_optimizer()."
    nearest = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""


@tells("OffloadPolicy(overlap='forward', device_bytes='8GB')")
@dataclass(frozen=True, kw_only=True)
class OffloadPolicy:
    """Say what is offloaded, how much of it may be on the device, and what hides its transfers.

    The defaults fit every training loop. With all values the result is bitwise the plain optimizer's, unless a field
    says otherwise.

    Attributes:
        parameters: Keep the model's parameters on the host too: those that ``fully_shard`` gathers, frozen ones
            included. They pass through the device group by group, for the forward, the backward and the update;
            gradients stay on the device. Between uses a parameter's shard is host memory, where ``state_dict`` and
            ``torch.distributed.checkpoint`` read and write it. Needs a model, sharded without ``CPUOffloadPolicy``.
        overlap: Choose what hides the transfers.

            - ``"step"``: update in ``step()``; parameters are new when it returns. With a model that has
              ``fully_shard`` modules, the first loads begin in the last backward before it. For all loops.
            - ``"forward"``: let updates and stores run on into the next forward, which waits module by module. Call
              ``synchronize()`` before using parameters or gradients in between, except by a forward, ``state_dict`` or
              the optimizer. Needs a model.
            - ``"iteration"``: as ``"forward"``, and update each bucket in the backward, as soon as its gradients are
              final. For loops in which the number of backwards before a step does not change. A loop that clips by a
              norm uses :func:`~fsdp_offload.clip_grad_norm_`: updates are then speculative. Steps that clip roll them
              back; if more than a fifth of the steps clip, updates wait for ``step()``. Rolling back takes as much
              host memory again as the state and the parameters. If a loop changes gradients in any other way, the
              first steps show it, and updates then wait for ``step()``. Needs a model.
        device_bytes: Limit the device memory for offloaded state and parameters, kept or passing through, at the
            model's own peak. Where the model is below its peak, offload may use the difference as well. Otherwise a
            number is exceeded only if one update needs more (the report says so). ``"auto"`` begins with four blocks of
            state and four of parameters; ``overlap="iteration"`` frees those of state at the peak. ``"auto"`` takes
            more blocks if compute waits for them, within the memory that training leaves free. A number is at least
            twice a numeric ``bucket_bytes``. Sizes may be text, decimal or binary: ``"8GB"``, ``"640MiB"``.
        bucket_bytes: Load, update and store about this much state together. ``"auto"`` follows the groups of
            ``fully_shard``: small ones are joined up to 64 MiB, and large ones cut at 256 MiB. A parameter with more
            state is cut into several buckets if its optimizer works element by element; otherwise it is one large
            bucket.
        host_fraction: Update this share of the state's bytes on the CPU, by the same class, while the device streams
            the rest; the same share on every rank. The result is bitwise that of the same class on CPU copies of the
            parameters, with ``fused=True`` where that kernel is exact. From 0 to 1, without ``parameters``, for
            elementwise optimizers of ``torch.optim``.
        snapshot_bytes: Reserve this much host memory for asynchronous saves: a second home for as much of the state as
            fits, into which steps store while a checkpoint writer reads the first. For the rest, a step waits for the
            writer. Used by ``fsdp_offload.checkpoint.ArenaStager``. Steps that may be rolled back share this memory.
        host_limit_bytes: Limit the host memory that the state may take. ``None`` asks the kernel (cgroup limit,
            available memory, and what all ranks of this host need together). Give a number on a machine that grows its
            memory on use, where the kernel reports too little.
        pin_memory: Page-lock the host memory. ``None`` does so if the parameters are on an accelerator. Copies from
            memory that is not pinned are several times slower and do not overlap.
        serial: Run the same schedule one action after the other: slower, with the same bits. A difference that remains
            does not come from overlap.
        trust_separable: As the argument of :func:`~fsdp_offload.offload_optimizer`, for configurations of frameworks.

    Raises:
        ValueError: A field has a value that it does not accept, or ``device_bytes`` holds fewer than two buckets.
        TypeError: A field has a value of another type.
    """

    parameters: bool = False
    overlap: OverlapKind = "step"
    device_bytes: Bytes | Auto = "auto"
    bucket_bytes: Bytes | Auto = "auto"
    host_fraction: float = 0.0
    snapshot_bytes: Bytes = 0
    host_limit_bytes: Bytes | None = None
    pin_memory: bool | None = None
    serial: bool = False
    trust_separable: bool = False

    def __post_init__(self) -> None:
        for name in _LEAST_BYTES:
            if size := _SIZE.fullmatch(str(getattr(self, name))):
                number, prefix, binary = size.groups()
                factor = (1024 if binary else 1000) ** ("kmgt".index(prefix.lower()) + 1 if prefix else 0)
                object.__setattr__(self, name, round(float(number) * factor))
        for name, (types, wanted) in _TYPES.items():
            value = getattr(self, name)
            is_so = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if not is_so and not (value == "auto" and "'auto'" in wanted):
                raise TypeError(f"OffloadPolicy: {name} must be {wanted}, got {value!r}")
        for name, least in _LEAST_BYTES.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < least:
                raise ValueError(f"OffloadPolicy: {name} must be at least {least} bytes, got {value}")
        if self.overlap not in get_args(OverlapKind):
            raise ValueError(f"OffloadPolicy: overlap must be one of {get_args(OverlapKind)}, got {self.overlap!r}")
        if not 0 <= self.host_fraction <= 1:
            raise ValueError(f"OffloadPolicy: host_fraction must be from 0 to 1, got {self.host_fraction!r}")
        if self.parameters and self.host_fraction:
            raise ValueError(
                "OffloadPolicy: parameters=True updates on the device, where parameters and state pass through, and "
                f"host_fraction={self.host_fraction!r} on the CPU. Leave out one of them."
            )
        if self.device_bytes != "auto" and self.bucket_bytes != "auto" and self.device_bytes < 2 * self.bucket_bytes:
            raise ValueError(
                "OffloadPolicy: device_bytes must hold at least two buckets, one that passes through and room for one "
                f"that is being created; got device_bytes={self.device_bytes} with bucket_bytes={self.bucket_bytes}. "
                f"Write device_bytes={2 * self.bucket_bytes} or more (four overlap best), or lower bucket_bytes."
            )

    @property
    def updates_in_backward(self) -> bool:
        """Return whether buckets are updated before ``step()`` is called."""
        return self.overlap == "iteration"

    @property
    def runs_on_into_forward(self) -> bool:
        """Return whether updates and stores run during the model's compute, and may end after ``step()`` returns."""
        return self.overlap != "step"

    @property
    def moves_beside_model(self) -> bool:
        """Return whether state or parameters move while the model runs, not in ``step()`` alone."""
        return self.parameters or self.runs_on_into_forward

    def pins(self, device_type: str) -> bool:
        """Return whether host memory is page-locked, for parameters on a device of this type."""
        return device_type != "cpu" if self.pin_memory is None else self.pin_memory


def as_policy(values: OffloadPolicy | Mapping[str, Any] | None) -> OffloadPolicy:
    """Make a policy from a dict of its fields; ``None`` gives the default, and a policy is returned as it is.

    Raises:
        ValueError, TypeError: A field is unknown or its value not accepted, or ``values`` is no policy and no dict.
    """
    if isinstance(values, OffloadPolicy):
        return values
    field = "overlap" if values in get_args(OverlapKind) else "device_bytes"
    meant = values if field == "overlap" or (isinstance(values, str) and _SIZE.fullmatch(values)) else "auto"
    says = "policy must be an OffloadPolicy or a dict of its fields"
    check_is(values, Mapping | None, says, f"OffloadPolicy({field}={meant!r})")
    asked, known = dict(values or {}), [field.name for field in fields(OffloadPolicy)]
    for name in asked:
        if name not in known:
            raise ValueError(f"OffloadPolicy has no {name}.{nearest_to(name, known)} It has {', '.join(known)}.")
    return OffloadPolicy(**asked)


def listed(names: Iterable[str]) -> str:
    """Join the first four names for a message, each once, and add how many more there are."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def check_choices(function: str, **choices: object) -> None:
    """Raise a TypeError for values other than True and False: any text would be true, even 'no'."""
    for name, value in choices.items():
        if isinstance(value, str) or value not in (True, False):
            raise TypeError(f"{function}: {name} must be True or False, got {value!r}.")


def check_is(given: object, wanted: Any, says: str, line: str) -> None:
    """Raise a TypeError if ``given`` is not of type ``wanted``: ``says`` names that type, ``line`` is what to write."""
    if not isinstance(given, wanted):
        got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise TypeError(f"{says}, got {got}. Write {line}.")


_BYTES = "an integer number of bytes, or a size such as '640MiB' or '8GB'"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i)?)?b", re.IGNORECASE)
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "parameters": ((bool,), "a bool"),
    "device_bytes": ((int,), f"{_BYTES}, or 'auto'"),
    "bucket_bytes": ((int,), f"{_BYTES}, or 'auto'"),
    "host_fraction": ((int, float), "a number from 0 to 1"),
    "snapshot_bytes": ((int,), _BYTES),
    "host_limit_bytes": ((int, type(None)), _BYTES),
    "pin_memory": ((bool, type(None)), "a bool or None"),
    "serial": ((bool,), "a bool"),
    "trust_separable": ((bool,), "a bool"),
}
_LEAST_BYTES = {"device_bytes": 1, "bucket_bytes": 1024, "snapshot_bytes": 0, "host_limit_bytes": 0}
