"""Splitting and merging fused tensors of state dicts in memory, before saving or loading.

::

    model state, optimizer state ──find_matches──▶ fused keys ──chunks_of, part_chunks──▶ parts: views of fused memory
    parts ──(saved, or loaded into)──▶ merge_state_dict ──▶ the very fused tensors again

No collective, and for shards no copy: what is loaded into the parts is in the fused tensors. A part of a sharded tensor
is a DTensor whose local tensor carries its chunks (:class:`~fsdp_offload.checkpoint.ShardTensor`), since no placement
says which rows of it a rank has.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_offload.checkpoint import ShardChunks, ShardTensor, chunks_of, with_chunks, with_parameter_chunks
from fsdp_offload.checkpoint.chunks import says_its_chunks, tensor_parallel_ranks
from fsdp_offload.checkpoint.names import by_fqn, flattened, is_fsdp_dtensor
from fsdp_offload.checkpoint.state_dict import is_flat_state
from fsdp_offload.optimizers.masters import MASTER, is_duplicate
from fsdp_offload.torch_compat.dtensor import is_dtensor, local_shard, over_part

from ..core.parts import Comb, part_chunks, span_of
from .keys import Owner, Owners, check_same_options, holds_tensors
from .rules import DENSE_RANKS, EXPERT_RANKS, Match, Rule, find_matches, find_parts

StateDict = dict[str, Any]


class _Origin(NamedTuple):
    """Link from a part to the fused tensor that it views, or that its copy goes back to by ``dim`` and ``comb``."""

    fused: Tensor
    key: str
    number: int
    parts: int
    memory: Tensor
    dim: int
    comb: Comb
    ranks: int | None
    is_copy: bool


_origins: Any = WeakIdKeyDictionary()
"""Parts made here, while they live. Merging gives back what they were made of."""


def split_state_dict(
    model_state: Mapping[str, Any],
    optim_state: Mapping[str, Any] | None,
    rules: Sequence[Rule],
    *,
    values: Mapping[str, float] | None = None,
    model: nn.Module | None = None,
) -> tuple[StateDict, StateDict | None]:
    """Exchange every fused tensor for its parts, in the model's and the optimizer's state dict.

    Args:
        model_state: ``{fqn: tensor}``: DTensors, plain tensors, Megatron-FSDP parameters.
        optim_state: in any layout of ``get_optimizer_state_dict``, or ``None``. Its names may have ``module.`` in front
            more often than the model's. State that is shaped like the parameter is split like it, also where it is the
            flat local part of a Megatron-FSDP buffer; counters and numbers are copied; ``master_param`` of the
            parameter's own dtype repeats it and is left out. State of other parameters gets their chunks where its own
            placements are nominal. Megatron's ``param_to_group_meta`` stays as it is: that goes by the names of the
            fused parameters there.
        rules: see :mod:`checkpoint_tools.fused.rules`.
        values: config values that the rules' sizes name. ``tp_size``, and for experts ``etp_size``, are taken from the
            mesh of each parameter that tells them; elsewhere ``etp_size`` is ``tp_size`` by default, as in Megatron.
        model: whose ``state_dict()`` ``model_state`` is, if that is one of Megatron-FSDP: it knows the slices that the
            values have lost. Where experts are renumbered, call
            :func:`~fsdp_offload.checkpoint.with_parameter_chunks` before that, instead.

    Returns:
        New dicts; what is not fused is taken over as it is. Parts are views of the memory of the fused tensors, except
        where a plain tensor was fused in groups, which no strides can tell: those are copies, and
        :func:`merge_state_dict` writes them back.

    Raises:
        ValueError: rules do not fit the keys or the shapes; state of another shape than its parameter, by name.
    """
    if model is not None:
        model_state = with_parameter_chunks(model, model_state)
    matches = find_matches(model_state, rules)
    shapes = {key: tuple(value.shape) for key, value in model_state.items() if isinstance(value, Tensor)}
    splits = {match.fused: _split_of(match, model_state[match.fused], shapes, values or {}) for match in matches}
    split_model: StateDict = {}
    for key, value in model_state.items():
        split_model.update(splits[key].named(splits[key].parts_of(value, key)) if key in splits else {key: value})
    if optim_state is None:
        return split_model, None
    owners = _owners_of(optim_state, model_state, splits.__contains__)
    _check_same_names(owners, splits, rules)
    split_of = {fqn: splits.get(owner.key) if owner else None for fqn, owner in owners.items()}
    names = {fqn: _own(owners[fqn], split.match.parts) for fqn, split in split_of.items() if split is not None}

    def exchanged(fqn: str, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        split, owner = split_of[fqn], owners[fqn]
        if split is None:
            return {fqn: state if owner is None else _with_chunks_of(model_state[owner.key], state)}
        return dict(zip(names[fqn], _split_values(split, fqn, state), strict=True))

    return split_model, _exchange(optim_state, names, exchanged)


def merge_state_dict(
    model_state: Mapping[str, Any],
    optim_state: Mapping[str, Any] | None,
    rules: Sequence[Rule],
    *,
    values: Mapping[str, float] | None = None,
) -> tuple[StateDict, StateDict | None]:
    """Exchange parts for the fused tensors: the inverse of :func:`split_state_dict`.

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
    saved = by_fqn(optim_state)
    states = saved.state
    owners = _owners_of(optim_state, model_state, {*merged, *others}.__contains__)
    fqn_of = {owner.key: fqn for fqn, owner in owners.items() if owner is not None}
    for match in matches:
        check_same_options(match.fused, {part: saved.entries.get(fqn_of.get(part, part)) for part in match.parts})
    names: dict[str, Sequence[str]] = {}
    for fqn, owner in owners.items():
        if owner is not None and owner.key in merged:
            names[fqn] = _own(owner, (merged[owner.key].fused,))
        elif owner is not None and owner.key in others:
            names[fqn] = ()

    def merge(fqn: str, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
        if fqn not in names:
            return {fqn: state}
        if not names[fqn]:
            return {}
        match = merged[owners[fqn].key]  # type: ignore[union-attr]  # it has one, since it has a name
        parts = [states.get(fqn_of.get(part, part), {}) for part in match.parts]
        return {names[fqn][0]: _merged_values(match, parts, values or {})}

    return model, _exchange(optim_state, names, merge)


# One tensor ----------------------------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """Recipe by which one parameter, and all state shaped like it, is split."""

    match: Match
    shape: tuple[int, ...]
    dim: int
    combs: tuple[Comb, ...]
    ranks: int | None  # that divide it, as its mesh tells
    chunks: ShardChunks  # this rank's, of the fused parameter
    param: Tensor

    def named(self, parts: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.match.parts, parts, strict=True))

    def parts_of(self, value: Tensor, where: str) -> list[Tensor]:
        """Views of ``value``, which has this rank's part of a tensor like the parameter."""
        memory = _memory_of(value, where, is_sharded=is_dtensor(value) or is_dtensor(self.param))
        chunks = self._chunks_in(value, memory)
        if chunks is None:
            raise ValueError(
                f"{where} has shape {tuple(value.shape)}, its parameter {self.shape}: it is not known how to split "
                f"that. Exclude {self.match.fused}"
            )
        found = [self._part(value, memory, chunks, comb) for comb in self.combs]
        for number, (part, comb) in enumerate(zip(found, self.combs, strict=True)):
            is_copy = not is_dtensor(part) and not _is_view(comb)
            _origins[part] = _Origin(
                value, self.match.fused, number, len(found), memory, self.dim, comb, self.ranks, is_copy
            )
        return found

    def _chunks_in(self, value: Tensor, memory: Tensor) -> ShardChunks | None:
        """List what ``memory`` holds of the fused tensor; None if that cannot be told."""
        is_whole_shape = tuple(value.shape) == self.shape
        if self._is_plain(value, memory):
            return chunks_of(memory) if is_whole_shape else None
        if is_whole_shape and is_dtensor(value):
            # Placements of Megatron-FSDP's tensors are nominal: their chunks are the parameter's.
            is_nominal = says_its_chunks(self.param) and not says_its_chunks(value)
            own = self.chunks if is_nominal else chunks_of(value)
            return own if own.local_numel == memory.numel() else None
        # What some optimizers keep: this rank's elements, shaped as in the parameter or flat, and maybe without a mesh.
        is_shaped = tuple(memory.shape) == tuple(local_shard(self.param).shape)
        is_flat = is_flat_state(self.param, value) or (memory.dim() == 1 and says_its_chunks(self.param))
        is_local = memory.numel() == self.chunks.local_numel and (is_shaped or is_flat)
        return self.chunks if is_local else None

    def _is_plain(self, value: Tensor, memory: Tensor) -> bool:
        """Tell whether ``value`` is a whole tensor; beside a sharded parameter, if it exceeds the shard."""
        if is_dtensor(value):
            return False
        return not is_dtensor(self.param) or memory.numel() != self.chunks.local_numel

    def _part(self, value: Tensor, memory: Tensor, chunks: ShardChunks, comb: Comb) -> Tensor:
        if self._is_plain(value, memory):
            return _plain_part(memory, self.dim, comb)
        begin, part = span_of(part_chunks(chunks, self.dim, comb))
        stretch = memory.view(-1)[begin : begin + part.local_numel]
        return over_part(value if is_dtensor(value) else self.param, ShardTensor(stretch, part), part.global_shape)


