"""Layouts of state tensors: the dense leaves they are made of, and how to put them together again over other memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..fsdp.dtensor import is_dtensor, local_shard, over_local


class LeafLayout(NamedTuple):
    """One dense tensor of a state value. ``stride`` covers ``numel`` elements without gaps."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_Build = Callable[[Iterator[Tensor]], Any]


@dataclass(frozen=True)
class ValueLayout:
    """Recipe that rebuilds a value from its leaves."""

    leaves: tuple[LeafLayout, ...]
    type: type[Tensor]
    build: Callable[[Sequence[Tensor]], Tensor]  # over the given leaves, without a copy


class NotUnderstoodError(TypeError):
    """A state value that is neither dense nor made of dense tensors; it stays where the optimizer put it."""


def describe_value(value: Tensor) -> ValueLayout:
    """Describe the layout of ``value``; raise a NotUnderstoodError if some part of it is not a dense tensor."""
    leaves: list[LeafLayout] = []
    build = _describe(value, leaves)
    return ValueLayout(tuple(leaves), type(value), lambda parts: build(iter(parts)))


def _describe(value: Any, leaves: list[LeafLayout]) -> _Build:
    if not isinstance(value, Tensor):  # an attribute that is listed as an inner tensor, and is none
        return lambda parts: value
    if is_dtensor(value):
        build_local = _describe(local_shard(value), leaves)
        like = over_local(value, torch.empty(0, dtype=value.dtype, device="meta"))  # mesh and placements, no data
        return lambda parts: over_local(like, build_local(parts))
    if hasattr(type(value), "__tensor_flatten__"):
        names, context = _flatten(value)
        inner = {name: _describe(getattr(value, name), leaves) for name in names}
        remake, shape, stride = cast(Any, type(value)).__tensor_unflatten__, value.shape, value.stride()
        return lambda parts: remake({n: build(parts) for n, build in inner.items()}, context, shape, stride)
    if value.layout != torch.strided or type(value) not in (Tensor, torch.nn.Parameter):
        raise NotUnderstoodError(f"{type(value).__name__} with layout {value.layout}")
    meta = torch.empty_like(value, device="meta")  # dense, in the same order of dimensions
    leaves.append(LeafLayout(tuple(meta.shape), tuple(meta.stride()), meta.dtype))
    return next


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that ``tensor`` would have without gaps, with the same order of dimensions."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _flatten(value: Any) -> tuple[list[str], Any]:
    """Return the names of the inner tensors and the context; drop the transpose that Transformer Engine caches."""
    if hasattr(value, "remove_caches"):
        quantizer = getattr(value, "_quantizer", None)
        if quantizer is not None:
            quantizer.set_usage(rowwise=True, columnwise=False)  # else the next write makes the transpose again
        value.remove_caches()
    names, context = value.__tensor_flatten__()
    return names, context


def leaves_of(value: object) -> list[Tensor]:
    """List the dense tensors inside ``value``, in the order of its layout; none if it is not a tensor."""
    if isinstance(value, Tensor) and is_dtensor(value):
        return leaves_of(local_shard(value))
    if hasattr(type(value), "__tensor_flatten__"):
        names, _ = _flatten(value)
        return [leaf for name in names for leaf in leaves_of(getattr(value, name))]
    return [value] if isinstance(value, Tensor) else []


def forms_of(value: object) -> object:
    """Return shapes and dtypes of the leaves of ``value``, for comparisons and messages, or the name of its type."""
    forms = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves_of(value)]
    return forms if isinstance(value, Tensor) else type(value).__name__


def tensors_in(value: object) -> list[Tensor]:
    """List the tensors in ``value``, which may be a nest of lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def is_size(value: object) -> bool:
    """Return whether ``value`` is a ``torch.Size``, which torch's tree functions would turn into a tuple."""
    return isinstance(value, torch.Size)


@dataclass(frozen=True)
class StateLayout:
    """Layout of the state that an optimizer keeps for one parameter, once it has created it."""

    values: dict[str, ValueLayout]  # the tensors that are moved, by name, in the optimizer's order
    scalars: dict[str, object] = field(default_factory=dict)  # examples of values that stay: 0-dim tensors, numbers
    left_out: tuple[str, ...] = ()  # names of tensors that are not understood and stay on the device


def in_dtypes_of(layout: StateLayout, state: Mapping[str, object]) -> StateLayout:
    """Return ``layout`` with the dtypes of the values in ``state`` whose shapes match."""
    values = dict(layout.values)
    for name, value in layout.values.items():
        leaves = leaves_of(state.get(name))
        if [leaf.shape for leaf in leaves] == [leaf.shape for leaf in value.leaves]:
            pairs = zip(value.leaves, leaves, strict=True)
            own = tuple(planned._replace(dtype=leaf.dtype) for planned, leaf in pairs)
            values[name] = replace(value, leaves=own)
    return replace(layout, values=values)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def is_trained(param: Tensor) -> bool:
    """Return whether ``param`` gets gradients: it requires them, or is a plain tensor, such as Megatron's fp32 masters.

    Megatron's optimizers update tensors that require no gradient, and set their gradients before each step.
    """
    return param.requires_grad or not isinstance(param, torch.nn.Parameter)
