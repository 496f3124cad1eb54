"""Tools for checkpoints of sharded models and optimizers: split and merge fused weights with their state."""

from .live import merge_state_dict, split_state_dict
from .rules import Rule, excluding, load_rules, preset, preset_names

__all__ = ["Rule", "excluding", "load_rules", "merge_state_dict", "preset", "preset_names", "split_state_dict"]
