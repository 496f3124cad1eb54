"""Observe which parameters' values flow into what an optimizer's step writes.

Every element of a tensor carries its *origins*: the parameters whose values, gradients or state it was computed from.
An operator hands the origins of what it reads to what it writes. Operators that work element by element, or that only
move elements (``stack``), do so for each element; ``foreach`` and ``fused`` ones for each place in their lists; all
others mix what they read. So a dependence shows whatever the numbers are, also where its effect is rounded away.

What Python computes from numbers it has read (``.item()``) is out of sight, and so is a kernel that is not called
through torch's dispatcher. A number that several parameters have gone into is noted where it is read.
"""

import functools
import linecache
import operator
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_offload.state.layout import tensors_in

_FOR_EACH = ("_foreach_", "_fused_", "_amp_foreach_")
"""Beginnings of the names of operators that take a list of tensors, each of which for itself."""

_FILLING = ("zero", "ones", "empty", "full", "fill", "rand", "normal_", "uniform_", "bernoulli_", "new_")
"""Beginnings of the names of operators that write what no element has been read for."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_OPTIM = os.path.join(_TORCH, "optim") + os.sep

_Masks = int | npt.NDArray[np.int64]
"""Origins of a tensor: for all elements alike, or for each of them. Bit ``n`` stands for parameter ``n``."""

_BITS = 62
"""More parameters than these share bits, which may hide a dependence among them and never makes one up."""

_READ_ON_HOST = {"_local_scalar_dense", "equal", "allclose", "is_nonzero"}
_TO_PYTHON = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}  # around the dispatcher


class DependenceTrace(TorchDispatchMode):
    """Follows origins through all operators that run within it; ``mixed_reads`` has what several have gone into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixed_reads: list[str] = []
        self._masks: dict[int, _Masks] = {}  # by the address of a storage; an array has all of its elements
        self._itemsizes: dict[int, int] = {}  # of those elements
        self._kept: dict[int, Any] = {}  # those storages, so that no address is used twice
        self._mixtures: dict[int, str] = {}
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
        self._write(tensor, 1 << origin % _BITS, "")

    def foreign_origin(self, tensors: Iterable[Tensor], origin: int) -> str:
        """Where another parameter has gone into ``tensors``, which are to come from ``origin`` alone; or nothing."""
        masks = {mask for tensor in tensors for mask in _different(self._read(tensor))}
        return next((self._mixtures.get(mask, "a copy") for mask in masks if mask & ~(1 << origin % _BITS)), "")

    def origins_of(self, tensor: Tensor) -> set[int]:
        """The parameters that have gone into any element of ``tensor``."""
        mask = _join(self._read(tensor))
        return {origin for origin in range(_BITS) if mask >> origin & 1}

    def note_read(self, name: str, tensors: Iterable[Tensor], *, joined: bool) -> None:
        """Note that elements of these tensors leave for the host: as one number that is computed from all, or each."""
        masks = {mask for tensor in tensors for mask in _different(self._read(tensor))}
        if any(mask & (mask - 1) for mask in ({_join(*masks)} if joined else masks)):
            self.mixed_reads.append(f"{name} in {_line_of_step(__file__)}")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and hand on origins; a wrapper type is left to take itself apart, under this mode again."""
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        written = _written_arguments(func, args, kwargs)
        before = [] if func.namespace == "aten" else [tensor.clone() for tensor in tensors_in(written)]
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _READ_ON_HOST:
            self.note_read("item" if name == "_local_scalar_dense" else name, tensors_in(args), joined=True)
        elif name.startswith(_FOR_EACH):
            self._pair(name, args, kwargs, written, result)
        else:
            changed = list(tensors_in(written))
            if before:  # schemas of custom operators may promise more than these do
                changed = [one for one, old in zip(changed, before, strict=True) if not torch.equal(one, old)]
            unchanged = {id(one) for one in tensors_in(written)} - {id(one) for one in changed}
            self._hand_on(func, name, args, kwargs, changed, [t for t in tensors_in(result) if id(t) not in unchanged])
        return result

    def _hand_on(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], written: list[Tensor], results: list[Tensor]
    ) -> None:
        """Give what an operator has written, or returns, the origins of what it has read."""
        inputs = [*tensors_in(args), *tensors_in({key: value for key, value in kwargs.items() if key != "out"})]
        if not written and any(_address(one) and _address(one) == _address(t) for one in results for t in inputs):
            return  # a view: the elements have their origins
        masks: _Masks
        if name.startswith(_FILLING):
            masks = _join(*map(self._read, tensors_in((args[1:], kwargs))))
        elif name in ("clone", "_to_copy", "copy_"):
            masks = self._read(inputs[1] if name == "copy_" else inputs[0])
        elif name in ("stack", "cat"):
            masks = _moved(name, [(self._read(one), tuple(one.shape)) for one in inputs], args, kwargs)
        elif torch.Tag.pointwise in func.tags:
            masks = functools.reduce(operator.or_, map(self._read, inputs), 0)
        else:
            masks = _join(*map(self._read, inputs))
        for tensor in (*written, *results):
            self._write(tensor, masks, name)

    def _pair(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any], result: Any) -> None:
        """Elements of lists belong together by their place; a single tensor goes with each of them."""
        values = [*args, *kwargs.values()]
        lists = [one for one in values if isinstance(one, list | tuple) and tensors_in(one)]
        single = _join(*(self._read(value) for value in values if isinstance(value, Tensor)))
        found = [
            _join(single, *(self._read(one[place]) for one in lists if place < len(one)))
            for place in range(max(map(len, lists), default=0))
        ]
        for output in (*written, result):
            if isinstance(output, Tensor):
                self._write(output, _join(single, *found), name)
            for tensor, mask in zip(output if isinstance(output, list | tuple) else (), found, strict=False):
                self._write(tensor, mask, name)

    # Origins of elements ----------------------------------------------------------------------------------------------

    def _read(self, tensor: Tensor) -> _Masks:
        address = _address(tensor)
        masks = self._masks.get(address, 0)
        if isinstance(masks, int):
            return masks
        return _elements(masks, tensor) if self._itemsizes[address] == tensor.element_size() else _join(masks)

    def _write(self, tensor: Tensor, masks: _Masks, name: str) -> None:
        address = _address(tensor)
        if not address:
            return
        for mask in _different(masks):
            if mask & (mask - 1) and mask not in self._mixtures:
                self._mixtures[mask] = f"{name} in {_line_of_step(__file__)}"
        storage = tensor.untyped_storage()
        known, itemsize = self._masks.get(address, 0), tensor.element_size()
        if isinstance(masks, int) and tensor.numel() * itemsize == storage.nbytes():
            self._masks[address] = masks
        elif not isinstance(known, int) and self._itemsizes[address] != itemsize:
            self._masks[address] = _join(known, masks)  # other elements over the same bytes
        else:
            if isinstance(known, int):
                known = np.full(storage.nbytes() // itemsize, known, dtype=np.int64)
            _elements(known, tensor)[...] = masks
            self._masks[address] = known
        self._itemsizes[address] = itemsize
        self._kept.setdefault(address, storage)


class _HostReads(TorchFunctionMode):
    """Notes what goes from tensors to Python without an operator."""

    def __init__(self, trace: DependenceTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _TO_PYTHON:
            self._trace.note_read(func.__name__, tensors_in(args[:1]), joined=False)
        return func(*args, **(kwargs or {}))


def _elements(masks: npt.NDArray[np.int64], tensor: Tensor) -> npt.NDArray[np.int64]:
    """Those elements of a storage that ``tensor`` shows, as it shows them."""
    strides = [stride * masks.itemsize for stride in tensor.stride()]
    return np.lib.stride_tricks.as_strided(masks[tensor.storage_offset() :], tuple(tensor.shape), strides)


def _different(masks: _Masks) -> list[int]:
    return [masks] if isinstance(masks, int) else [int(mask) for mask in np.unique(masks)]


def _join(*masks: _Masks) -> int:
    """All origins of all elements."""
    each = (one if isinstance(one, int) else int(np.bitwise_or.reduce(one, axis=None)) for one in masks)
    return functools.reduce(operator.or_, each, 0)


def _moved(
    name: str, parts: Sequence[tuple[_Masks, tuple[int, ...]]], args: Sequence[Any], kwargs: dict[str, Any]
) -> _Masks:
    """Origins of a tensor that ``stack`` or ``cat`` has put together."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    whole = [np.broadcast_to(np.asarray(masks, dtype=np.int64), shape) for masks, shape in parts]
    if name == "stack":
        return np.stack(whole, dim)
    return np.concatenate([one for one in whole if one.shape != (0,)] or whole, dim)


def _address(tensor: Tensor) -> int:
    """The storage's; 0 where there is nothing to depend on."""
    if tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        return 0
    return tensor.untyped_storage().data_ptr()


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that the operator's schema says it writes."""
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _line_of_step(*without: str) -> str:
    """The innermost line that runs now outside of torch and of files ``without``."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        foreign = not name.startswith((_TORCH, *without)) or name.startswith(_TORCH_OPTIM)
        if foreign and not name.startswith("<"):
            source = linecache.getline(name, frame.f_lineno).strip()
            return f"{os.path.basename(name)}:{frame.f_lineno}" + (f" (`{source}`)" if source else "")
        frame = frame.f_back  # type: ignore[assignment]
    return ""
