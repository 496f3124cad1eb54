"""Sharded checkpoints of offloaded state."""

from .arena_stager import ArenaStager
from .chunks import Chunk, ShardChunks, chunks_of
from .names import Experts
from .planners import Loaded, LoadPlanner, SavePlanner, load, save
from .shard_tensor import ShardTensor, with_chunks, with_parameter_chunks
from .state_dict import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = [
    "ArenaStager",
    "Chunk",
    "Experts",
    "LoadPlanner",
    "Loaded",
    "SavePlanner",
    "ShardChunks",
    "ShardTensor",
    "chunks_of",
    "get_optimizer_state_dict",
    "load",
    "save",
    "set_optimizer_state_dict",
    "with_chunks",
    "with_parameter_chunks",
]
