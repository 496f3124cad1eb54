"""Parameters that live on the host give the same bits, whatever the loop does, and are at home outside their uses."""

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_offload import add_masters, remove_offload, synchronize
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict
from fsdp_offload.core.cache import Cache
from fsdp_offload.engine.engine import Engine, engine_of
from fsdp_offload.fsdp import homed
from fsdp_offload.fsdp.dtensor import local_shard
from fsdp_offload.fsdp.optim import pinned_implementations
from tests.async_writers import TIMEOUT_S, HeldWriter
from tests.conformance.conftest import spoil_what_the_window_drops  # noqa: F401  # for every test here
from tests.conformance.programs import write_parameters
from tests.overlapping import (
    EVERY_POLICY,
    POLICIES,
    Loop,
    Net,
    adamw,
    assert_same_each_step,
    on_host,
    pair,
    policy_of,
    same,
)
from tests.parity import fail_in_bucket, same_value
from tests.tiers import spread

# Optimizers ------------------------------------------------------------------------------------------------------


def narrow() -> Net:
    return Net().bfloat16()


@spread(fields=POLICIES, kind={kind: kind for kind in ("fp32", "remainder")})
def test_masters(mesh: DeviceMesh, fields: dict[str, Any], kind: Any) -> None:
    """As with masters and parameters that stay on the device."""
    make = lambda params: add_masters(adamw(params), kind)  # noqa: E731
    loops = [Loop(mesh, make, on_host(fields, parameters=streams), net=narrow) for streams in (False, True)]
    assert_same_each_step(*loops, 6, write_parameters)


@EVERY_POLICY
def test_full_state_dicts(mesh: DeviceMesh, fields: dict[str, Any]) -> None:
    loops = pair(mesh, on_host(fields))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert_same_each_step(*loops, 3)
    saved = [get_model_state_dict(one.model, options=options) for one in loops]
    assert all(torch.equal(saved[0][name], value) for name, value in saved[1].items())
    assert_same_each_step(*loops, 2)
    for one, values in zip(loops, saved, strict=True):
        set_model_state_dict(one.model, values, options=options)
    assert_same_each_step(*loops, 3)


# Outside the uses ------------------------------------------------------------------------------------------------


def test_what_a_parameter_still_is(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, on_host({}))
    assert_same_each_step(plain, loop, 2)
    for one, other in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
        assert isinstance(other, DTensor)
        assert isinstance(other, nn.Parameter)
        for name in ("shape", "dtype", "device", "requires_grad", "placements", "grad"):
            assert getattr(one, name) == getattr(other, name), name
        kept = copy.deepcopy(other)
        assert local_shard(kept).data_ptr() != local_shard(other).data_ptr()
        for alike in (kept, pickle.loads(pickle.dumps(other.detach()))):
            assert torch.equal(local_shard(alike), local_shard(one))
        assert torch.equal((other * 2).to_local(), (one * 2).to_local())
        with pytest.raises(RuntimeError, match=r"setting tensor\.data on a parameter that lives on the host"):
            other.data = torch.zeros_like(other)


@EVERY_POLICY
@pytest.mark.parametrize("staying", [0, 4 * 8192, 1 << 20])
def test_local_tensors_are_new_after_a_step(mesh: DeviceMesh, fields: dict[str, Any], staying: int) -> None:
    """Megatron, Transformer Engine and torchao read them past torch's functions, and some write them."""
    plain, loop = pair(mesh, on_host(fields, staying=staying))

    def reads(loop: Loop, step: int) -> None:
        loop.backward(step)
        loop.step()
        locals_ = [param._local_tensor for param in loop.params]
        loop.seen += [local.double().sum().item() for local in (*earlier.get(loop, ()), *locals_)]
        if step % 3 == 1:
            with torch.no_grad():
                locals_[step].mul_(0.9)
        if "overlap" not in fields:  # what was taken stays valid, as to_local() does
            earlier[loop] = locals_

    earlier: dict[Loop, list[Tensor]] = {}
    assert_same_each_step(plain, loop, 6, reads)


