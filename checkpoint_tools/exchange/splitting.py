"""Splitting: each fused tensor is exchanged for its parts, and so is the state of it. Only metadata are looked at."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..core.errors import CheckpointError
from ..core.parts import Comb
from ..fused.fusions import Fusion, Shape
from ..fused.keys import StateName
from ..fused.options import holds_tensors
from ..fused.rules import Match
from ..stored.items import ItemReader
from .draft import ExchangeWork
from .param_groups import Groups
from .roles import FUSED, Role


class Splitting(ExchangeWork):
    """Exchange of fused tensors for parts."""

    side: ClassVar = FUSED

    def listed_as(self, fqn: Any, role: Role | None) -> Sequence[Any]:
        """Return what a param group lists instead of ``fqn``."""
        return (fqn,) if role is None else role.parts

    def check_groups(self, groups: Groups) -> None:
        """Accept all param groups: every part has the options of the whole."""

    def exchange_model(self) -> None:
        """Exchange the model's tensors.

        Raises:
            CheckpointError: see :func:`checkpoint_tools.exchange.exchange.find_exchange`, and for the next one.
            ValueError: from the rules.
        """
        for match in self.roles.model_matches():
            tensor = self.checkpoint.tensors[match.fused]
            dim, combs = self._divided(match, tensor.shape, self.roles.model_shapes)
            self._fuse(Fusion(match.fused, match.parts, tensor.shape, tensor.dtype, dim, combs))
            for part in match.parts:
                self.draft.path_beside(match.fused, part)

    def _fuse(self, fusion: Fusion) -> None:
        self.draft.fuse(fusion, old=(fusion.fused,), new=fusion.parts)

    def _divided(self, match: Match, shape: Shape, shapes: Mapping[str, Shape]) -> tuple[int, tuple[Comb, ...]]:
        dim = match.rule.dim_of(shape, match.fused)
        combs = match.rule.combs(shape[dim], self.values, match.fused)
        match.check_sibling(shapes, combs[0].size)
        return dim, combs

    def exchange_states(self) -> None:
        """Exchange the state of the optimizers."""
        shapes = _shapes_of_state(self.names.states, self.checkpoint.tensors)
        for name in self.names.states:
            role = self.roles.of_state(name)
            if role is None:
                continue
            tensor = self.checkpoint.tensors.get(name.key)
            param = None if role.owner is None else self.checkpoint.tensors[role.owner]
            if tensor is None or tensor.shape == ():
                if tensor is None:
                    self._check_object(name)
                self.draft.copy(name, role.parts)
            else:
                shape = shapes[name.optimizer, name.fqn] if param is None else param.shape
                self._split_state(name, role, shape, shapes if param is None else None)

    def _check_object(self, name: StateName) -> None:
        if holds_tensors(ItemReader(self.checkpoint).read_object(self.checkpoint.objects[name.key])):
            raise CheckpointError(
                f"{name.key} is an object with tensors in it, and it is not known how to split that; leave its "
                "parameter out, with --exclude"
            )

    def _split_state(
        self, name: StateName, role: Role, shape: Shape, siblings: Mapping[tuple[str, str], Shape] | None
    ) -> None:
        tensor = self.checkpoint.tensors[name.key]
        numel = torch.Size(shape).numel()
        is_flat = len(shape) > 1 and tensor.shape == (numel,)
        if tensor.shape != shape and not is_flat:
            raise CheckpointError(
                f"{name.key} has shape {tensor.shape}, its parameter {shape}: it is not known how to split that; "
                f"leave {role.fused} out, with --exclude"
            )
        known = self.roles.model_shapes
        if siblings is not None:
            known = {fqn: each for (optimizer, fqn), each in siblings.items() if optimizer == name.optimizer}
        dim, combs = self._divided(role.match, shape, known)
        renamed = [name.renamed(part) for part in role.parts]
        parts = tuple(key for key, _ in renamed)
        self._fuse(Fusion(name.key, parts, shape, tensor.dtype, dim, combs, is_flat))
        self.draft.paths.update((key, path) for key, path in renamed if path)


def _shapes_of_state(states: Iterable[StateName], tensors: Mapping[str, Any]) -> dict[tuple[str, str], Shape]:
    """Guess each parameter's shape from its state: the one of most dimensions."""
    shapes: dict[tuple[str, str], Shape] = {}
    for name in states:
        if name.is_state and name.key in tensors:
            shape = tensors[name.key].shape
            known = shapes.setdefault((name.optimizer, name.fqn), shape)
            if len(shape) > len(known):
                shapes[name.optimizer, name.fqn] = shape
    return shapes
