"""Sharded checkpoints of offloaded state."""

from .chunks import Chunk, ShardChunks, chunks_of
from .shard_tensor import ShardTensor, check_storage_writer, with_chunks

__all__ = ["Chunk", "ShardChunks", "ShardTensor", "check_storage_writer", "chunks_of", "with_chunks"]