def _memory_of(value: Tensor, where: str, *, is_sharded: bool) -> Tensor:
    """Return this rank's elements as a plain tensor, without a copy."""
    local = local_shard(value)
    memory = (local.local if isinstance(local, ShardTensor) else local).detach()
    if type(memory) is not Tensor:
        raise ValueError(f"{where} is a {type(memory).__name__}, of which no views can be taken; convert it first")
    if is_sharded and not memory.is_contiguous():
        raise ValueError(f"{where}: expected a contiguous local tensor, got strides {memory.stride()}")
    return memory


def _split_of(match: Match, param: Any, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, float]) -> _Split:
    if not isinstance(param, Tensor):
        raise ValueError(f"{match.fused}: expected a tensor, got {type(param).__name__}")
    shape = tuple(param.shape)
    dim = match.rule.dim_of(shape, match.fused)
    ranks = tensor_parallel_ranks(param)
    combs = match.rule.combs(shape[dim], _with_own_ranks(match.rule, ranks, values, match.fused), match.fused)
    match.check_sibling(shapes, combs[0].size)
    return _Split(match, shape, dim, combs, ranks, chunks_of(param), param)


def _with_own_ranks(rule: Rule, ranks: int | None, values: Mapping[str, float], where: str) -> Mapping[str, float]:
    """Divide by as many tensor-parallel ranks as the parameter's own mesh has, where that tells.

    Experts have a mesh of their own, on which it may be another number than that of dense layers.

    Raises:
        ValueError: the number given is another.
    """
    name = str(rule.groups)
    if ranks is None or name not in (DENSE_RANKS, EXPERT_RANKS):
        return values
    if values.get(name, ranks) != ranks:
        raise ValueError(
            f"{where}: expected {name}={ranks}, as many tensor-parallel ranks as its own mesh has, got "
            f"{name}={values[name]}; leave it out"
        )
    return {**values, name: ranks}


