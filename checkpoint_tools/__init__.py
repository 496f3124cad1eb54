"""Tools for checkpoints of sharded models and optimizers: split and merge fused weights, seal and verify files."""

from typing import TYPE_CHECKING

from fsdp_offload.lazy import names_later

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

if TYPE_CHECKING:
    from .fuse.live import merge_state_dict, split_state_dict
    from .fuse.presets import preset_names
    from .fuse.rules import Rule, excluding, load_rules, preset
    from .look.verify import seal, verify
else:  # hidden from type checkers: with a module ``__getattr__``, they accept any name
    __getattr__, __dir__ = names_later(__name__, __all__, ("fuse.presets", "fuse.rules", "fuse.live", "look.verify"))
