"""torch above 2.14: between micro-batches, ``param.grad`` is a DTensor without a local tensor.

Read at pytorch acf70b43, ``torch/distributed/fsdp/_fully_shard/_fsdp_grad.py``: ``FSDPGrad`` has components in place of
``_local_tensor`` and ``_spec``, its placements raise, and ``FSDPParam.unsharded_accumulated_grad`` has no setter.
"""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer
from fsdp_offload.fsdp import fully_shard as ours
from fsdp_offload.fsdp.fully_shard import drop_gathered_gradients, gathered_gradients
from tests.overlapping import POLICIES, Loop, adamw, pair, same


class FSDPGrad(DTensor):
    """Has what torch's has for those who look: a reduced component, and nothing that a DTensor has."""

    @staticmethod
    def __new__(cls, like: Tensor, reduced: Tensor | None) -> "FSDPGrad":
        made: FSDPGrad = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        return made

    def __init__(self, like: Tensor, reduced: Tensor | None) -> None:
        assert reduced is None or type(reduced) is DTensor, "FSDPGrad components must be ordinary DTensors"
        self.reduced = reduced

    @property
    def placements(self) -> Any:
        raise RuntimeError("FSDPGrad has no single placement")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"FSDPGrad does not support {func}")


@pytest.fixture(autouse=True)
def next_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish gradients that are not reduced, and take them back before the next micro-batch, as torch does."""
    post_backward, pre_backward = FSDPParamGroup.post_backward, FSDPParamGroup.pre_backward

    def restore(param: Any) -> None:
        if isinstance(grad := param.sharded_param.grad, FSDPGrad):
            param.sharded_param.grad = grad.reduced

    def publish(group: Any, *args: Any) -> None:
        post_backward(group, *args)
        for param in group.fsdp_params if not group.reduce_grads else ():
            if param.unsharded_accumulated_grad is not None or param.unsharded_param.grad is not None:
                param.sharded_param.grad = FSDPGrad(param.sharded_param, param.sharded_param.grad)

    def take_back(group: Any, *args: Any) -> None:
        for param in group.fsdp_params:
            restore(param)
        pre_backward(group, *args)

    monkeypatch.setattr(FSDPParamGroup, "post_backward", publish)
    monkeypatch.setattr(FSDPParamGroup, "pre_backward", take_back)


def accumulate(loop: Loop, step: int, micro_batches: int = 3, *, syncs: Any = lambda at, last: last) -> None:
    for at in range(micro_batches):
        loop.model.set_requires_gradient_sync(syncs(at, at == micro_batches - 1))
        loss = loop.model(loop.batch(10 * step + at))
        loss.backward()
        loop.seen.append(loss.item())


EVERY = {**POLICIES, "parameters in step()": {"parameters": True}}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fields", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("first_syncs", [False, True])
def test_same_bits(mesh: DeviceMesh, fields: dict[str, Any], clips: bool, first_syncs: bool) -> None:
    """``first_syncs``: the first micro-batch is reduced, and the second is added to its gradient unreduced."""
    plain, loop = pair(mesh, OffloadPolicy(**fields), adamw)
    for step in range(6):
        for one in (plain, loop):
            accumulate(one, step, syncs=lambda at, last: last or (first_syncs and at == 0))
            if clips:
                one.clip(0.1 if step == 4 else 1e9)
            one.step()
    assert same(plain, loop)


def test_a_step_with_gradients_that_are_not_reduced_is_refused(mesh: DeviceMesh) -> None:
    """As torch's own optimizer refuses them; and the step can be made when they have been reduced."""
    plain, loop = pair(mesh, OffloadPolicy(), adamw)
    for one in (plain, loop):
        one.train(2)
        accumulate(one, 2, 1, syncs=lambda *_: False)
    with pytest.raises(RuntimeError, match=r"not reduced.*set_requires_gradient_sync\(True\).*synchronize_gradients"):
        loop.step()
    for one in (plain, loop):
        accumulate(one, 3, 1)
        one.step()
    assert same(plain, loop)


def test_a_backward_that_is_given_up_leaves_what_was_reduced_before(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(mesh, adamw, OffloadPolicy(overlap="forward")).train(2)
    accumulate(loop, 3, 1)
    reduced = [param.grad for param in loop.params]
    accumulate(loop, 4, 1, syncs=lambda *_: False)
    assert all(isinstance(param.grad, FSDPGrad) for param in loop.params)
    with monkeypatch.context() as patch:
        patch.setattr(FSDPParam, "unsharded_accumulated_grad", property(lambda _: None), raising=False)
        drop_gathered_gradients(loop.model)
    assert all(param.grad is grad for param, grad in zip(loop.params, reduced, strict=True))
    assert not gathered_gradients(loop.model)


def test_a_torch_that_was_never_tried_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_new in {"2.14.3+cu130": False, "2.15.0": True, "2.100.0a0+git1234567": True, "3.0": True}.items():
        monkeypatch.setattr(torch, "__version__", version)
        optimizer = adamw([torch.nn.Parameter(torch.ones(8))])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            offload_optimizer(optimizer)
        assert any(f"torch {version} is newer than 2.14" in str(one.message) for one in told) == is_new
        assert any("newer" in note for note in optimizer.offload_report().notes) == is_new


@pytest.mark.parametrize("name", ["unsharded_accumulated_grad", "post_backward"])
def test_a_torch_with_other_names_is_refused_before_anything_moves(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    optimizer = adamw(list(model.parameters()))
    (group,) = ours._param_groups(model)
    holders = [group, *group.fsdp_params]
    monkeypatch.setattr(ours, "_param_groups", lambda _: [Without(holders, name)])
    with pytest.raises(NotImplementedError, match=rf"torch {re.escape(torch.__version__)} has no .*{name}"):
        offload_optimizer(optimizer, model=model, policy=OffloadPolicy(overlap="forward"))
    assert not is_offloaded(optimizer)


class Without:
    """A group of ``fully_shard``, and its parameters, without one name."""

    def __init__(self, holders: list[Any], name: str) -> None:
        self._holders, self._name = holders, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        if name == "fsdp_params":
            return [Without([one], self._name) for one in self._holders[1:]]
        return getattr(self._holders[0], name)
