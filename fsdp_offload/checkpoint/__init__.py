"""Sharded checkpoints of offloaded state."""

from .async_save import ArenaStager
from .chunks import Chunk, ShardChunks, chunks_of
from .experts import Experts
from .load_planner import LoadPlanner, load
from .model_values import with_parameter_chunks
from .save_planner import SavePlanner, save
from .shard_tensor import ShardTensor, check_storage_writer, with_chunks
from .state_dict import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = [
    "ArenaStager",
    "Chunk",
    "Experts",
    "LoadPlanner",
    "SavePlanner",
    "ShardChunks",
    "ShardTensor",
    "check_storage_writer",
    "chunks_of",
    "get_optimizer_state_dict",
    "load",
    "save",
    "set_optimizer_state_dict",
    "with_chunks",
    "with_parameter_chunks",
]