def _is_view(comb: Comb) -> bool:
    """Tell whether strides can express the part of a plain tensor."""
    return comb.blocks == 1 or comb.length == 1


def _plain_part(whole: Tensor, dim: int, comb: Comb) -> Tensor:
    if comb.is_dropped:
        return whole.select(dim, comb.start)
    if comb.length == 1:
        return whole[(*(slice(None),) * dim, slice(comb.start, None, comb.distance))]
    blocks = [whole.narrow(dim, comb.start + n * comb.distance, comb.length) for n in range(comb.blocks)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)


def _write(whole: Tensor, dim: int, comb: Comb, part: Tensor) -> None:
    if _is_view(comb):
        _plain_part(whole, dim, comb).copy_(part)
        return
    for block in range(comb.blocks):
        target = whole.narrow(dim, comb.start + block * comb.distance, comb.length)
        target.copy_(part.narrow(dim, block * comb.length, comb.length))


# Optimizer state -----------------------------------------------------------------------------------------------------


def _with_chunks_of(param: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Give state of an unsplit parameter that parameter's chunks, where its own placements are nominal."""
    if not isinstance(param, Tensor) or not is_dtensor(param) or not says_its_chunks(param):
        return state
    chunks = chunks_of(param)
    return {
        name: with_chunks(value, shard_chunks=chunks) if _is_nominal(value, chunks) else value
        for name, value in state.items()
    }


def _is_nominal(value: Any, chunks: ShardChunks) -> bool:
    if not isinstance(value, Tensor) or not is_dtensor(value) or says_its_chunks(value):
        return False
    return tuple(value.shape) == chunks.global_shape and local_shard(value).numel() == chunks.local_numel


def _owners_of(
    optim_state: Mapping[str, Any], model_state: Mapping[str, Any], is_changed: Callable[[str], bool]
) -> dict[str, Owner | None]:
    """Find the owners of state by FQN, among all that the optimizer has and its groups list."""
    saved = by_fqn(optim_state)
    owners = Owners(model_state)
    return {
        fqn: owners.of(fqn, lambda one, other: not (is_changed(one) or is_changed(other)))
        for fqn in dict.fromkeys((*saved.state, *saved.entries))
    }


def _own(owner: Owner | None, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the optimizer's own names for these tensors of the model."""
    assert owner is not None, "it has been exchanged by its owner"
    return tuple(owner.own(key, owner.own_lead + owner.key) for key in keys)


def _check_same_names(
    owners: Mapping[str, Owner | None], splits: Mapping[str, "_Split"], rules: Sequence[Rule]
) -> None:
    """Refuse a fused parameter in the optimizer's state alone: it would silently stay fused."""
    kept = [fqn for fqn, owner in owners.items() if owner is None or owner.key not in splits]
    strange = [fqn for fqn in kept if any(rule.match(fqn) for rule in rules)]
    if strange:
        raise ValueError(
            f"the optimizer has state of {strange[0]}, which is fused, and the model's state dict has no such tensor. "
            "Give both by the same names; for a model whose state_dict() splits it, dict(model.named_parameters())"
        )


def _exchange(
    optim_state: Mapping[str, Any],
    names: Mapping[str, Sequence[str]],
    exchanged: Callable[[str, dict[str, Any]], dict[str, dict[str, Any]]],
) -> StateDict:
    """Rebuild an optimizer's state dict in the same form with other parameters.

    Args:
        optim_state: either form.
        names: of the parameters that take one's place: several, one or none.
        exchanged: the state of one, as that of those.
    """
    saved = by_fqn(optim_state)
    if is_fsdp_dtensor(optim_state):
        states = (exchanged(fqn, state) for fqn, state in saved.state.items())
        return {**optim_state, "state": {new: values for each in states for new, values in each.items()}}
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


def _split_values(split: _Split, fqn: str, state: dict[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{} for _ in split.combs]
    for name, value in state.items():
        if name == MASTER and isinstance(value, Tensor) and is_duplicate(split.param, value.dtype):
            continue
        for part, piece in zip(parts, _split_value(split, f"{fqn}.{name}", value), strict=True):
            part[name] = piece
    return parts


def _split_value(split: _Split, where: str, value: Any) -> list[Any]:
    count = len(split.combs)
    if not isinstance(value, Tensor):
        if holds_tensors(value):
            raise ValueError(f"{where} is a {type(value).__name__} of tensors: it is not known how to split that")
        return [copy.deepcopy(value) for _ in range(count)]
    if value.dim() == 0:
        return [value.detach().clone() for _ in range(count)]
    return split.parts_of(value, where)


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
    # Other parts of the same tensor, or parts of others, may be merged into something else: then they are just tensors.
    if all(origin is not None and (origin.key, origin.parts) == (match.fused, len(parts)) for origin in origins):
        if any(origin.fused is not origins[0].fused or origin.number != n for n, origin in enumerate(origins)):
            raise ValueError(f"{where}: its parts were split from different tensors")
        own = _with_own_ranks(match.rule, origins[0].ranks, values, where)
        _check_same_layout(match.rule, [origin.comb for origin in origins], where, own)
        for origin, part in zip(origins, parts, strict=True):
            if origin.is_copy:
                _write(origin.memory, origin.dim, origin.comb, part)
        return origins[0].fused
    if any(is_dtensor(part) for part in parts):
        raise ValueError(
            f"{where}: its parts are sharded and were not made by split_state_dict, so rows that belong together may "
            "be on different ranks. Split the state dict of the fused model, load into that, then merge"
        )
    return _put_together(match, parts, where, values)


def _check_same_layout(rule: Rule, combs: Sequence[Comb], where: str, values: Mapping[str, float]) -> None:
    size = len(combs) if combs[0].is_dropped else sum(comb.size for comb in combs)
    try:
        expected = rule.combs(size, values, where)
    except ValueError:  # config values that only splitting needs are not given
        return
    if tuple(combs) != tuple(expected):
        raise ValueError(
            f"{where}: its parts were split with another rule; merge them with the one they were split with"
        )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _put_together(match: Match, parts: Sequence[Tensor], where: str, values: Mapping[str, float]) -> Tensor:
    shape = _fused_shape(match.rule, parts, where)
    dim = match.rule.dim_of(shape, where)
    combs = match.rule.combs(shape[dim], values, where)
    expected = [comb.part_shape(shape, dim) for comb in combs]
    found = [tuple(part.shape) for part in parts]
    if found != expected:
        raise ValueError(f"{where}: its parts have shapes {found}, and the rule says {expected}")
    if len({(part.dtype, part.device) for part in parts}) > 1:
        kinds = [f"{part.dtype} on {part.device}" for part in parts]
        raise ValueError(f"{where}: its parts are {', '.join(kinds)}; a fused tensor is all of one dtype and device")
    fused = parts[0].new_empty(shape)
    for part, comb in zip(parts, combs, strict=True):
        _write(fused, dim, comb, part.detach())
    return fused


def _fused_shape(rule: Rule, parts: Sequence[Tensor], where: str) -> list[int]:
    shape = list(parts[0].shape)
    if rule.layout == "stacked":
        shape.insert(rule.dim + (len(shape) + 1 if rule.dim < 0 else 0), len(parts))
        return shape
    dim = rule.dim_of(shape, where)
    if any(part.dim() != len(shape) for part in parts):
        raise ValueError(f"{where}: its parts have shapes {[tuple(part.shape) for part in parts]}")
    shape[dim] = sum(part.shape[dim] for part in parts)
    return shape
