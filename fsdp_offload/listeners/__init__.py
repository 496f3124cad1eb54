"""Hand weights, changed ones or all, to an engine during training; keep steps that outlive a killed process."""

from .deltas import WeightDelta, WeightDeltas, weight_deltas
from .folder import newest_commit
from .homes import weights
from .recovery import Recoverable, recover, recoverable

__all__ = [
    "Recoverable",
    "WeightDelta",
    "WeightDeltas",
    "newest_commit",
    "recover",
    "recoverable",
    "weight_deltas",
    "weights",
]
