"""Predict the memory and time of a training under each policy, and choose one."""

from typing import TYPE_CHECKING

from ..lazy import names_later

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

if TYPE_CHECKING:
    from .forecast import Forecast, Plan, candidates, plan
    from .machine import Machine, builtin_machines, machine_of
    from .model import Model, builtin_models, model_of
    from .training import Training
else:  # hidden from type checkers, which would accept any name
    __getattr__, __dir__ = names_later(__name__, __all__, ("machine", "training", "model", "forecast"))
