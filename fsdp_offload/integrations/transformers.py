"""transformers: :class:`OffloadTrainer`, a ``Trainer``, and a mixin for its subclasses such as TRL's ``SFTTrainer``.

::

    trainer = OffloadTrainer(
        model, args, train_dataset=data, offload_policy={"overlap": "forward"}
    )

    class OffloadSFTTrainer(OffloadTrainer, SFTTrainer): ...

The optimizer is offloaded before a checkpoint is loaded: ``resume_from_checkpoint`` leaves no state on the device.
"""

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from ..policy import OffloadPolicy, check_choices, nearest_to
from .accelerate import clip_with
from .plain_values import metrics_of, offload, policy_from


class OffloadTrainer(Trainer):
    """A ``Trainer`` whose optimizer is offloaded in each ``train()``."""

    def __init__(
        self,
        *args: Any,
        offload_policy: OffloadPolicy | Mapping[str, Any] | None = None,
        offload_metrics: bool = False,
        **kwargs: Any,
    ) -> None:
        self._offload_policy = None if offload_policy is None else policy_from(offload_policy)
        check_choices("OffloadTrainer", offload_metrics=offload_metrics)
        self._offload_metrics = offload_metrics
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            unknown = str(error).rpartition("unexpected keyword argument")[2].strip(" '")
            raise TypeError(f"{error}{nearest_to(unknown, ['offload_policy', 'offload_metrics'])}") from error

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler as ``Trainer`` does, after offloading: before a checkpoint is loaded."""
        if optimizer is None:
            assert self.optimizer is not None, "Trainer makes its optimizer before its scheduler"
            try:
                offload(self.optimizer, self.model, self._offload_policy)
            except ValueError as error:
                if self.is_fsdp_enabled:
                    raise
                flags = "TrainingArguments(..., fsdp=True, fsdp_config={'version': 2})"
                raise ValueError(f"{error} Trainer shards with its own flags. Write {flags}.") from None
            clip_with(self.accelerator, self.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as ``Trainer`` does, with metrics of the offload if ``offload_metrics`` is set."""
        if self._offload_metrics and self.optimizer is not None and "loss" in logs:
            logs = {**logs, **metrics_of(self.optimizer)}
        super().log(logs, *args, **kwargs)
