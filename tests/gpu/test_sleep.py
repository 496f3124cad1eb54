"""The sleep of a model on a device: memory that is really free, on streams that really run beside each other."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import multiprocessing as torch_multiprocessing

import fsdp_offload.model.sleep as room
from fsdp_offload import OffloadPolicy, offload_model, reload_model
from fsdp_offload.device.lanes import DeviceLink, Lane
from tests.forks import resident_bytes
from tests.gpu.streams import MIB, SIZES
from tests.overlapping import Loop, Net, adamw

LONG_CYCLES = 400_000_000  # about 0.2 s: longer than the host takes for what follows
ASLEEP = r"Call reload_model\(model\) first"

pytestmark = pytest.mark.usefixtures("clean_device")


def make(device: torch.device, *sizes: int) -> nn.ParameterList:
    """Parameters of so many MiB each, and some that are small."""
    torch.manual_seed(0)
    shapes = [*((size, MIB // 4) for size in sizes), (3,), (1000, 7)]
    return nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for shape in shapes)


def bits(model: nn.Module) -> list[Tensor]:
    return [param.detach().cpu() for param in model.parameters()]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# Bytes ---------------------------------------------------------------------------------------------------------------


def with_gradients(model: nn.ParameterList) -> nn.ParameterList:
    for param in model:
        param.grad = torch.randn_like(param)
    return model


def test_the_memory_is_free_for_others(device):
    model = with_gradients(make(device, 4))
    offload_model(model)  # with the kernels and streams that the driver then keeps
    reload_model(model)
    del model
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    model = with_gradients(make(device, 256, 512, 300))  # the middle one lies across a break of the arena
    before = bits(model)
    grads = [param.grad.cpu() for param in model]
    held = sum(2 * param.nbytes for param in model)
    moved = offload_model(model)
    assert moved == held
    assert torch.cuda.memory_allocated() == allocated
    torch.cuda.empty_cache()
    assert free - torch.cuda.mem_get_info()[0] < 32 * MIB  # what the driver keeps for locked pages
    reload_model(model)
    assert torch.cuda.memory_allocated() - allocated == pytest.approx(held, abs=8 * 512)  # rounded by the allocator
    assert equal(bits(model), before)
    assert equal([param.grad.cpu() for param in model], grads)


def test_all_memory_of_a_sharded_model_and_of_its_optimizer_is_free(device, mesh):
    def build() -> Loop:
        policy = OffloadPolicy(**SIZES)
        return Loop(mesh, adamw, policy, net=lambda: Net(width=512)).train(2)

    build()  # what torch allocates once and keeps, as workspaces of cuBLAS
    gc.collect()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    loop = build()
    with torch.no_grad():
        loop.model(loop.batch(99))  # the root stays gathered
    loop.optimizer.offload_states()
    loop.optimizer.release_states()
    assert offload_model(loop.model) > 20 * MIB
    # Counters, and scalars of torch's own; 512 bytes is the least that its allocator gives.
    assert torch.cuda.memory_allocated() - allocated < MIB
    reload_model(loop.model)
    loop.optimizer.reload_states()
    loop.train(2, first=2)


def test_the_arena_is_pinned_and_given_back(device):
    model = make(device, 300)
    offload_model(model)
    reload_model(model)
    torch.cuda.synchronize()
    assert room._parkings[model].region.bytes.is_pinned()
    before = resident_bytes()
    reload_model(model, free_host_memory=True)
    assert before - resident_bytes() > 290 * MIB


def fill_with_sevens(device: torch.device) -> None:
    """The memory that a parameter of 64 MiB had, and is likely to get again."""
    sevens = torch.full((64, MIB // 4), 7.0, device=device)
    torch.cuda.current_stream().synchronize()
    del sevens


# Streams -------------------------------------------------------------------------------------------------------------


def write_late(device: torch.device) -> nn.ParameterList:
    """Ones and twos, on the current stream and on another one that nobody waits for."""
    model = make(device, 16, 16)
    torch.cuda.synchronize()
    side = torch.cuda.Stream(priority=-1)  # of another pool than those of the copies: torch gives streams out again
    with torch.no_grad():
        torch.cuda._sleep(LONG_CYCLES)
        model[0].fill_(1)
        with torch.cuda.stream(side):
            torch.cuda._sleep(3 * LONG_CYCLES)  # longer than what the current stream still has to do
            model[1].fill_(2)
    return model


@pytest.mark.parametrize("waits", [True, False])
def test_what_the_device_still_has_to_write_is_kept(device, monkeypatch, waits):
    """And lost without the wait, unless the current stream wrote it, which copies wait for: the test can fail."""
    model = write_late(device)
    with monkeypatch.context() as patch:
        if not waits:
            patch.setattr(DeviceLink, "synchronize", lambda self: None)
        offload_model(model)
    torch.cuda.synchronize()
    reload_model(model)
    assert [bool((param == value).all()) for param, value in zip(model, (1, 2), strict=False)] == [True, waits]


def test_memory_is_given_back_when_nobody_reads_it_any_more(device):
    model = make(device, 64)
    side = torch.cuda.Stream()
    expected = model[0].detach().sum().item()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(3 * LONG_CYCLES)  # longer than what the current stream still has to do
        total = model[0].detach().sum()
    offload_model(model)
    fill_with_sevens(device)  # the memory that is free now
    side.synchronize()
    assert total.item() == expected


@pytest.mark.parametrize("waits", [True, False])
def test_the_current_stream_waits_for_the_wake(device, monkeypatch, waits):
    """With a busy kernel in front of what wakes the model; other bits without the wait."""
    load = room.Parking.load

    def slowed(parking: Any) -> Any:
        with room.device_link(torch.device("cuda", 0)).lanes(serial=False).load.running():
            torch.cuda._sleep(LONG_CYCLES)
        return load(parking)

    model = make(device, 64)
    expected = model[0].detach().clone()
    offload_model(model)
    fill_with_sevens(device)
    monkeypatch.setattr(room.Parking, "load", slowed)
    if not waits:
        monkeypatch.setattr(Lane, "wait", lambda self, *marks: None)
    reload_model(model)
    assert torch.equal(model[0].detach(), expected) == waits


def test_memory_that_the_current_stream_still_reads_is_not_overwritten(device):
    """The wake gets memory of a tensor that is gone for the host, and not yet for the device."""
    model = make(device, 64)
    offload_model(model)
    torch.cuda.empty_cache()
    activation = torch.full((64, MIB // 4), 3.0, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    total = activation.sum(dtype=torch.float64)
    del activation
    reload_model(model)
    assert total.item() == 3.0 * 64 * MIB / 4


def test_a_stream_of_the_users_own(device):
    model = make(device, 64)
    expected = model[0].detach().clone()
    offload_model(model)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        reload_model(model)
        found = model[0].detach().clone()
    side.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("default")  # inductor's advice about TensorFloat32
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model(device, mode):
    """With CUDA graphs inductor notices that addresses have changed, and records anew."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).to(device)
    compiled = torch.compile(model, mode=mode)
    x = torch.randn(8, 256, device=device)
    with torch.no_grad():
        expected = [compiled(x).clone() for _ in range(3)][-1]
        for _ in range(3):
            offload_model(model)
            with pytest.raises(Exception, match=f"{ASLEEP}|data is not allocated yet"):
                compiled(x)
            occupied = torch.ones(16 * MIB, device=device)  # the next addresses are others
            reload_model(model)
            for _ in range(3):
                assert torch.equal(compiled(x).clone(), expected)
            del occupied
    torch._dynamo.reset()


