"""What training will cost in memory and time, before it runs, and which policy to choose."""

from .forecast import Forecast, Plan, candidates, plan
from .machine import Machine, builtin_machines, machine_of
from .model import Model, builtin_models, model_of
from .training import Training

__all__ = [
    "Forecast",
    "Machine",
    "Model",
    "Plan",
    "Training",
    "builtin_machines",
    "builtin_models",
    "candidates",
    "machine_of",
    "model_of",
    "plan",
]
