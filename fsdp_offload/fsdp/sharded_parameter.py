"""A parameter as ``fully_shard`` knows it: the shard that it reads when it gathers may be put elsewhere.

Seen in torch 2.11 to 2.13: a gather reads ``FSDPParam._sharded_param_data``, the shard as a flat tensor, padded to the
size of the largest one. Everybody else reads the DTensor ``sharded_param`` through its ``_local_tensor``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .dtensor import local_shard
from .homed import put_home, take_from_home


class ShardedParameter:
    """One parameter of one group of ``fully_shard``.

    Attributes:
        padded_numel: elements that a gather reads on this rank.
        wait: called before host memory of a parameter is used: it may still be written.
    """

    def __init__(self, fsdp_param: Any) -> None:
        """Take FSDP's own record of it.

        Raises:
            NotImplementedError: this torch's ``fully_shard`` keeps the shard in another way.
        """
        missing = [name for name in _READ if not hasattr(fsdp_param, name)]
        if missing:
            raise NotImplementedError(
                f"this torch's fully_shard has no {missing}, through which it gathers parameters that live on the "
                "host; leave out OffloadPolicy(parameters=True)"
            )
        self._fsdp_param = fsdp_param
        self.wait: Callable[[Tensor], None] = lambda param: None
        self.padded_numel: int = fsdp_param.padded_sharded_param_size.numel()

    @property
    def param(self) -> Tensor:
        """The parameter that an optimizer has: a DTensor."""
        param: Tensor = self._fsdp_param.sharded_param
        return param

    @property
    def device(self) -> torch.device:
        """Device on which it is gathered."""
        device: torch.device = self._fsdp_param.device
        return device

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """The modules that have it, and under which names: several if it is tied."""
        info = self._fsdp_param._module_info
        yield info.module, info.param_name
        yield from zip(info.shared_modules, info.shared_param_names, strict=True)

    def follow_module(self) -> None:
        """Take up the parameter that its module has now, with memory of its own, and give it to those it is tied to."""
        for module, name in self.places():
            param = getattr(module, name)
            if not param.is_meta:
                setattr(self._fsdp_param._module_info.module, self._fsdp_param._module_info.param_name, param)
        self._fsdp_param.reset_sharded_param()
        for module, name in self.places():
            setattr(module, name, self._fsdp_param.sharded_param)

    @property
    def is_plain(self) -> bool:
        """Whether the shard is a dense tensor that is gathered as it is, rather than of a type that says how."""
        return type(local_shard(self.param)) is Tensor

    def live_at(self, local: Tensor, stand_in: Tensor | None = None) -> Tensor:
        """Let ``local``, host memory of the shape and dtype of the shard, be the shard from now on.

        Nothing is copied. The parameter stays the same object, and its own ``device`` that of its mesh. Returns its
        stand-in, which may be given again when it comes back to ``local``: making one takes 20 us.
        """
        stand_in = put_home(self.param, local, self.wait, stand_in)
        self._point_at(local)
        return stand_in

    def visit(self, local: Tensor) -> None:
        """Let ``local``, its shard on the device, be the shard until :meth:`live_at` says otherwise."""
        take_from_home(self.param)
        self._point_at(local)

    def _point_at(self, local: Tensor) -> None:
        self._fsdp_param.sharded_param._local_tensor = local
        # Of the same memory, though not padded: fully_shard makes a padded copy of its own where it is of another.
        self._fsdp_param._sharded_param_data = local.view(-1)

    def live_on(self, device: torch.device) -> None:
        """Move the shard to ``device``, into padded memory as ``fully_shard`` makes it."""
        local, size = local_shard(self.param), self._fsdp_param.padded_sharded_param_size
        padded = torch.zeros(size, dtype=local.dtype, device=device)
        dim = self._fsdp_param.fsdp_placement.dim
        own = padded.narrow(dim, 0, local.size(dim) if local.numel() else 0)
        own.copy_(local)
        take_from_home(self.param)
        self._fsdp_param.sharded_param._local_tensor = own
        self._fsdp_param._sharded_param_data = padded.view(-1)

    def lend(self, data: Tensor) -> None:
        """Let the next gather read ``data``: flat, of ``padded_numel`` elements, on the device."""
        self._fsdp_param._sharded_param_data = data

    def take_back(self) -> None:
        """Let gathers read the shard itself again."""
        self._fsdp_param._sharded_param_data = local_shard(self.param).view(-1)


_READ = (
    *("sharded_param", "_sharded_param_data", "padded_sharded_param_size", "fsdp_placement"),
    *("device", "reset_sharded_param", "_module_info"),
)
