"""Higher-precision copies of low-precision parameters that an optimizer keeps as state, under ``master_param``.

======================================  ===============================================================================
parameter and master                    what is true of the master
======================================  ===============================================================================
low precision, floating-point master    the only copy of the precision: saved; rebuilt from the parameter where a
                                        checkpoint lacks it; weights that somebody wrote into the parameter win over it
same dtype (fp32 and fp32)              a duplicate that no kernel reads nor updates: not saved, not needed in a load
integer master (the lower bits)         meaningless without the exact parameter: never rebuilt
======================================  ===============================================================================
"""

import torch
from torch import Tensor

MASTER = "master_param"
"""The name under which Transformer Engine's FusedAdam and Megatron-LM keep it in ``optimizer.state[param]``."""


def is_duplicate(param: Tensor, master_dtype: torch.dtype) -> bool:
    """Whether a master of that dtype says nothing that ``param`` does not say."""
    return master_dtype == param.dtype


def is_only_copy(param: Tensor, master: Tensor) -> bool:
    """Whether ``master`` has, element by element, more precision than the local tensor ``param``."""
    return (
        master.shape == param.shape
        and master.dtype.is_floating_point
        and param.dtype.is_floating_point
        and master.dtype.itemsize > param.dtype.itemsize
    )


def can_rebuild(master_dtype: torch.dtype) -> bool:
    """Whether such a master can be made from the parameter alone."""
    return master_dtype.is_floating_point


def let_weights_win(param: Tensor, master: Tensor) -> None:
    """Where ``param`` is not what ``master`` rounds to, somebody has written it: take that over into ``master``.

    A ``dcp.load`` into the parameters fires no hook, so this is looked at before every update; where nobody wrote,
    it changes nothing. Both are local tensors of one shape and device; temporaries take about twice ``master``'s bytes.
    """
    written = param != master.to(param.dtype)
    master.copy_(torch.where(written, param.to(master.dtype), master))
