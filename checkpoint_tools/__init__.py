"""Tools for checkpoints of sharded models and optimizers: split and merge fused weights, seal and verify files."""

from .fuse.live import merge_state_dict, split_state_dict
from .fuse.rules import Rule, excluding, load_rules, preset, preset_names
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