def test_gathers_do_not_look_at_local_tensors(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fully_shard`` asks them for methods in each gather: a look would wait there, and load the group again."""
    loop = Loop(mesh, adamw, on_host({"overlap": "forward"}))
    loop.train(2)
    looks: list[Tensor] = []
    monkeypatch.setattr(Engine, "wait_parameter_home", lambda engine, param: looks.append(param))
    loop.train(2, first=2)
    assert looks == []
    assert all(param._local_tensor is not None for param in loop.params)
    assert looks == loop.params


CONVERSIONS: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "to the device": ("", lambda model: model.to("cpu")),
    "to the dtype": ("", lambda model: model.to(torch.float32)),
    "float()": ("", lambda model: model.float()),
    "float() of one block": ("", lambda model: model.blocks[0].float()),
    "cpu() of one layer": ("", lambda model: model.blocks[0].up.cpu()),
    "half()": ("cannot be converted .* from torch.float32 on cpu to torch.float16", lambda model: model.half()),
    "of one layer": ("cannot be converted .* to torch.float64", lambda model: model.blocks[0].up.double()),
    "of what has buffers": ("cannot be converted", lambda model: model.blocks[0].double()),
    "of a list": ("cannot be converted", lambda model: model.blocks.double()),
    "to_empty()": ("cannot be converted", lambda model: model.to_empty(device="cpu")),
    "meta": ("cannot be converted .* on meta", lambda model: model.to("meta")),
    **{
        f"assign to {name or 'all'}": (
            r"load_state_dict\(assign=True\) cannot",
            lambda model, name=name: (one := model.get_submodule(name)).load_state_dict(one.state_dict(), assign=True),
        )
        for name in ("", "blocks.0.up")
    },
}
"""Text of the error, behind which nothing has changed; empty where a conversion changes nothing."""


def with_buffers(model: Net) -> None:
    model.blocks[0].register_buffer("scale", torch.ones(3), persistent=False)
    model.blocks[0].norm.register_buffer("shift", torch.ones(3), persistent=False)


@spread(conversion=CONVERSIONS, fields=POLICIES)
def test_conversions(
    mesh: DeviceMesh, fields: dict[str, Any], conversion: tuple[str, Callable[[nn.Module], object]]
) -> None:
    message, convert = conversion
    plain, loop = pair(mesh, on_host(fields), prepare=with_buffers)
    for steps in (0, 3, 1):
        assert_same_each_step(plain, loop, steps)
        loop.optimizer.synchronize()
        with pytest.raises(RuntimeError, match=message) if message else nullcontext():
            convert(loop.model)
        assert loop.model.blocks[0].scale.dtype == loop.model.blocks[0].norm.shift.dtype == torch.float32
    assert_same_each_step(plain, loop, 3)
    loop.optimizer.synchronize()
    remove_offload(loop.optimizer)
    loop.model.double()
    assert {param.dtype for param in loop.model.parameters()} == {torch.float64}


def test_a_copy_of_a_module_is_converted_by_itself(mesh: DeviceMesh) -> None:
    plain, loop = pair(mesh, on_host({}))
    assert_same_each_step(plain, loop, 2)
    copied = copy.deepcopy(loop.model.blocks[0].up)
    expected = copy.deepcopy(plain.model.blocks[0].up).double()
    copied.double()
    assert copied.weight.dtype == torch.float64
    assert torch.equal(local_shard(copied.weight), local_shard(expected.weight))
    copied.load_state_dict(expected.state_dict(), assign=True)
    assert loop.model.blocks[0].up.weight.dtype == torch.float32
    assert_same_each_step(plain, loop, 2)


@pytest.mark.parametrize("swap", [False, True], ids=["", "swap all"])
def test_conversions_reach_buffers_and_parameters_that_nobody_streams(mesh: DeviceMesh, swap: bool) -> None:
    def prepare(model: Net) -> None:
        model.register_buffer("table", torch.arange(3.0), persistent=False)
        model.blocks[0].up.register_buffer("scale", torch.ones(3), persistent=False)

    def all_but_two(params: list[Tensor]) -> Optimizer:
        return adamw([*params[1:3], *params[4:]])

    plain, loop = pair(mesh, on_host({}), all_but_two, prepare=prepare)
    seen: set[int] = set()

    def convert(tensor: Tensor) -> Tensor:
        seen.add(id(tensor))
        return tensor.double() if tensor.numel() == 3 else tensor.to("cpu")

    assert_same_each_step(plain, loop, 2)
    trained = {id(param) for param in loop.optimizer.param_groups[0]["params"]}
    up = loop.model.blocks[0].up
    up.own = nn.Parameter(torch.ones(3))
    torch.__future__.set_swap_module_params_on_conversion(swap)
    torch.__future__.set_overwrite_module_params_on_conversion(not swap)
    try:
        loop.model._apply(convert)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert loop.model.table.dtype == up.scale.dtype == up.own.dtype == torch.float64
    del up.own
    params = {id(param) for param in loop.model.parameters()}
    assert seen & params == params - trained
    assert_same_each_step(plain, loop, 3)


def test_a_torch_that_keeps_shards_otherwise(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homed, "_READ", (*homed._READ, "_gone"))
    with pytest.raises(NotImplementedError, match=r"no \['_gone'\].*leave out OffloadPolicy\(parameters=True\)"):
        Loop(mesh, adamw, on_host({}))


# Faults ----------------------------------------------------------------------------------------------------------


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def fail(loop: Loop, step: int, where: str) -> None:
    """In the middle of a block."""
    layer = loop.model.blocks[2].down
    handle = layer.register_forward_pre_hook(_fail) if where == "forward" else layer.register_full_backward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loop.backward(step)
    handle.remove()
    for module in loop.model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def fail_once(loop: Loop, step: int) -> None:
    if step in (0, 2, 4):
        fail(loop, step, "forward" if step != 4 else "backward")
        loop.optimizer.zero_grad()
    loop.backward(step)
    loop.step()


@pytest.mark.parametrize("name", ["step", "forward"])
def test_a_failed_forward_or_backward(mesh: DeviceMesh, name: str) -> None:
    plain, loop = pair(mesh, on_host(POLICIES[name]))
    assert_same_each_step(plain, loop, 6, fail_once)


# Freshness -----------------------------------------------------------------------------------------------------------


WRITES: dict[str, Callable[[nn.Module, list[Tensor]], object]] = {
    "parameter": lambda model, _: [param.mul_(0.9) for param in model.parameters()],
    "alias": lambda _, taken: [alias.mul_(0.9) for alias in taken],
}


@pytest.mark.parametrize("snapshot_bytes", [0, 1 << 20])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_during_an_asynchronous_save_are_told_of(
    mesh: DeviceMesh, tmp_path: Path, snapshot_bytes: int, write: Callable[..., object]
) -> None:
    """The writer reads the homes of parameters, so the file may have such a write; steps and loads never spoil it."""
    loop = Loop(mesh, adamw, on_host({"overlap": "step"}, snapshot_bytes=snapshot_bytes))
    taken = [param.detach() for param in loop.model.parameters()]
    stager = ArenaStager(loop.optimizer)
    for number, spoils in enumerate([False, True, False]):
        loop.train(2)
        writer = HeldWriter(tmp_path / str(number))
        state = {"model": loop.model.state_dict()}
        future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        assert writer.arrived.wait(TIMEOUT_S)
        if spoils:
            with torch.no_grad():
                write(loop.model, taken)
        writer.let_go()
        future.result()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="parameter that lives on the host") if spoils else nullcontext():
            stager.close()


@pytest.mark.parametrize("kind", ["none", "fp32", "remainder"])
@pytest.mark.parametrize("name", ["step", "forward"])
def test_half_updated_weights_are_not_handed_out(mesh: DeviceMesh, name: str, kind: Any) -> None:
    """With masters or without; a load mends them."""

    def make(params: Any) -> Optimizer:
        made = torch.optim.AdamW(params, lr=0.02)
        return made if kind == "none" else add_masters(made, kind)

    loop = Loop(mesh, make, on_host(POLICIES[name]), net=Net if kind == "none" else narrow)
    loop.train(2)
    saved = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    fail_in_bucket(1, lambda: loop.train(1, first=2))
    assert engine_of(loop.optimizer).failure
    sentence = "refused: an earlier step.. stopped with ArithmeticError: a bit has flipped. 1 of .* Load a checkpoint"
    for what in (loop.optimizer.step, loop.model.state_dict, loop.model.blocks[0].state_dict):
        with pytest.raises(RuntimeError, match=sentence):
            what()
    assert get_optimizer_state_dict(loop.model, loop.optimizer, for_load=True)
    loop.optimizer.load_state_dict(saved[1])
    assert loop.model.state_dict().keys() == saved[0].keys()  # to load into
    loop.model.load_state_dict(saved[0])
    assert all(map(torch.equal, loop.model.state_dict().values(), saved[0].values()))
    assert same_value(loop.optimizer.state_dict()["state"], saved[1]["state"])
    loop.optimizer.zero_grad()
    loop.train(1, first=2)


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_an_optimizer_that_is_dropped_behind_a_backward_is_named(
    mesh: DeviceMesh, parameters: bool, clears: bool
) -> None:
    """Half of its step has happened: the model is not used, trained or saved as if nothing were."""
    loop = Loop(mesh, adamw, policy_of({"overlap": "iteration"}, parameters=parameters))
    weights = copy.deepcopy(loop.model.state_dict())
    loop.train(4)
    loss = loop.model(loop.batch(41))
    loop.backward(40)
    assert engine_of(loop.optimizer).core.done
    loop.optimizer = loop.schedulers[0] = None  # type: ignore[assignment]
    gc.collect()
    if clears:
        loop.model.zero_grad()
    for use in (loss.backward, loop.model.state_dict, lambda: loop.model(loop.batch(42))):
        with pytest.raises(RuntimeError, match=r"optimizer was dropped .* before step\(\)"):
            use()
    loop.model.load_state_dict(weights)
    loop.model.zero_grad()
    loop.backward(43)  # the first whose gradients nobody uses
    assert all(type(param.grad) is DTensor for param in loop.model.parameters())


@EVERY_POLICY
def test_after_synchronize_whoever_reaches_past_torch_sees_what_is_new(
    mesh: DeviceMesh, fields: dict[str, Any]
) -> None:
    """Parameters that stayed on the device behind the step are at home then."""
    plain, loop = pair(mesh, on_host(fields, staying=1 << 20))
    plain.train(4)
    synchronize(loop.train(4).optimizer)
    assert all(torch.equal(*map(local_shard, both)) for both in zip(plain.params, loop.params, strict=True))


@pytest.mark.parametrize("knows_dtensors", [False, True])
def test_the_implementation_is_the_one_that_torch_takes_without_offload(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, knows_dtensors: bool
) -> None:
    """``AdamW(params)`` on a GPU: foreach and for-loop differ in the last bit, and torch chooses by the type."""
    types = [torch.Tensor, nn.Parameter, *([DTensor] if knows_dtensors else [])]
    monkeypatch.setattr(sys.modules[Optimizer.__module__], "_foreach_supported_types", types)
    loop = Loop(mesh, lambda params: torch.optim.AdamW(params, lr=1e-2), on_host({}))
    assert type(next(loop.model.parameters())) is not DTensor, "the parameter has a class of its own on the host"
    loop.backward(0)
    assert pinned_implementations(loop.optimizer) == [{} if knows_dtensors else {"foreach": False}]


def trained_only(params: Any) -> Optimizer:
    return adamw([param for param in params if param.requires_grad])


def partly_frozen() -> nn.Module:
    made = Net(width=64)
    for block in made.blocks:
        block.up.weight.requires_grad_(False)
    return made


def test_frozen_parameters_are_loaded_and_not_stored(mesh: DeviceMesh) -> None:
    """Another optimizer may write their homes, or a save read them."""

    def stored_bytes(net: Callable[[], nn.Module]) -> int:
        loop = Loop(mesh, trained_only, on_host({"overlap": "forward"}, staying=0), net=net).train(3)
        stored: int = loop.optimizer.offload_report().step.stored_bytes  # type: ignore[attr-defined]
        return stored

    weights_bytes = 4 * (64 * 128 * 4)
    assert stored_bytes(lambda: Net(width=64)) - stored_bytes(partly_frozen) == 3 * weights_bytes  # with two states


@pytest.mark.parametrize("thaw", ["by hand", "behind a refused group"])
@pytest.mark.parametrize("overlap", ["step", "forward", "iteration"])
def test_frozen_parameters_that_are_trained_later(mesh: DeviceMesh, overlap: str, thaw: str) -> None:
    """The optimizer, which has moved them home, does not know them before."""
    loops = pair(mesh, on_host({"overlap": overlap}, staying=0), trained_only, net=partly_frozen)
    for loop in loops:
        loop.train(3)
        weights = [param for param in loop.model.parameters() if not param.requires_grad]
        for param in weights:
            param.requires_grad_(True)
        if thaw == "by hand":
            loop.optimizer.param_groups[0]["params"].extend(weights)
            continue
        if loop is loops[1]:
            with pytest.raises(ValueError, match="meta"):
                loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, device="meta"))]})
        loop.optimizer.add_param_group({"params": weights, "lr": 0.01})
    for step in range(3, 7):
        assert same(loops[0].train(1, first=step), loops[1].train(1, first=step)), step


@pytest.mark.parametrize("staying", [0, 10 * 2048])
def test_an_update_of_several_buckets_stores_their_parameters_once(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, staying: int
) -> None:
    loop = Loop(mesh, adamw, on_host({"overlap": "iteration"}, bucket_bytes=2048, staying=staying)).train(5)
    stored, put = list[str](), Cache.put
    monkeypatch.setattr(Cache, "put", lambda cache, item: stored.append(item.name) or put(cache, item))
    loop.train(1, first=5)
    assert len(stored) == len(set(stored))
