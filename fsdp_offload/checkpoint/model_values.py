"""Values of a model's state dict that have lost what their parameters know of their chunks, and get it back."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..torch_compat.dtensor import is_dtensor, local_shard
from ..torch_compat.fully_shard import parameter_names
from .chunks import MEGATRON_INDEX, chunks_of, says_its_chunks
from .layouts import bare_name
from .shard_tensor import ShardTensor, needs_chunks, with_chunks


def with_parameter_chunks(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with values that carry the chunks of their parameters, over the same memory.

    For models whose placements are nominal, as those of Megatron-FSDP: what a parameter knows of its flat slice is lost
    in ``model.state_dict()``, which detaches it. Other values are taken over as they are.

    Args:
        model: whose parameters they are.
        state_dict: ``{fqn: value}``. Keys and names may have ``module.`` in front a different number of times, as
            Megatron's have.

    Raises:
        ValueError: a value is not of the global shape or the local size of its parameter; it is sharded unevenly, and
            no parameter has its name.
    """
    params = {bare_name(name): param for param, name in parameter_names(model).items()}
    return {key: _carrying(key, value, params.get(bare_name(key))) for key, value in state_dict.items()}


def _carrying(key: str, value: Any, param: Tensor | None) -> Any:
    if not isinstance(value, Tensor) or not is_dtensor(value) or isinstance(local_shard(value), ShardTensor):
        return value
    if param is None or not says_its_chunks(param):
        try:
            return with_chunks(value) if needs_chunks(value) else value
        except ValueError as error:
            raise ValueError(f"{key}: no parameter of the model has this name, and {error}") from error
    chunks = chunks_of(param)
    if tuple(value.shape) != chunks.global_shape or local_shard(value).numel() != chunks.local_numel:
        raise ValueError(
            f"{key} has shape {tuple(value.shape)}, of which {tuple(local_shard(value).shape)} on this rank; its "
            f"parameter has {chunks.global_shape}, of which {chunks.local_numel} elements are here"
        )
    carrying: Any = with_chunks(value, shard_chunks=chunks)
    if hasattr(param, MEGATRON_INDEX):  # by which splitting knows the tensor-parallel ranks of experts
        setattr(carrying, MEGATRON_INDEX, getattr(param, MEGATRON_INDEX))
    return carrying
