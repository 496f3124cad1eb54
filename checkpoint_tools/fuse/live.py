"""Splitting and merging fused tensors of state dicts in memory, before saving or loading.

::

    model state, optimizer state ──flat keys──▶ plan_exchange ──▶ Exchange ──▶ parts: views of fused memory
    parts ──(saved, or loaded into)──▶ merge_state_dict ──▶ the same fused tensors

Neither direction needs a collective or copies a shard: loading into the parts writes the fused tensors. A part of a
sharded tensor is a DTensor whose local tensor carries its chunks (:class:`~fsdp_offload.checkpoint.ShardTensor`), since
no placement can describe which rows of the part a rank has.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_offload.checkpoint import ShardChunks, ShardTensor, chunks_of, with_chunks, with_parameter_chunks
from fsdp_offload.checkpoint.chunks import MEGATRON_INDEX, says_its_chunks
from fsdp_offload.checkpoint.names import GROUP_META, by_fqn, is_fsdp_dtensor
from fsdp_offload.checkpoint.state_dict import is_flat_state
from fsdp_offload.fsdp.dtensor import is_dtensor, local_shard, over_part
from fsdp_offload.optimizers.masters import MASTER
from fsdp_offload.policy import check_is, tells

from ..core.regions import Comb, part_chunks, span_of
from ..core.text import CheckpointError
from ..stored.checkpoint import Path
from .names import GroupName, Names, sorted_out
from .plan import Exchange, Fusion, Layout, Source, plan_exchange
from .rules import DENSE_RANKS, EXPERT_RANKS, Match, Rule, Way

StateDict = dict[str, Any]
_log = logging.getLogger(__name__)


class _Origin(NamedTuple):
    """Link from a part to the fused tensor that it views or copies; ``ranks``: tensor-parallel ranks that divide it."""

    fused: Tensor
    rule_key: str
    number: int
    layout: Layout
    memory: Tensor
    ranks: int | None
    is_copy: bool


_origins: Any = WeakIdKeyDictionary()
"""Part → its origin, while the part is alive; merging parts returns the fused tensor of their origin."""


@tells("split_state_dict(model_state, optim_state, rules, values={'tp_size': 2})")
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
            more often than the model's. State shaped like its parameter is split like it, also state that is the flat
            local part of a Megatron-FSDP buffer. Counters and numbers are copied. ``master_param`` with the parameter's
            dtype repeats the parameter and is left out. State of unsplit parameters gets the parameter's chunks if the
            state's placements do not describe its chunks (Megatron-FSDP). Megatron's ``param_to_group_meta`` stays
            unchanged: its keys are always the fused names.
        rules: see :mod:`checkpoint_tools.fuse.rules`.
        values: config values that the rules' sizes name. ``tp_size``, and for experts ``etp_size``, are taken from the
            parameter's mesh if the mesh shows them; otherwise ``etp_size`` is ``tp_size`` by default, as in Megatron.
        model: the Megatron-FSDP model of which ``model_state`` is the ``state_dict()``. Its parameters know their
            slices, which the state dict has lost. If you renumber experts, leave this out, and call
            :func:`~fsdp_offload.checkpoint.with_parameter_chunks` before renumbering.

    Returns:
        New dicts. Tensors that are not fused stay; those of MLPs without a gate are logged. Parts are views of the
        fused tensors' memory. Only parts of plain tensors that are fused in groups are copies, as strides cannot
        express them; :func:`merge_state_dict` writes these copies back.

    Raises:
        ValueError: rules do not fit the keys or the shapes, or state has another shape than its parameter.
    """
    if model is not None:
        model_state = with_parameter_chunks(model, model_state)
    return _exchanged("split", model_state, optim_state, rules, values or {})


def merge_state_dict(
    model_state: Mapping[str, Any],
    optim_state: Mapping[str, Any] | None,
    rules: Sequence[Rule],
    *,
    values: Mapping[str, float] | None = None,
) -> tuple[StateDict, StateDict | None]:
    """Exchange parts for the fused tensors: the inverse of :func:`split_state_dict`.

    If :func:`split_state_dict` made the parts, return the original fused tensors, with the values that were loaded into
    the parts. Other parts must be plain tensors; they are copied into a new fused tensor.

    Raises:
        ValueError: parts are missing, do not belong together or differ in a counter; or parts are sharded, but not made
            by :func:`split_state_dict`, so that rows of the fused tensor may be on other ranks.
    """
    return _exchanged("merge", model_state, optim_state, rules, values or {})


