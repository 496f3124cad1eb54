"""Tools for checkpoints of sharded models and optimizers: split and merge fused weights with their state."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fused.live import merge_state_dict, split_state_dict
    from .fused.preset_files import preset_names
    from .fused.rules import Rule, excluding, load_rules, preset

__all__ = ["Rule", "excluding", "load_rules", "merge_state_dict", "preset", "preset_names", "split_state_dict"]

_LIVE = ("merge_state_dict", "split_state_dict")


def __getattr__(name: str) -> Any:
    # When they are used: the command line shows its help without waiting for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".fused.live" if name in _LIVE else ".fused.rules", __name__), name)
