"""Splitting and merging fused tensors of state dicts in memory, before saving or loading.

::

    model state, optimizer state ──find_matches──▶ fused keys ──chunks_of, part_chunks──▶ parts: views of fused memory
    parts ──(saved, or loaded into)──▶ merge_state_dict ──▶ the very fused tensors again

No collective, and no copy: what is loaded into the parts is in the fused tensors. A part of a sharded tensor is a
DTensor whose local tensor carries its chunks (:class:`~fsdp_offload.checkpoint.ShardTensor`), since no placement says
which rows of it a rank has.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_offload.checkpoint import ShardChunks, ShardTensor, chunks_of
from fsdp_offload.checkpoint.layouts import by_fqn, flattened
from fsdp_offload.fsdp import is_dtensor, local_shard, over_part
from fsdp_offload.masters import MASTER, is_duplicate

from .parts import Comb, part_chunks, span_of
from .rules import Match, Rule, find_matches, find_parts

StateDict = dict[str, Any]


class _Origin(NamedTuple):
    """Of which fused tensor a part is a view."""

    fused: Tensor
    number: int


_origins: Any = WeakIdKeyDictionary()
"""Parts made here, while they live. Merging gives back what they were made of."""


def split_state_dict(
    model_state: Mapping[str, Any],
    optim_state: Mapping[str, Any] | None,
    rules: Sequence[Rule],
    *,
    values: Mapping[str, float] | None = None,
) -> tuple[StateDict, StateDict | None]:
    """Exchange every fused tensor for its parts, in the model's and the optimizer's state dict.

    Args:
        model_state: ``{fqn: tensor}``: DTensors, plain tensors, Megatron-FSDP parameters.
        optim_state: nested or flattened, as ``get_optimizer_state_dict`` gives it, or ``None``. State that is shaped
            like the parameter is split like it, also where it is the flat local part of a Megatron-FSDP buffer;
            counters and numbers are copied; ``master_param`` of the parameter's own dtype repeats it and is left out.
        rules: see :mod:`checkpoint_tools.rules`.
        values: config values that the rules' sizes name.

    Returns:
        New dicts; what is not fused is taken over as it is. Parts are views of the memory of the fused tensors.

    Raises:
        ValueError: rules do not fit the keys or the shapes; state of another shape than its parameter, by name.
    """
    matches = find_matches(model_state, rules)
    shapes = {key: tuple(value.shape) for key, value in model_state.items() if isinstance(value, Tensor)}
    splits = {match.fused: _split_of(match, model_state[match.fused], shapes, values or {}) for match in matches}
    model: StateDict = {}
    for key, value in model_state.items():
        model.update(splits[key].named(splits[key].parts_of(value)) if key in splits else {key: value})
    if optim_state is None:
        return model, None
    names = {fqn: split.match.parts for fqn, split in splits.items()}
    return model, _exchange(optim_state, names, lambda fqn, state: _split_values(splits.get(fqn), fqn, state))


def merge_state_dict(
    model_state: Mapping[str, Any],
    optim_state: Mapping[str, Any] | None,
    rules: Sequence[Rule],
    *,
    values: Mapping[str, float] | None = None,
) -> tuple[StateDict, StateDict | None]:
    """The inverse of :func:`split_state_dict`: exchange parts for the fused tensors.

    Parts that :func:`split_state_dict` made give back the fused tensors themselves, with whatever has been loaded into
    them. Plain tensors from elsewhere are copied together.

    Raises:
        ValueError: parts are missing, do not belong together, differ in a counter, or are sharded and were not made by
            :func:`split_state_dict`: then their rows may be on other ranks.
    """
    matches = find_parts(model_state, rules)
    merged = {match.parts[0]: match for match in matches}
    others = {part for match in matches for part in match.parts[1:]}
    model: StateDict = {}
    for key, value in model_state.items():
        if key in merged:
            found = merged[key]
            model[found.fused] = _merged(found, [model_state[part] for part in found.parts], found.fused, values or {})
        elif key not in others:
            model[key] = value
    if optim_state is None:
        return model, None
    states = by_fqn(optim_state).state

    def merge(fqn: str, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        if fqn in others:
            return {}
        if fqn not in merged:
            return {fqn: state}
        match = merged[fqn]
        parts = [states.get(part, {}) for part in match.parts]
        return {match.fused: _merged_values(match, parts, values or {})}

    names = {fqn: (match.fused,) for fqn, match in merged.items()} | dict.fromkeys(others, ())
    return model, _exchange(optim_state, names, merge)


# One tensor ----------------------------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """How one parameter, and all state like it, is split."""

    match: Match
    shape: tuple[int, ...]
    dim: int
    combs: tuple[Comb, ...]
    chunks: ShardChunks  # this rank's, of the fused parameter
    param: Tensor

    def named(self, parts: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.match.parts, parts, strict=True))

    def parts_of(self, value: Tensor) -> list[Tensor]:
        """Views of ``value``, which has this rank's part of a tensor like the parameter."""
        found = [self._part(value, comb) for comb in self.combs]
        for number, part in enumerate(found):
            _origins[part] = _Origin(value, number)
        return found

    def _part(self, value: Tensor, comb: Comb) -> Tensor:
        local = local_shard(value)
        memory = local.local if isinstance(local, ShardTensor) else local
        if not is_dtensor(value) and not is_dtensor(self.param):
            return _plain_part(memory.detach(), self.dim, comb, self.match.fused)
        if not memory.is_contiguous():
            raise ValueError(f"{self.match.fused}: expected a contiguous local tensor, got strides {memory.stride()}")
        begin, chunks = span_of(part_chunks(self.chunks, self.dim, comb))
        stretch = memory.detach().view(-1)[begin : begin + chunks.local_numel]
        return over_part(self.param, ShardTensor(stretch, chunks), chunks.global_shape)