def _exchanged(
    way: Way,
    model_state: Mapping[str, Any],
    optim_state: Mapping[str, Any] | None,
    rules: Sequence[Rule],
    values: Mapping[str, float],
) -> tuple[StateDict, StateDict | None]:
    line = f"{way}_state_dict(model.state_dict(), get_optimizer_state_dict(model, optimizer), rules)"
    given: Any = rules
    has_rules = isinstance(given, Sequence) and given and all(isinstance(rule, Rule) for rule in given)
    if not (has_rules and isinstance(model_state, Mapping)):
        got = f"{type(model_state).__name__} and {rules!r:.60}"
        raise TypeError(
            f"expected model.state_dict() and rules, such as preset('hf-gate-up'), got {got}. Write {line}."
        )
    check_is(optim_state, Mapping | None, "expected the state dict of an optimizer", line)
    check_is(values, Mapping, "expected config values by name", f"{line[:-1]}, values={{'tp_size': 2}})")
    is_empty = not optim_state or optim_state == {"state": {}}  # no optimizer, or one without state
    source = _StateDicts(model_state, None if is_empty else optim_state, values)
    found = plan_exchange(way, source, [rule.expanded(values) for rule in rules])
    for note in found.notes:
        _log.info(note)
    for fqn in found.listed if way == "split" else ():
        if fqn not in found.owners:  # no model shows how it is sharded
            raise CheckpointError(
                f"the optimizer has state of {fqn[1]}, which is fused, and the model's state dict has no such tensor. "
                "Give both by the same names; for a model whose state_dict() splits it, dict(model.named_parameters())"
            )
    new = (_split if way == "split" else _merged)(found, source)
    model = {key: value for old in model_state for key, value in new[old].items()}
    if is_empty:
        return model, None if optim_state is None else {**optim_state}
    optim = {key: value for old in source.optim for key, value in new[old].items()}
    return model, source.nested(optim, found)


# State dicts under flat keys ------------------------------------------------------------------------------------------


class _StateDicts(Source):
    """The model's state dict under its own keys, and the optimizer's under ``optim.``."""

    def __init__(
        self, model_state: Mapping[str, Any], optim_state: Mapping[str, Any] | None, values: Mapping[str, float]
    ) -> None:
        self._lead = "optim"
        while any(key.startswith(f"{self._lead}.") for key in model_state):
            self._lead += "_"
        self._before = optim_state or {}
        self.optim: StateDict = {}
        paths: dict[str, Path] = {}
        groups: dict[GroupName, Any] = {}
        if optim_state is not None:
            saved = by_fqn(optim_state)
            self._states = saved.state
            self._is_flat = not is_fsdp_dtensor(optim_state) and "param_groups" not in optim_state
            name = GroupName(f"{self._lead}.param_groups", self._lead, is_list=False)
            if self._is_flat:
                found: dict[tuple[str, ...], Any] = {(key,): value for key, value in optim_state.items()}
            else:
                found = {("state", str(fqn), str(at)): v for fqn, of in saved.state.items() for at, v in of.items()}
                entries = [{**of, "params": [fqn]} for fqn, of in saved.entries.items()]
                groups = {name: entries if GROUP_META in optim_state else optim_state["param_groups"]}
            for path, value in found.items():
                key = ".".join((self._lead, *path))
                self.optim[key] = value
                paths[key] = (self._lead, *path)
        self.all: StateDict = {**model_state, **self.optim}
        states = sorted_out(self.optim, paths)
        tensors = {key: value for key, value in self.all.items() if isinstance(value, Tensor)}
        super().__init__(Names(states.states, (), tuple(model_state)), tensors, paths, groups, values)

    def value(self, key: str) -> Any:
        value = self.all[key]
        return local_shard(value).detach() if isinstance(value, Tensor) else value

    def values_for(self, rule: Rule, key: str) -> Mapping[str, float]:
        """Take the number of tensor-parallel ranks from the parameter's own mesh: experts may have another number."""
        value, name = self.all[key], str(rule.groups)
        ranks = _origins[value].ranks if value in _origins else _tensor_parallel_ranks(value)
        if ranks is None or name not in (DENSE_RANKS, EXPERT_RANKS):
            return self.values
        if self.values.get(name, ranks) != ranks:
            raise CheckpointError(
                f"{key}: expected {name}={ranks}, as many tensor-parallel ranks as its own mesh has, got "
                f"{name}={self.values[name]}; leave it out"
            )
        return {**self.values, name: ranks}

    def joined(self, match: Match, keys: Sequence[str], where: str) -> Layout:
        origins = _origins_of(match.fused, [self.all[key] for key in keys], where)
        return super().joined(match, keys, where) if origins is None else origins[0].layout

    def nested(self, optim: StateDict, found: Exchange) -> StateDict:
        """Return the optimizer's state dict in its original layout; ``optim``: values under flat keys."""
        if self._is_flat:
            return {key.removeprefix(f"{self._lead}."): value for key, value in optim.items()}
        state: StateDict = {new: {} for fqn in self._states for new in found.listed.get((self._lead, fqn), (fqn,))}
        for key, value in optim.items():
            _, _, fqn, name = found.paths.get(key) or self.paths[key]
            state[str(fqn)][name] = value
        if is_fsdp_dtensor(self._before):
            return {**self._before, "state": state}
        ((groups, content),) = self.groups.items()
        return {"state": state, "param_groups": found.objects.get(groups.key, content)}


