"""Weights for an inference engine while training runs: those that each step has changed, or all of them from homes."""

from .deltas import WeightDelta, WeightDeltas, weight_deltas
from .homes import weights

__all__ = ["WeightDelta", "WeightDeltas", "weight_deltas", "weights"]
