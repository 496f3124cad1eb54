"""Optimizer state that was saved flat, one dimension of all elements, as tensors of the parameter's shape.

::

    state (12,)   ▶ ragged ranges ▶   rectangles of (3, 4)

    0 1 2 3 4 5 6 7 8 9 a b           0 1 2 3
    └── rank 0 ─┘ └─ rank 1 ┘         4 5│6 7       rank 0: one row, and the first half of the next
                                      ─ ─┘
                                      8 9 a b       rank 1: the other half, and one row

As Megatron-FSDP saves the state of offloaded optimizers. What each rank wrote stays in its files.
"""

import math
from collections.abc import Mapping, Sequence

from ..core.errors import CheckpointError
from ..core.patterns import check_excluded, is_excluded
from ..fused.fusions import Exchange, Fusion
from ..fused.keys import StateName, sorted_out
from ..fused.owners import Owners
from ..stored.reading import Checkpoint
from ..write.rewrite_plan import Rewrite, plan_rewrite
from .conversion_plan import whole

Shape = tuple[int, ...]


def flat_to_nd(checkpoint: Checkpoint, shapes_from: Checkpoint | None, excluded: Sequence[str]) -> Rewrite:
    """Plan a checkpoint in which flat optimizer state has its parameter's shape.

    Args:
        checkpoint: with the state.
        shapes_from: with the model, if that is another one.
        excluded: patterns of keys that stay as they are.

    Raises:
        CheckpointError: state of which it is not known what its shape should be, or nothing that is flat.
    """
    model = shapes_from or checkpoint
    names = sorted_out([*model.tensors, *model.objects], model.paths)
    shapes = {key: model.tensors[key].shape for key in names.others if key in model.tensors}
    if not shapes:
        raise CheckpointError(
            f"{model.path} has no model, whose shapes are needed; give --shapes-from a checkpoint that has it"
        )
    check_excluded(excluded, [*checkpoint.tensors, *checkpoint.objects])
    owners = Owners(shapes)
    fusions = []
    for name in sorted_out([*checkpoint.tensors, *checkpoint.objects], checkpoint.paths).states:
        if name.is_state and name.key in checkpoint.tensors and not is_excluded(name.key, excluded):
            tensor = checkpoint.tensors[name.key]
            shape = _shape_of(name, tensor.shape, owners, shapes)
            if shape != tensor.shape:
                parts = (name.key,)
                fusions.append(Fusion(name.key, parts, shape, tensor.dtype, 0, (whole(shape),), is_flat=True))
    if not fusions:
        raise CheckpointError(f"{checkpoint.path} has no flat state: all is of its parameters' shapes, or excluded")
    return plan_rewrite(checkpoint, Exchange(tuple(fusions), {}, {}, {}, 0))


def _shape_of(name: StateName, shape: Shape, owners: Owners, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape that an entry of state gets."""
    if len(shape) != 1:
        return shape
    try:
        owner = owners.of(name.fqn, lambda one, other: shapes[one] == shapes[other])
    except CheckpointError as error:
        raise CheckpointError(
            f"{name.key} may belong to several tensors of the model, which have different shapes; give --shapes-from a "
            "checkpoint of that model alone, or leave it as it is with --exclude"
        ) from error
    if owner is None:
        raise CheckpointError(
            f"{name.key} has one dimension, and no tensor of the model is called {name.fqn}; give --shapes-from a "
            "checkpoint that has it, or leave it as it is with --exclude"
        )
    wanted = shapes[owner.key]
    if math.prod(wanted) != shape[0]:
        raise CheckpointError(
            f"{name.key} has {shape[0]:,} elements, and {owner.key} has shape {wanted}, {math.prod(wanted):,} "
            "elements; leave it as it is with --exclude, if it is not flat"
        )
    return wanted