def _split(found: Exchange, source: _StateDicts) -> dict[str, StateDict]:
    """Map each old key to the new keys and values that replace it."""
    fusions = {fusion.fused: fusion for fusion in found.fusions}
    owners = {name.key: found.owners.get((name.optimizer, name.fqn)) for name in source.names.states}
    new: dict[str, StateDict] = {}
    for key, value in source.all.items():
        fusion, owner = fusions.get(key), owners.get(key)
        if fusion is not None:
            param = source.all[fusion.owner or key]
            is_master = key in owners and key.rpartition(".")[2] == MASTER
            new[key] = {} if is_master and value.dtype == param.dtype else _parts_of(fusion, param, value)
        elif key in found.copies:
            is_tensor = isinstance(value, Tensor)
            new[key] = {
                part: value.detach().clone() if is_tensor else copy.deepcopy(value) for part in found.copies[key]
            }
        else:
            new[key] = {key: value if owner is None else _with_chunks_of(source.all[owner], value)}
    return new


def _with_chunks_of(param: Any, value: Any) -> Any:
    """Give ``value``, state of an unsplit parameter, the parameter's chunks, if the state's placements are nominal."""
    if not all(isinstance(each, Tensor) and is_dtensor(each) for each in (param, value)):
        return value
    if says_its_chunks(value) or not says_its_chunks(param):
        return value
    chunks = chunks_of(param)
    is_alike = tuple(value.shape) == chunks.global_shape and local_shard(value).numel() == chunks.local_numel
    return with_chunks(value, shard_chunks=chunks) if is_alike else value