# CUDA IPC ------------------------------------------------------------------------------------------------------------


def read_shared(queue: Any, answers: Any) -> None:
    """Another process: a generation engine that was given the weights."""
    weight = queue.get()
    answers.put(weight.sum().item())
    queue.get()  # the model has slept and has been trained
    torch.cuda.synchronize()
    answers.put(weight.sum().item())
    del weight
    gc.collect()
    torch.cuda.ipc_collect()
    answers.put("closed")
    queue.get()


def test_an_open_ipc_handle_keeps_the_old_memory(device):
    """As documented: nothing dangles, the other process sees the old bytes, and the memory stays until it lets go."""
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    model = nn.ParameterList([nn.Parameter(torch.ones(64, MIB // 4, device=device), requires_grad=False)])
    context = torch_multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    child = context.Process(target=read_shared, args=(queue, answers), daemon=True)
    child.start()
    try:
        queue.put(model[0].data)
        ones = answers.get(timeout=120)
        assert ones == 64 * MIB / 4
        offload_model(model)
        kept = torch.cuda.memory_allocated() - allocated
        reload_model(model)
        model[0].fill_(2)
        torch.cuda.synchronize()
        queue.put("look again")
        assert answers.get(timeout=120) == ones
        assert kept >= 64 * MIB
        assert answers.get(timeout=120) == "closed"
        torch.cuda.ipc_collect()
        assert torch.cuda.memory_allocated() - allocated < 65 * MIB
        queue.put("done")
    finally:
        child.join(timeout=60)
    assert child.exitcode == 0
