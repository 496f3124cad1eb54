"""Optimizer-state offload for PyTorch FSDP2: pinned host memory, the user's own optimizer, bitwise the same result."""

from .offload import OffloadedOptimizer, offload_optimizer, remove_offload
from .policy import OffloadPolicy
from .report import OffloadReport

__all__ = ["OffloadPolicy", "OffloadReport", "OffloadedOptimizer", "offload_optimizer", "remove_offload"]
