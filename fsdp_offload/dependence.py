"""Observe which parameters' values flow into what an optimizer's step writes.

Every tensor carries its *origins*: the parameters whose values, gradients or state it was computed from. An operator
hands the origins of what it reads to what it writes; ``foreach`` and ``fused`` operators do so element by element of
their lists. So a dependence shows whatever the numbers are, also where its effect is rounded away.

What Python computes from numbers it has read (``.item()``) is out of sight, and so is a kernel that is not called
through torch's dispatcher; both are noted.
"""

import linecache
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Origins = frozenset[int]
"""Numbers of parameters."""

_NOBODY: Origins = frozenset()

_NEW_VALUES = ("zeros", "ones", "empty", "full", "rand", "randn", "randint")
_SHAPE_ONLY = frozenset(
    [f"{name}_like" for name in _NEW_VALUES] + [f"new_{name}" for name in _NEW_VALUES] + ["new_empty_strided"]
)
"""Operators that look at the shape of a tensor and not at its values."""

_OVERWRITING = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_"})

_READ_ON_HOST = frozenset({"_local_scalar_dense", "equal", "allclose", "is_nonzero"})
"""Operators whose result is a Python number."""

_TO_PYTHON = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr})
"""Ways around the dispatcher to the values of a tensor."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_OPTIM = os.path.join(_TORCH, "optim") + os.sep
_HERE = os.path.dirname(__file__) + os.sep


class Mixture(NamedTuple):
    """Where values of several parameters come together; prints as a reader of a message wants it."""

    operator: str
    line: str

    def __str__(self) -> str:
        return f"{self.operator} in {self.line}" if self.line else self.operator


class DependenceTrace(TorchDispatchMode):
    """Follows origins through all operators that run within it.

    Attributes:
        mixed_reads: reads on the host of a value that several parameters have gone into.
        reads: reads on the host of a value of a single parameter.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixed_reads: list[Mixture] = []
        self.reads: list[Mixture] = []
        self._origins: dict[int, Origins] = {}  # by the address of a storage
        self._kept: dict[int, Any] = {}  # those storages, so that no address is used twice
        self._written: set[int] = set()
        self._mixtures: dict[Origins, Mixture] = {}
        self._host_reads = _HostReads(self)

    def __enter__(self) -> "DependenceTrace":
        super().__enter__()  # type: ignore[no-untyped-call]
        self._host_reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._host_reads.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def mark(self, tensor: Tensor, origin: int) -> None:
        """Say that ``tensor`` belongs to a parameter; what it holds comes from there."""
        self._set(tensor, frozenset({origin}))

    def origins_of(self, tensors: Iterable[Tensor]) -> Origins:
        """Which parameters have gone into these tensors."""
        found = _NOBODY
        for tensor in tensors:
            found |= self._origins.get(_address(tensor), _NOBODY)
        return found

    def mixture_of(self, origins: Origins) -> Mixture | None:
        """Where values of just these parameters first came together."""
        return self._mixtures.get(origins)

    def was_written(self, tensor: Tensor) -> bool:
        """Whether an operator has written into ``tensor``; a change without one came past the dispatcher."""
        return _address(tensor) in self._written

    def note_read(self, operator: str, tensors: Iterable[Tensor]) -> None:
        """Note that a value, computed from these tensors, leaves for the host."""
        origins = self.origins_of(tensors)
        if origins:
            (self.mixed_reads if len(origins) > 1 else self.reads).append(Mixture(operator, _line_of_step()))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and hand on origins; a wrapper type is left to take itself apart, under this mode again."""
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result, unwritten = _run(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name in _READ_ON_HOST:
            self.note_read("item" if name == "_local_scalar_dense" else name, _tensors(args))
        elif name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
            self._pair(func, name, args, kwargs, result)
        else:
            self._join(func, name, args, kwargs, result, unwritten)
        return result

    def _join(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        unwritten: Sequence[Tensor],
    ) -> None:
        """Everything that is read goes into everything that is written."""
        read = {key: value for key, value in kwargs.items() if key != "out"}
        inputs = [self.origins_of([tensor]) for tensor in _tensors((args, read))]
        written = [
            tensor
            for tensor in _tensors(_written_arguments(func, args, kwargs))
            if not any(tensor is other for other in unwritten)
        ]
        if name in _SHAPE_ONLY:
            inputs = []
        elif name in _OVERWRITING and written and _is_whole(written[0]):
            inputs = [self.origins_of([tensor]) for tensor in _tensors((args[1:], kwargs))]
        self._hand_on(name, inputs, [*written, *_tensors(result)], written)

    def _pair(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Elements of lists belong together by their place; a single tensor goes with each of them."""
        values = [*args, *kwargs.values()]
        lists = [
            value for value in values if isinstance(value, list | tuple) and next(_tensors(value), None) is not None
        ]
        single = [self.origins_of([value]) for value in values if isinstance(value, Tensor)]
        written = _written_arguments(func, args, kwargs)
        outputs = [value for value in (*written, result) if isinstance(value, list | tuple)]
        for place in range(max(map(len, lists), default=0)):
            inputs = [self.origins_of([one[place]]) for one in lists if place < len(one)]
            targets = [one[place] for one in outputs if place < len(one)]
            in_place = [one[place] for one in written if isinstance(one, list | tuple) and place < len(one)]
            self._hand_on(name, [*single, *inputs], targets, in_place)
        lone = [value for value in written if isinstance(value, Tensor)]
        if lone:
            self._hand_on(name, [self.origins_of([tensor]) for tensor in _tensors(values)], lone, lone)

    def _hand_on(
        self, name: str, inputs: Sequence[Origins], outputs: Sequence[Tensor], written: Sequence[Tensor]
    ) -> None:
        origins = frozenset().union(*inputs)
        if len(origins) > 1 and origins not in self._mixtures and all(len(one) < len(origins) for one in inputs):
            self._mixtures[origins] = Mixture(name, _line_of_step())
        for tensor in outputs:
            self._set(tensor, origins)
        self._written.update(map(_address, written))

    def _set(self, tensor: Tensor, origins: Origins) -> None:
        address = _address(tensor)
        if address:
            known = self._origins.get(address, _NOBODY)
            if address in self._kept and not _is_whole(tensor):
                origins |= known  # the rest of the storage keeps what it was made from
            if len(origins) > 1 and origins not in self._mixtures:
                self._mixtures[origins] = Mixture("a write into shared memory", _line_of_step())
            self._origins[address] = origins
            self._kept.setdefault(address, tensor.untyped_storage())


class _HostReads(TorchFunctionMode):
    """Notes what goes from tensors to Python without an operator."""

    def __init__(self, trace: DependenceTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TO_PYTHON:
            self._trace.note_read(func.__name__, _tensors(args[:1]))
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    """The storage's; 0 where there is nothing to depend on."""
    if tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        return 0
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Run an operator; also returns what it says it writes and has not, as schemas of custom operators may."""
    if func.namespace == "aten":
        return func(*args, **kwargs), []
    written = list(_tensors(_written_arguments(func, args, kwargs)))
    before = [tensor.clone() for tensor in written]
    result = func(*args, **kwargs)
    return result, [tensor for tensor, old in zip(written, before, strict=True) if torch.equal(tensor, old)]


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that the operator's schema says it writes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _line_of_step() -> str:
    """The innermost line outside of torch and of this package that runs now: ``file:number: source``."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        foreign = not name.startswith((_TORCH, _HERE)) or name.startswith(_TORCH_OPTIM)
        if foreign and not name.startswith("<"):
            source = linecache.getline(name, frame.f_lineno).strip()
            return f"{os.path.basename(name)}:{frame.f_lineno}" + (f" (`{source}`)" if source else "")
        frame = frame.f_back  # type: ignore[assignment]
    return ""
