"""Sharded checkpoints of offloaded state."""

from .async_save import ArenaStager
from .chunks import Chunk, ShardChunks, chunks_of
from .load_planner import LoadPlanner, load
from .shard_tensor import ShardTensor, check_storage_writer, with_chunks
from .state_dict import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = [
    "ArenaStager",
    "Chunk",
    "LoadPlanner",
    "ShardChunks",
    "ShardTensor",
    "check_storage_writer",
    "chunks_of",
    "get_optimizer_state_dict",
    "load",
    "set_optimizer_state_dict",
    "with_chunks",
]
