"""Merging: the parts of each fused tensor are exchanged for it, and so is their state.

Beside metadata, counters and other objects are looked at: there can be only one of each.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..core.errors import CheckpointError
from ..core.sizes import short_repr
from ..core.values import same_values
from ..fused.fusions import Fusion, Shape
from ..fused.keys import StateName
from ..fused.options import check_same_options
from ..fused.rules import Match
from ..stored.items import ItemReader
from .draft import ExchangeWork
from .param_groups import Groups, groups_in
from .roles import PARTS, Role


class Merging(ExchangeWork):
    """Exchange of parts for fused tensors."""

    side: ClassVar = PARTS

    def listed_as(self, fqn: Any, role: Role | None) -> Sequence[Any]:
        """Return what a param group lists instead of ``fqn``."""
        if role is None:
            return (fqn,)
        return (role.fused,) if role.number == 0 else ()

    def check_groups(self, groups: Groups) -> None:
        """Check that param groups allow it: the parts of one tensor must have the same options.

        Raises:
            CheckpointError: they have not.
        """
        options: dict[tuple[str, str], dict[str, Any]] = {}
        for name, content in groups.items():
            for group in groups_in(content, name):
                entries = {entry: value for entry, value in group.items() if entry != "params"}
                if name.is_list:  # the options are under keys of their own; groups are taken to differ
                    entries = {"listed in": name.key}
                options.update(((name.optimizer, str(fqn)), entries) for fqn in group.get("params", ()))
        for optimizer, roles in self.roles.by_optimizer():
            fused: dict[str, dict[str, Mapping[str, Any] | None]] = {}
            for role in roles:
                fused[role.fused] = {part: options.get((optimizer, part)) for part in role.parts}
            for key, of_parts in fused.items():
                try:
                    check_same_options(key, of_parts)
                except ValueError as error:
                    raise CheckpointError(f"{error}, with --exclude") from error

    def exchange_model(self) -> None:
        """Exchange the model's tensors.

        Raises:
            CheckpointError: see :func:`checkpoint_tools.exchange.exchange.find_exchange`, and for the next one.
            ValueError: from the rules.
        """
        for match in self.roles.model_matches():
            self._fuse(self._fused(match, match.fused, match.parts))
            self.draft.path_beside(match.parts[0], match.fused)

    def _fuse(self, fusion: Fusion) -> None:
        self.draft.fuse(fusion, old=fusion.parts, new=(fusion.fused,))

    def exchange_states(self) -> None:
        """Exchange the state of the optimizers."""
        entries: dict[tuple[str, str], dict[str, dict[int, StateName]]] = {}
        roles: dict[tuple[str, str], Role] = {}
        for name in self.names.states:
            role = self.roles.of_state(name)
            if role is not None and role.number is not None:
                of = (name.before, role.fused)
                roles[of] = role
                entries.setdefault(of, {}).setdefault(name.after, {})[role.number] = name
        reader = ItemReader(self.checkpoint)
        for of, by_entry in entries.items():
            self._merge_state(roles[of], by_entry, reader)

    def _merge_state(self, role: Role, by_entry: Mapping[str, Mapping[int, StateName]], reader: ItemReader) -> None:
        for by_number in by_entry.values():
            if len(by_number) < len(role.parts):
                missing = [part for number, part in enumerate(role.parts) if number not in by_number]
                entry = next(iter(by_number.values())).name
                raise CheckpointError(
                    f"{role.fused} cannot be merged: some of its parts have {entry}, and {', '.join(missing)} have "
                    "not; save them with the same state"
                )
            names = [by_number[number] for number in range(len(role.parts))]
            tensors = [self.checkpoint.tensors.get(name.key) for name in names]
            if all(tensor is not None and tensor.shape != () for tensor in tensors):
                self._merge_tensors(role, names)
            else:
                self._check_equal(names, reader)
                self.draft.copy(names[0], [role.fused])
                for name in names[1:]:
                    self.draft.drop(name.key)

    def _merge_tensors(self, role: Role, names: Sequence[StateName]) -> None:
        fused, path = names[0].renamed(role.fused)
        fusion = self._fused(role.match, fused, tuple(name.key for name in names))
        param = None if role.owner is None else self._param_shape(role.owner)
        if param is not None and param != fusion.shape:
            raise CheckpointError(
                f"{fused} would have shape {fusion.shape}, its parameter {param}: it is not known how to merge that; "
                f"leave {role.fused} out, with --exclude"
            )
        self._fuse(fusion)
        if path:
            self.draft.paths[fused] = path

    def _param_shape(self, owner: str) -> Shape | None:
        return next((fusion.shape for fusion in self.draft.fusions if owner in fusion.parts), None)

    def _fused(self, match: Match, fused: str, parts: tuple[str, ...]) -> Fusion:
        tensors = [self.checkpoint.tensors[part] for part in parts]
        first = tensors[0]
        for tensor in tensors[1:]:
            if tensor.dtype != first.dtype:
                raise CheckpointError(
                    f"{fused} cannot be merged: {tensor.key} is {tensor.dtype} and {first.key} {first.dtype}; convert "
                    "one of them first"
                )
        shapes = [tensor.shape for tensor in tensors]
        shape, dim = _fused_shape(match, shapes, fused)
        combs = match.rule.combs(shape[dim], self.values, fused)
        expected = [comb.part_shape(shape, dim) for comb in combs]
        if shapes != expected:
            raise CheckpointError(f"{fused}: the rule gives its parts the shapes {expected}, and they have {shapes}")
        return Fusion(fused, parts, shape, first.dtype, dim, combs)

    def _check_equal(self, names: Sequence[StateName], reader: ItemReader) -> None:
        values = [self._value(name.key, reader) for name in names]
        for name, value in zip(names[1:], values[1:], strict=True):
            if not same_values(values[0], value):
                raise CheckpointError(
                    f"{names[0].key} is {short_repr(values[0])} and {name.key} is {short_repr(value)}; one fused value "
                    "cannot be both"
                )

    def _value(self, key: str, reader: ItemReader) -> Any:
        if key in self.checkpoint.objects:
            return reader.read_object(self.checkpoint.objects[key])
        tensor = self.checkpoint.tensors[key]
        if tensor.shape != ():
            raise CheckpointError(f"{key} has shape {tensor.shape}, and other parts have a number there")
        return reader.read_chunk(tensor.chunks[0], tensor.dtype)


def _fused_shape(match: Match, shapes: Sequence[Shape], where: str) -> tuple[Shape, int]:
    """Compute the fused tensor's shape and fused dimension."""
    first = shapes[0]
    stacked = match.rule.layout == "stacked"
    ndim = len(first) + stacked
    dim = match.rule.dim_of((1,) * ndim, where)
    if any(len(shape) != len(first) for shape in shapes):
        raise CheckpointError(f"{where} cannot be merged: its parts have the shapes {list(shapes)}")
    size = len(shapes) if stacked else sum(shape[dim] for shape in shapes)
    return (*first[:dim], size, *first[dim + (not stacked) :]), dim
