"""Optimizer-state offload for PyTorch FSDP2: pinned host memory, the user's own optimizer, bitwise the same result."""

from .chain import offload_states, release_states, reload_states
from .offload import (
    OffloadedOptimizer,
    is_offloaded,
    offload_optimizer,
    offload_report,
    remove_offload,
    synchronize,
)
from .policy import OffloadPolicy
from .reload_before import reload_before
from .report import OffloadReport
from .sleep import offload_model, reload_model

__all__ = [
    "OffloadPolicy",
    "OffloadReport",
    "OffloadedOptimizer",
    "is_offloaded",
    "offload_model",
    "offload_optimizer",
    "offload_report",
    "offload_states",
    "release_states",
    "reload_before",
    "reload_model",
    "reload_states",
    "remove_offload",
    "synchronize",
]

__version__ = "0.1.0"