def _parts_of(fusion: Fusion, param: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Return the parts of ``value``, the fused parameter itself or its state, as views."""
    local = local_shard(value)
    memory = (local.local if isinstance(local, ShardTensor) else local).detach()  # this rank's elements, no copy
    if type(memory) is not Tensor:
        what = f"{fusion.fused} is a {type(memory).__name__}"
        raise CheckpointError(f"{what}, of which no views can be taken; convert it first")
    if (is_dtensor(value) or is_dtensor(param)) and not memory.is_contiguous():
        raise CheckpointError(f"{fusion.fused}: expected a contiguous local tensor, got strides {memory.stride()}")
    own = chunks_of(param)
    # A plain tensor is whole, unless the parameter is sharded and its shard has the same number of elements.
    is_plain = not is_dtensor(value) and (not is_dtensor(param) or memory.numel() != own.local_numel)
    chunks = _chunks_in(fusion, param, own, value, memory, is_plain=is_plain)
    if chunks is None:
        raise CheckpointError(
            f"{fusion.fused} has shape {tuple(value.shape)}, its parameter {fusion.shape}: it is not known how to "
            f"split that. Exclude {fusion.owner}"
        )
    layout, ranks = (fusion.shape, fusion.dim, fusion.combs), _tensor_parallel_ranks(param)
    found = {}
    for number, (key, comb) in enumerate(zip(fusion.parts, fusion.combs, strict=True)):
        if is_plain:
            blocks = _blocks_of(memory, fusion.dim, comb)  # copied if strides cannot express the part
            part = blocks if comb.is_dropped else blocks.flatten(fusion.dim, fusion.dim + 1)
        else:
            begin, of_part = span_of(part_chunks(chunks, fusion.dim, comb))
            stretch = memory.view(-1)[begin : begin + of_part.local_numel]
            like = value if is_dtensor(value) else param
            part = over_part(like, ShardTensor(stretch, of_part), of_part.global_shape)
        is_copy = not is_dtensor(part) and comb.blocks > 1 and comb.length > 1
        _origins[part] = _Origin(value, str(fusion.owner), number, layout, memory, ranks, is_copy)
        found[key] = part
    return found


def _tensor_parallel_ranks(tensor: Tensor) -> int | None:
    """Count the tensor-parallel ranks that divide a DTensor, from its mesh; ``None`` if unknown."""
    if not isinstance(tensor, DTensor):
        return None
    is_megatron, index = hasattr(tensor, MEGATRON_INDEX), getattr(tensor, MEGATRON_INDEX, None)
    called = (getattr(index, "tp_dim", None),) if is_megatron else ("tp", "etp")
    named = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, tensor.device_mesh.shape, strict=False)
    dividing = {name: ranks for name, placement, ranks in named if placement.is_shard()}
    return next((dividing[name] for name in called if name in dividing), 1 if is_megatron else None)


def _chunks_in(
    fusion: Fusion, param: Tensor, own: ShardChunks, value: Tensor, memory: Tensor, *, is_plain: bool
) -> ShardChunks | None:
    """Return the chunks of the fused tensor that ``memory`` holds, or None; ``own``: the parameter's chunks."""
    is_whole_shape = tuple(value.shape) == fusion.shape
    if is_plain:
        return chunks_of(memory) if is_whole_shape else None
    if is_whole_shape and is_dtensor(value):
        # Placements of Megatron-FSDP's tensors are nominal: they have the parameter's chunks.
        is_nominal = says_its_chunks(param) and not says_its_chunks(value)
        chunks = own if is_nominal else chunks_of(value)
        return chunks if chunks.local_numel == memory.numel() else None
    # Some optimizers keep state of this rank's elements as a plain tensor, in the parameter's local shape or flat.
    is_shaped = tuple(memory.shape) == tuple(local_shard(param).shape)
    is_flat = is_flat_state(param, value) or (memory.dim() == 1 and says_its_chunks(param))
    return own if memory.numel() == own.local_numel and (is_shaped or is_flat) else None


def _blocks_of(whole: Tensor, dim: int, comb: Comb) -> Tensor:
    if comb.is_dropped:
        return whole.select(dim, comb.start)
    blocks: Tensor = whole.unflatten(dim, (comb.blocks, comb.distance))
    return blocks.narrow(dim + 1, comb.start, comb.length)


def _origins_of(rule_key: str | None, parts: Sequence[Tensor], where: str) -> list[_Origin] | None:
    """Return the origins of ``parts``, in order; None if they were not all made by splitting ``rule_key``."""
    origins: list[_Origin] = [origin for part in parts if (origin := _origins.get(part)) is not None]
    if [(each.rule_key, len(each.layout[2])) for each in origins] != [(rule_key, len(parts))] * len(parts):
        return None
    if any(each.fused is not origins[0].fused or each.number != number for number, each in enumerate(origins)):
        raise CheckpointError(f"{where}: its parts were split from different tensors")
    return origins


def _merged(found: Exchange, source: _StateDicts) -> dict[str, StateDict]:
    """Map each old key to the new keys and values that replace it; a fused tensor takes its first part's place."""
    new = {key: dict.fromkeys(found.copies.get(key, (key,)), value) for key, value in source.all.items()}
    for fusion in found.fusions:
        parts = [source.all[part] for part in fusion.parts]
        new.update((part, {}) for part in fusion.parts)
        origins = _origins_of(fusion.owner, parts, fusion.fused)
        if origins is not None:
            for part, origin, comb in zip(parts, origins, fusion.combs, strict=True):
                if origin.is_copy:
                    blocks = _blocks_of(origin.memory, fusion.dim, comb)
                    blocks.copy_(part.reshape(blocks.shape))
            new[fusion.parts[0]] = {fusion.fused: origins[0].fused}
            continue
        if any(is_dtensor(part) for part in parts):
            raise CheckpointError(
                f"{fusion.fused}: its parts are sharded and were not made by split_state_dict, so rows that belong "
                "together may be on different ranks. Split the state dict of the fused model, load into that, then "
                "merge"
            )
        whole = parts[0].new_empty(fusion.shape)
        for part, comb in zip(parts, fusion.combs, strict=True):
            blocks = _blocks_of(whole, fusion.dim, comb)
            blocks.copy_(part.detach().reshape(blocks.shape))
        new[fusion.parts[0]] = {fusion.fused: whole}
    return new
