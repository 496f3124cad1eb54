"""Tools for checkpoints of sharded models and optimizers: split and merge fused weights, seal and verify files."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fuse import preset_names
    from .fuse.live import merge_state_dict, split_state_dict
    from .fuse.rules import Rule, excluding, load_rules, preset
    from .look.verify import seal, verify

__all__ = [
    "Rule",
    "excluding",
    "load_rules",
    "merge_state_dict",
    "preset",
    "preset_names",
    "seal",
    "split_state_dict",
    "verify",
]

_ELSEWHERE = {
    "merge_state_dict": ".fuse.live",
    "split_state_dict": ".fuse.live",
    "seal": ".look.verify",
    "verify": ".look.verify",
}


def __getattr__(name: str) -> Any:
    # When they are used: the command line shows its help without waiting for torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE.get(name, ".fuse.rules"), __name__), name)
