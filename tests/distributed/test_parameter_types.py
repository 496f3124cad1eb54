"""Parameters of a type that is made of other tensors, with all-gather hooks of its own: FSDP2's extension point."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_offload import OffloadPolicy
from tests.distributed.launch import mesh, spawn_cases
from tests.overlapping import POLICIES, SMALL, Loop, Net, same
from tests.parity import attach, leaves
from tests.tiers import some_cases

pytestmark = pytest.mark.distributed


class Gathered(TwoTensor):
    """Both inner tensors are gathered, as fully_shard asks of an extension."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, Tensor], None]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, Tensor],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        if out is not None:
            return None
        return Gathered(*all_gather_outputs), all_gather_outputs

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, meta: Any, outer_size: Any, outer_stride: Any) -> "Gathered":
        return Gathered(inner_tensors["a"], inner_tensors["b"], outer_size, outer_stride)


class TwiceNet(Net):
    """Matrices of its blocks are pairs of tensors. Not those that two ranks cannot divide: FSDP2 pads no pairs."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.head:
                data = module.weight.detach()
                module.weight = nn.Parameter(Gathered(data, data.clone() * 2))


class BareAdamW(torch.optim.AdamW):
    """Of which no table knows anything."""


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False),
    "a subclass": lambda params: BareAdamW(params, lr=1e-2, foreach=False),
}


def compare(optimizer: str, policy: dict[str, Any]) -> list[str]:
    plain, offloaded = (
        Loop(mesh(dist.get_world_size()), MAKERS[optimizer], one, net=TwiceNet).train(5)
        for one in (None, OffloadPolicy(**policy, **SMALL))
    )
    offloaded.optimizer.synchronize()
    values = [v for state in offloaded.optimizer.state.values() for v in state.values() if v.dim()]
    if not isinstance(offloaded.optimizer, torch.optim.SGD):  # its momentum begins as a gradient, which is no pair
        assert Gathered in {type(value.to_local()) for value in values}
    assert {leaf.device.type for value in values for leaf in leaves(value)} == {"cpu"}
    return [] if same(plain, offloaded) else ["other bits"]


@some_cases({2: 5})
def test_pairs_of_tensors_train_with_the_same_bits(world_size: int, every: int, tmp_path: Path) -> None:
    every_case = itertools.product(MAKERS, {"default": {}, **POLICIES}.items())
    cases = {f"{make}, {name}": partial(compare, make, policy) for make, (name, policy) in every_case}
    spawn_cases(cases, world_size, tmp_path, every)


def annotated(over: DeviceMesh) -> Net:
    """Plain parameters with types of the ``spmd_types`` package; torch 2.14 shards them as DTensors."""
    import spmd_types

    net = Net(layers=2)
    for param in net.parameters():
        spmd_types.assert_type(param, {spmd_types.MeshAxis.of(over.get_group()): spmd_types.R})
    return net


one_mesh = cache(mesh)
"""``fully_shard`` remembers the first of equal meshes, and refuses parameters on another."""


def compare_annotated(policy: dict[str, Any]) -> list[str]:
    from torch.distributed.fsdp import DataParallelMeshDims

    over = one_mesh(dist.get_world_size())
    shard = partial(fully_shard, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with mock.patch("tests.overlapping.fully_shard", shard):
        plain, offloaded = (
            Loop(over, MAKERS["AdamW"], one, net=partial(annotated, over)).train(5)
            for one in (None, OffloadPolicy(**policy, **SMALL))
        )
    return [] if same(plain, offloaded) else ["other bits"]


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="begins with torch 2.14: .ci/torch214")
def test_annotated_parameters_train_with_the_same_bits(tmp_path: Path) -> None:
    policies = {"default": {}, **POLICIES, "everything on the host": {"overlap": "iteration", "parameters": True}}
    spawn_cases({name: partial(compare_annotated, policy) for name, policy in policies.items()}, 2, tmp_path)


def test_a_group_of_pairs_cannot_be_added_to_an_optimizer_of_plain_tensors() -> None:
    optimizer = attach(torch.optim.AdamW([nn.Parameter(torch.randn(4))]))
    pair = nn.Parameter(Gathered(torch.randn(4), torch.randn(4)))
    with pytest.raises(
        ValueError, match=r"is a Gathered, made of other tensors: add the first such group, then attach"
    ):
        optimizer.add_param_group({"params": [pair]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_lists_of_pairs_and_others_are_refused(options: dict[str, Any]) -> None:
    """The dispatch of a pair runs a list twice, and plain tensors in it are updated twice: more or less of a list."""
    pair, plain = nn.Parameter(Gathered(torch.randn(4), torch.randn(4))), nn.Parameter(torch.randn(4))
    with pytest.raises(ValueError, match=r"several tensors: kernels over lists .*foreach=False"):
        attach(torch.optim.AdamW([pair, plain], **options))
    attach(torch.optim.AdamW([{"params": [pair]}, {"params": [plain]}], **options))
