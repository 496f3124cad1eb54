"""What the house needs to know about a class of optimizers."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Traits:
    """How an optimizer may be run bucket by bucket.

    Attributes:
        elementwise: every element's update depends on that element alone, so it may run on local shards.
        cuttable: (implementation, device type, parameter dtype) for which flat ranges give the same bits as the whole.
            The implementation is ``"for-loop"``, ``"foreach"`` or ``"fused"``.
        state_like_param: every state tensor has the parameter's shape, so a small scratch tensor shows the layout.
        refusal: why this class cannot be offloaded at all; empty if it can.
        refuses_dtensor: why it cannot be offloaded with sharded parameters; empty if it can.
        known: the class is in a tested table. An unknown one has to prove at attach that parameters are separable.
    """

    elementwise: bool = False
    cuttable: frozenset[tuple[str, str, torch.dtype]] = frozenset()
    state_like_param: bool = False
    refusal: str = ""
    refuses_dtensor: str = ""
    known: bool = True
