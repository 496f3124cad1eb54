"""Optimizer-state offload for PyTorch FSDP2: pinned host memory, the user's own optimizer, bitwise the same result."""

from typing import TYPE_CHECKING

from . import device as device  # asks for copy queues, before CUDA starts
from .lazy import names_later

__all__ = [
    "OffloadPolicy",
    "OffloadReport",
    "OffloadedOptimizer",
    "add_masters",
    "clip_grad_norm_",
    "is_offloaded",
    "materialize_on_host",
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

if TYPE_CHECKING:
    from .api.attach import add_masters, is_offloaded, offload_optimizer, offload_report, remove_offload, synchronize
    from .api.clipping import clip_grad_norm_
    from .api.optimizer import OffloadedOptimizer
    from .api.report import OffloadReport
    from .api.wrapped import offload_states, release_states, reload_before, reload_states
    from .model.materialize import materialize_on_host
    from .model.sleep import offload_model, reload_model
    from .policy import OffloadPolicy
else:  # hidden from type checkers, which would accept any name
    __getattr__, __dir__ = names_later(
        __name__,
        __all__,
        (
            "policy",
            "api.attach",
            "api.clipping",
            "api.optimizer",
            "api.report",
            "api.wrapped",
            "model.materialize",
            "model.sleep",
        ),
    )

__version__ = "0.1.0"