def _split_of(match: Match, param: Any, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, float]) -> _Split:
    if not isinstance(param, Tensor):
        raise ValueError(f"{match.fused}: expected a tensor, got {type(param).__name__}")
    shape = tuple(param.shape)
    dim = match.rule.dim + (len(shape) if match.rule.dim < 0 else 0)
    if not 0 <= dim < len(shape):
        raise ValueError(f"{match.fused} has shape {shape}, and the rule divides dimension {match.rule.dim}")
    combs = match.rule.combs(shape[dim], values, match.fused)
    match.check_sibling(shapes, combs[0].size)
    return _Split(match, shape, dim, combs, chunks_of(param), param)


def _plain_part(whole: Tensor, dim: int, comb: Comb, where: str) -> Tensor:
    if comb.blocks == 1:
        return whole.narrow(dim, comb.start, comb.length)
    if comb.length == 1:
        index = (slice(None),) * dim + (slice(comb.start, None, comb.distance),)
        return whole[index]
    raise ValueError(
        f"{where}: a plain tensor that was fused in groups has no parts that are views. Shard it (a "
        "mesh of one rank will do)"
    )


# Optimizer state -----------------------------------------------------------------------------------------------------


def _exchange(
    optim_state: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    exchanged: Callable[[str, dict[str, Any]], dict[str, dict[str, Any]]],
) -> StateDict:
    """An optimizer's state dict of the same form with other parameters.

    Args:
        optim_state: either form.
        names: of the parameters that take one's place: several, one or none.
        exchanged: the state of one, as that of those.
    """
    saved = by_fqn(optim_state)
    is_nested = isinstance(optim_state.get("param_groups"), Sequence)
    groups = (
        [dict(group) for group in optim_state["param_groups"]]
        if is_nested
        else [{**entries, "params": [fqn]} for fqn, entries in saved.entries.items()]
    )
    nested: StateDict = {"state": {}, "param_groups": groups}
    for fqn, state in saved.state.items():
        nested["state"].update(exchanged(fqn, state))
    for group in groups:
        group["params"] = [new for fqn in group["params"] for new in names.get(fqn, (fqn,))]
    return nested if is_nested else flattened(nested)


def _split_values(split: _Split | None, fqn: str, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if split is None:
        return {fqn: state}
    parts: list[dict[str, Any]] = [{} for _ in split.combs]
    for name, value in state.items():
        if name == MASTER and isinstance(value, Tensor) and is_duplicate(split.param, value.dtype):
            continue
        for part, piece in zip(parts, _split_value(split, f"{fqn}.{name}", value), strict=True):
            part[name] = piece
    return split.named(parts)


def _split_value(split: _Split, where: str, value: Any) -> list[Any]:
    count = len(split.combs)
    if not isinstance(value, Tensor):
        return [copy.deepcopy(value) for _ in range(count)]
    if value.dim() == 0:
        return [value.detach().clone() for _ in range(count)]
    is_flat_local = value.dim() == 1 and local_shard(value).numel() == split.chunks.local_numel
    if tuple(value.shape) == split.shape or (is_flat_local and is_dtensor(split.param)):
        return split.parts_of(value)
    raise ValueError(
        f"{where} has shape {tuple(value.shape)}, its parameter {split.shape}: it is not known how to split that. "
        f"Leave {split.match.fused} out of the rules"
    )


def _merged_values(match: Match, parts: Sequence[Mapping[str, Any]], values: Mapping[str, float]) -> dict[str, Any]:
    names = list(parts[0])
    if any(list(part) != names for part in parts):
        raise ValueError(f"{match.fused}: its parts have different state: {[list(part) for part in parts]}")
    return {name: _merged(match, [part[name] for part in parts], f"{match.fused}.{name}", values) for name in names}


def _merged(match: Match, parts: Sequence[Any], where: str, values: Mapping[str, float]) -> Any:
    first = parts[0]
    if not isinstance(first, Tensor) or first.dim() == 0:
        if any(not _equal(first, other) for other in parts[1:]):
            raise ValueError(f"{where}: its parts have {list(parts)}; one fused value cannot be all of them")
        return first
    origins = [_origins.get(part) for part in parts]
    if all(origin is not None for origin in origins):
        if any(origin.fused is not origins[0].fused or origin.number != n for n, origin in enumerate(origins)):
            raise ValueError(f"{where}: its parts were split from different tensors")
        return origins[0].fused
    if any(is_dtensor(part) for part in parts):
        raise ValueError(
            f"{where}: its parts are sharded and were not made by split_state_dict, so rows that belong together may "
            "be on different ranks. Split the state dict of the fused model, load into that, then merge"
        )
    return _put_together(match, parts, where, values)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _put_together(match: Match, parts: Sequence[Tensor], where: str, values: Mapping[str, float]) -> Tensor:
    first = parts[0]
    dim = match.rule.dim + (first.dim() if match.rule.dim < 0 else 0)
    sizes = [part.shape[dim] for part in parts]
    combs = match.rule.combs(sum(sizes), values, where)
    if [comb.size for comb in combs] != sizes:
        raise ValueError(f"{where}: the rule gives its parts sizes {[comb.size for comb in combs]}, they have {sizes}")
    fused = first.new_empty((*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :]))
    for part, comb in zip(parts, combs, strict=True):
        for block in range(comb.blocks) if comb.length > 1 else ():
            target = fused.narrow(dim, comb.start + block * comb.distance, comb.length)
            target.copy_(part.narrow(dim, block * comb.length, comb.length))
        if comb.length == 1:
            _plain_part(fused, dim, comb, where).copy_(part)
    return fused
