"""What others may have of training while it goes on: which weights each step has changed, and weights out of homes."""

from .deltas import WeightDelta, WeightDeltas, weight_deltas
from .homes import weights

__all__ = ["WeightDelta", "WeightDeltas", "weight_deltas", "weights"]
