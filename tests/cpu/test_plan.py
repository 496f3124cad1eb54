"""What training will cost: bytes and times by formulas that are written down here, and answers to bad questions."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from examples import worked_cases
from examples.benchmarks.train import GPT
from fsdp_offload import OffloadPolicy
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.plan import (
    CHOICES,
    Choice,
    Machine,
    Plan,
    builtin_machines,
    builtin_models,
    machine_of,
    model_of,
    plan,
)
from fsdp_offload.plan.choices import lines_to_write
from fsdp_offload.plan.machine import _cache_path
from fsdp_offload.plan.trace import trace
from fsdp_offload.plan.training import DTYPES
from fsdp_offload.policy import MasterKind
from tests.parity import attach

LAYERS, WIDTH, VOCABULARY, LENGTH = 3, 256, 1536, 96


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(LAYERS, WIDTH, VOCABULARY)


def small_plan(**training: object) -> Plan:
    return plan(gpt(), **{"tokens_per_step": 4 * LENGTH, "sequence_length": LENGTH, "machine": "H200", **training})


def gpt_large() -> GPT:
    with torch.device("meta"):
        return GPT(8, 1024, 1536)


def large_plan(**training: object) -> Plan:
    """Of a model with more state than staging."""
    return plan(
        gpt_large(), **{"tokens_per_step": 4 * LENGTH, "sequence_length": LENGTH, "machine": "H200", **training}
    )


def by_name(made: Plan) -> dict:
    return {one.name: one for one in made.forecasts}


# Memory --------------------------------------------------------------------------------------------------------------


def test_activations_are_what_each_operation_keeps() -> None:
    sequences = 16
    tokens = sequences * LENGTH
    found = model_of(gpt()).trace(sequences, LENGTH, torch.bfloat16)
    start = next(one for one in found.segments if one.phase == "backward")
    heads = WIDTH // 128
    layer = tokens * (
        2 * WIDTH * (1 + 1)  # the input of each norm
        + 2 * WIDTH * (1 + 1)  # its output, which a matrix product needs
        + 4 * 4  # mean and deviation of each norm, in fp32
        + 2 * WIDTH * (3 + 1)  # query, key and value; what attention returns
        + 4 * heads  # and its sums
        + 2 * 4 * WIDTH * 2  # before and after GELU
    )
    loss = tokens * (2 * WIDTH * 2 + 8)  # the last norm
    assert start.peak_bytes_by_label["logits"] == 3 * 2 * VOCABULARY * tokens  # the logarithms, and two gradients
    assert start.peak_bytes_by_label["activations"] == pytest.approx(LAYERS * layer + loss, rel=0.02)


def test_recomputing_keeps_what_goes_into_each_block() -> None:
    tokens = 16 * LENGTH
    one, other = (model_of(gpt()).trace(16, LENGTH, torch.bfloat16, kind) for kind in ("none", "full"))
    start = next(one for one in other.segments if one.phase == "backward")
    assert start.peak_bytes_by_label["activations"] == pytest.approx(tokens * 2 * WIDTH * (LAYERS + 2), rel=0.1)
    again = other.flops("backward") - one.flops("backward")
    head = 2 * tokens * WIDTH * VOCABULARY
    # Everything but the head, and but the last product of each block: nothing needs its result again.
    last = 2 * tokens * WIDTH * 4 * WIDTH
    assert again == one.flops("forward") - head - LAYERS * last


def test_operations_are_two_for_each_weight_and_token() -> None:
    model, tokens = gpt(), 2 * LENGTH
    found = model_of(model).trace(2, LENGTH, torch.bfloat16)
    weights = sum(param.numel() for name, param in model.named_parameters() if param.dim() == 2 and "embed" not in name)
    attention = LAYERS * 2 * tokens * LENGTH * WIDTH  # both products, the causal half of each
    assert found.flops("forward") == 2 * tokens * weights + attention


def test_a_trace_leaves_the_model_as_it_was() -> None:
    model = GPT(1, WIDTH, 64)
    before = [param.detach().clone() for param in model.parameters()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    model_of(model).trace(1, 16, torch.bfloat16, "full")
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(param.grad is None and param.device.type == "cpu" for param in model.parameters())
    assert hooks == [len(module._forward_hooks) for module in model.modules()]


def test_groups_are_reduced_in_the_order_of_the_backward() -> None:
    found = model_of(gpt()).trace(1, LENGTH, torch.bfloat16)
    assert found.reduced == (*reversed(range(LAYERS)), LAYERS)


def test_attention_that_is_taken_apart_shows() -> None:
    class Eager(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            x = (
                self.proj(tokens[:, :-1, None].expand(-1, -1, 8).to(torch.bfloat16))
                .unflatten(-1, (2, 4))
                .transpose(1, 2)
            )
            return ((x @ x.transpose(2, 3)).softmax(-1) @ x).mean()

    module = Eager()
    tokens = torch.empty(2, 33, dtype=torch.long, device="meta")
    found = trace(module, [module], lambda model: model(tokens), compute_dtype=torch.bfloat16)
    scores = 2 * 2 * 32 * 32 * 2
    assert max(one.peak_bytes_by_label.get("attention scores", 0) for one in found.segments) >= 2 * scores


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_state_and_host_memory_are_those_of_the_largest_shard(ranks: int) -> None:
    made = small_plan(ranks=ranks, tokens_per_step=ranks * LENGTH)
    local = [-(-param.shape[0] // ranks) * param.numel() // param.shape[0] for param in gpt().parameters()]
    kept, moved = made.forecasts[0], by_name(made)["step"]
    assert kept.device.terms["optimizer state"] == 8 * sum(local)
    assert kept.device.terms["parameters"] == 4 * sum(local)
    assert "optimizer state" not in moved.device.terms
    aligned = sum(2 * -(-4 * numel // 64) * 64 for numel in local)  # each tensor begins on a multiple of 64 bytes
    assert moved.host_bytes == aligned
    assert moved.host_bytes_per_host == ranks * aligned


def test_state_of_masters_and_of_other_optimizers() -> None:
    numel = sum(param.numel() for param in gpt().parameters())
    for training, itemsize in (
        ({"dtype": "bf16"}, 4),
        ({"dtype": "bf16", "master_weights": "fp32"}, 12),
        ({"dtype": "bf16", "master_weights": "remainder"}, 10),
        ({"optimizer": "sgd-momentum"}, 4),
    ):
        assert small_plan(**training).forecasts[0].device.terms["optimizer state"] == itemsize * numel


def test_gradients_of_a_long_accumulation_are_there_in_every_forward() -> None:
    one, several = (small_plan(tokens_per_step=8 * LENGTH, micro_batches=count) for count in (1, 2))
    assert "gradients" not in one.forecasts[0].device.terms
    assert several.forecasts[0].device.terms["gradients"] == one.forecasts[0].device.terms["parameters"]


def slow_link() -> Machine:
    rates = dict.fromkeys(("load_gb_per_s", "store_gb_per_s"), 0.25)
    return dataclasses.replace(machine_of("H200"), two_way_gb_per_s=0.5, contention=0.0, launch_us=0.0, **rates)


def fast_link() -> Machine:
    rates = dict.fromkeys(("load_gb_per_s", "store_gb_per_s", "two_way_gb_per_s", "host_gb_per_s"), 1e6)
    return dataclasses.replace(machine_of("H200"), launch_us=0.0, **rates)


# Time ----------------------------------------------------------------------------------------------------------------


def test_without_a_link_to_speak_of_offload_costs_nothing() -> None:
    machine = dataclasses.replace(fast_link(), contention=0.0)
    made = large_plan(machine=machine, clip=False)
    for one in made.forecasts:
        assert one.iteration_ms == pytest.approx(made.forecasts[0].iteration_ms, rel=1e-3)


def test_a_slow_link_is_what_limits_and_what_is_kept() -> None:
    machine = slow_link()
    forecasts = by_name(large_plan(machine=machine))
    times = large_plan(machine=machine).times
    assert forecasts["forward"].limit == "host link"
    assert forecasts["step"].iteration_ms > forecasts["forward"].iteration_ms
    kept = forecasts["forward, keeping"]
    state_bytes = forecasts["no offload"].resident_bytes
    share = 1 - 0.75 * times.forward_ms / times.two_way_ms
    assert kept.resident_bytes / state_bytes == pytest.approx(share, rel=0.01)


def test_ranks_of_a_host_share_its_memory_bandwidth() -> None:
    machine = machine_of("H200")
    alone, together = (large_plan(ranks=ranks, tokens_per_step=ranks * LENGTH).times for ranks in (1, 8))
    rate = min(machine.two_way_gb_per_s, machine.host_gb_per_s / 8)
    # An eighth of the state, on each of eight ranks that share.
    assert together.two_way_ms == pytest.approx(alone.two_way_ms / 8 * machine.two_way_gb_per_s / rate, rel=0.01)


def test_a_host_that_launches_slowly_is_what_limits() -> None:
    by_launch_us = {
        launch_us: by_name(large_plan(machine=dataclasses.replace(fast_link(), launch_us=launch_us), clip=False))
        for launch_us in (0.0, 100.0, 200.0)
    }
    assert by_launch_us[0.0]["no offload"].limit == "compute"
    one, other = by_launch_us[100.0], by_launch_us[200.0]
    assert {other[name].limit for name in ("no offload", "forward", "iteration")} == {"launches"}
    for name in ("no offload", "forward", "iteration"):
        assert other[name].iteration_ms == pytest.approx(2 * one[name].iteration_ms)
    # Issuing what is moved and updated takes the host's time too, in proportion to the parameters.
    tensors = len(list(gpt_large().parameters()))
    turns = 2 * 9
    issued_ms = one["iteration"].iteration_ms - one["no offload"].iteration_ms
    assert issued_ms == pytest.approx((43 * tensors + 60 * turns) * 0.1)


def test_nothing_hides_what_of_the_root_is_not_loaded_ahead() -> None:
    machine = dataclasses.replace(fast_link(), two_way_gb_per_s=1000.0, contention=0.0)
    with torch.device("meta"):
        model = GPT(8, 1024, 32_768)
    made = plan(model, machine=machine, clip=False, tokens_per_step=96 * LENGTH, sequence_length=LENGTH)
    one, forecasts = made.forecasts[0].iteration_ms, by_name(made)
    root_bytes = 8 * (2 * 32_768 * 1024 + 2 * 1024)  # state of embedding, head and the last norm
    ahead_bytes = 4 * 64 << 20
    root_ms = 2 * (root_bytes - ahead_bytes) / machine.two_way_gb_per_s / 1e6
    for name in ("forward", "iteration"):
        assert forecasts[name].limit == "compute"
        in_wait_ms = made.times.update_ms * root_ms / made.times.two_way_ms
        # The first block is wanted so soon after the root that it is waited for a little too.
        assert forecasts[name].iteration_ms - one == pytest.approx(root_ms - in_wait_ms, rel=0.06)
        assert forecasts[f"{name}, keeping"].iteration_ms == pytest.approx(one, rel=1e-3)


def test_only_the_first_forward_and_the_last_backward_hide_transfers() -> None:
    machine = slow_link()
    one = by_name(large_plan(machine=machine, clip=False))
    several = by_name(large_plan(machine=machine, tokens_per_step=12 * LENGTH, micro_batches=3, clip=False))
    passes = one["no offload"].iteration_ms - large_plan(machine=machine).times.update_ms
    assert several["forward"].iteration_ms - one["forward"].iteration_ms == pytest.approx(2 * passes, rel=0.01)
    # With one, the ring cannot be filled while the link is busy all the time.
    assert passes < several["iteration"].iteration_ms - one["iteration"].iteration_ms < 2 * passes


def test_what_fits_into_a_number_of_bytes_is_kept() -> None:
    limit_bytes = 640 << 20
    choices = [Choice(overlap, device_bytes=limit_bytes) for overlap in ("step", "forward", "iteration")]
    made = large_plan(machine=slow_link(), choices=choices)
    passing_bytes = {"step": 4 * 64 << 20, "forward": 10 * 64 << 20, "iteration": 10 * 64 << 20}
    for one in made.forecasts[1:]:
        assert one.name == f"{one.choice.overlap}, 640 MiB"
        left_bytes = limit_bytes - passing_bytes[one.choice.overlap]
        assert one.device.terms["staging"] == passing_bytes[one.choice.overlap] - (64 << 20)
        assert one.resident_bytes == left_bytes
    more = large_plan(machine=slow_link(), choices=[Choice("forward", device_bytes=900 << 20)]).forecasts[1]
    group_bytes = 8 * sum(param.numel() for param in gpt_large().blocks[0].parameters())
    root_bytes = 8 * (2 * 1536 * 1024 + 2 * 1024)
    assert more.resident_bytes == pytest.approx(root_bytes + 2 * group_bytes, rel=1e-3)  # whole groups
    assert more.iteration_ms < made.forecasts[2].iteration_ms


# Parameters on the host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "up", "down"),
    [
        ({}, 16, 12),
        ({"micro_batches": 2}, 24, 12),  # two gathers more
        ({"dtype": "bf16", "master_weights": "remainder"}, 14, 12),
        ({"dtype": "bf16", "master_weights": "fp32"}, 16, 14),
        ({"optimizer": "sgd"}, 8, 4),
    ],
    ids=str,
)
def test_bytes_on_the_link_with_parameters_on_the_host(training: dict, up: int, down: int) -> None:
    numel = sum(param.numel() for param in gpt_large().parameters())
    rates = {"load_gb_per_s": 0.1, "store_gb_per_s": 0.1, "two_way_gb_per_s": 0.2}
    machine = dataclasses.replace(slow_link(), device_bytes=1, **rates)  # no room to keep anything
    one = by_name(large_plan(machine=machine, clip=False, **training))["iteration, parameters"]
    assert one.limit == "host link"
    assert one.iteration_ms == pytest.approx(up * numel / 0.1e6, rel=1e-3)
    assert one.bound_ms == pytest.approx(one.iteration_ms)
    machine = dataclasses.replace(machine, store_gb_per_s=0.01)
    one = by_name(large_plan(machine=machine, clip=False, **training))["iteration, parameters"]
    assert one.bound_ms == pytest.approx(down * numel / 0.01e6, rel=1e-3)


def test_parameters_are_loaded_once_more_for_an_update_in_the_step() -> None:
    numel = sum(param.numel() for param in gpt_large().parameters())
    made = large_plan(machine=dataclasses.replace(slow_link(), device_bytes=1), clip=False)
    one = by_name(made)["step, parameters"]
    gathers_ms, update_ms = 8 * numel / 0.25e6, 12 * numel / 0.25e6
    assert one.iteration_ms == pytest.approx(gathers_ms + update_ms, rel=1e-3)


def test_a_window_of_the_largest_groups_stands_for_parameters_on_the_device() -> None:
    machine = dataclasses.replace(fast_link(), contention=0.0)  # nothing is late
    forecasts = by_name(large_plan(machine=machine, clip=False))
    plain, step = forecasts["no offload"].device, forecasts["step, parameters"].device
    model = gpt_large()
    numel = sum(param.numel() for param in model.parameters())
    block_bytes = 4 * sum(param.numel() for param in model.blocks[0].parameters())
    window_bytes = 3 * block_bytes  # the largest group, and two of the second largest: the root is smaller
    assert step.terms["window"] == window_bytes
    assert step.peak_bytes == plain.peak_bytes - 12 * numel + window_bytes + step.terms["staging"]
    assert step.terms["gradients"] == plain.terms["gradients"] > 6 * block_bytes  # until step(), here as well
    iteration = forecasts["iteration, parameters"].device
    assert iteration.terms["window"] == window_bytes
    assert iteration.terms["staging"] == 12 * numel // 25
    assert iteration.terms["gradients"] <= 6 * block_bytes  # of five groups, and of one on its way into the reduction


def test_where_gradients_may_be_clipped_they_stay_until_the_step() -> None:
    devices = [
        by_name(large_plan(machine=fast_link(), clip=clip))["iteration, parameters"].device for clip in (False, True)
    ]
    assert devices[0].peak_bytes < devices[1].peak_bytes


def test_what_a_window_and_a_host_take_is_what_the_engine_takes(mesh: DeviceMesh) -> None:
    model = GPT(LAYERS, 128, VOCABULARY)
    made = plan(model, machine="H200", tokens_per_step=LENGTH, sequence_length=LENGTH)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach(optimizer, model=model, policy=OffloadPolicy(parameters=True))
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1))
    model(tokens).backward()
    optimizer.step()
    one, engine = by_name(made)["step, parameters"], engine_of(optimizer)
    assert engine is not None
    assert engine.window is not None
    assert one.device.terms["window"] == engine.window.capacity_bytes
    assert one.host_bytes == sum(region.nbytes for region in engine.plan.regions)


@pytest.mark.parametrize(("dtype", "masters"), [("fp32", "none"), ("bf16", "remainder"), ("bf16", "fp32")])
@pytest.mark.parametrize("name", ["step", "forward, keeping", "iteration"])
def test_host_bytes_are_what_the_engine_takes(mesh: DeviceMesh, name: str, dtype: str, masters: MasterKind) -> None:
    model = GPT(LAYERS, 128, VOCABULARY).to(DTYPES[dtype])
    made = plan(
        model,
        machine="H200",
        tokens_per_step=LENGTH,
        sequence_length=LENGTH,
        dtype=dtype,
        master_weights=masters,
    )
    state_bytes = sum(made.training.state_itemsizes()) * made.numel
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    one = by_name(made)[name]
    policy = dataclasses.replace(one.choice.policy(state_bytes), master_weights=masters)
    attach(optimizer, model=model, policy=policy)
    model(torch.randint(VOCABULARY, (1, LENGTH + 1))).backward()
    optimizer.step()
    assert one.host_bytes == optimizer.offload_report().host_bytes


def test_groups_stay_until_the_link_is_not_late_or_the_device_is_full() -> None:
    rates = {"load_gb_per_s": 100.0, "store_gb_per_s": 100.0, "two_way_gb_per_s": 200.0, "host_gb_per_s": 200.0}
    machine = dataclasses.replace(slow_link(), **rates)
    made = large_plan(machine=machine, clip=False, tokens_per_step=64 * LENGTH)
    roomy = by_name(made)["iteration, parameters"]
    assert roomy.limit == "compute"
    lowest_bytes = roomy.device.peak_bytes - roomy.resident_bytes
    whole_bytes = 12 * sum(param.numel() for param in gpt_large().parameters())
    assert 0 < roomy.resident_bytes < whole_bytes
    device_bytes = int((lowest_bytes + roomy.resident_bytes // 2) / 0.95) + machine.context_bytes
    less = by_name(made.within(device_bytes))["iteration, parameters"]
    assert 0 < less.resident_bytes <= roomy.resident_bytes // 2
    assert less.iteration_ms > roomy.iteration_ms
    assert less.limit == "host link"


def test_parameters_share_a_number_of_bytes_with_their_state() -> None:
    limit_bytes, machine = 1 << 30, slow_link()
    choices = [
        Choice("iteration", "auto", parameters=True),
        Choice("iteration", device_bytes=limit_bytes, parameters=True),
    ]
    roomy, limited = large_plan(machine=machine, choices=choices, clip=False).forecasts[1:]
    assert limited.name == "iteration, parameters, 1024 MiB"
    terms = limited.device.terms
    ours = ("parameters", "window", "optimizer state", "staging")
    assert sum(terms[name] for name in ours) <= limit_bytes
    assert limited.resident_bytes == pytest.approx(terms["parameters"] + terms["optimizer state"], rel=1e-6)
    assert 0 < limited.resident_bytes < roomy.resident_bytes
    assert limited.device.peak_bytes < roomy.device.peak_bytes
    assert limited.limit == "host link"
    assert limited.iteration_ms > roomy.iteration_ms
    assert "parameters=True" in limited.lines
    assert "device_bytes=1024 << 20" in limited.lines


def test_parameters_go_to_the_host_where_nothing_else_fits() -> None:
    made = plan("Qwen3-14B", tokens_per_step=16_384, checkpointing="full", clip=False)
    on_host = Choice("iteration", "auto", parameters=True)
    assert made.best(device_bytes=110 * 10**9).choice == on_host
    assert made.best(device_bytes=110 * 10**9, loop="any").choice == Choice("step", parameters=True)
    assert made.best(device_bytes=10**9) is None
    # Where state alone is enough, it is: also where the estimates are the same, and less would be needed.
    roomy = made.within(200 * 10**9)
    one, other = by_name(roomy)["iteration, keeping"], by_name(roomy)["iteration, parameters"]
    assert one.needed_bytes > other.needed_bytes
    assert roomy.best() == one
    same = dataclasses.replace(other, iteration_ms=one.iteration_ms)
    assert dataclasses.replace(roomy, forecasts=(one, same)).best() == one


def test_nothing_is_faster_than_its_bound() -> None:
    for one in (*large_plan().forecasts, *small_plan().forecasts):
        assert one.iteration_ms >= one.bound_ms - 1e-9


# Choosing ------------------------------------------------------------------------------------------------------------


def test_the_best_is_the_fastest_that_fits_and_that_the_loop_allows() -> None:
    clipped = plan("Qwen3-14B", tokens_per_step=16_384, checkpointing="full")
    assert clipped.best().choice == Choice("forward", "auto")
    made = plan("Qwen3-14B", tokens_per_step=16_384, checkpointing="full", clip=False)
    assert made.best().choice == Choice("iteration", "auto")
    assert made.best(loop="synchronizes").choice == Choice("forward", "auto")
    assert made.best(loop="any").choice == Choice("step")
    assert made.best(device_bytes=200 * 10**9).choice == Choice("iteration", "auto")
    assert made.best(device_bytes=10**9) is None
    assert made.best(device_bytes=300 * 10**9).choice is None
    with pytest.raises(ValueError, match="any, synchronizes, no_clipping"):
        made.best(loop="sometimes")


@pytest.mark.parametrize("device_bytes", [0, -1])
def test_the_memory_of_a_device_is_a_positive_number_of_bytes(device_bytes: int) -> None:
    with pytest.raises(ValueError, match="device_bytes must be positive, got"):
        small_plan().best(device_bytes=device_bytes)


def test_auto_keeps_no_more_than_there_is_room_for() -> None:
    made = plan("Qwen3-14B", tokens_per_step=16_384, checkpointing="full", clip=False)
    kept_bytes = []
    for device_gb in (250, 150, 135):
        less = made.within(device_gb * 10**9)
        one = by_name(less)["iteration, keeping"]
        assert one.fits
        assert one.iteration_ms <= by_name(less)["iteration"].iteration_ms
        kept_bytes.append(one.resident_bytes)
    assert kept_bytes[0] > kept_bytes[1] > kept_bytes[2]
    assert made.within(made.machine.device_bytes) == made
    assert made.best(device_bytes=135 * 10**9) == made.within(135 * 10**9).best()


def test_a_host_without_the_memory_is_no_choice() -> None:
    machine = dataclasses.replace(machine_of("H200"), host_bytes=10**9)
    made = plan("Qwen3-14B", machine=machine, tokens_per_step=16_384, checkpointing="full")
    assert made.best() is None
    assert by_name(made)["step"].why_not.startswith("host: 118 GB of 1 GB")


@pytest.mark.parametrize("master_weights", ["none", "remainder"])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_lines_to_write_make_the_policy(choice: Choice, master_weights: MasterKind) -> None:
    for state_bytes in (10**9, 10**11):
        wanted = dataclasses.replace(choice.policy(state_bytes), master_weights=master_weights)
        assert policy_of(lines_to_write(choice, state_bytes, master_weights)) == wanted


def test_masters_without_offload_are_state_that_stays() -> None:
    assert lines_to_write(None, 10**9) == ""
    policy = policy_of(lines_to_write(None, 10**9, "remainder"))
    assert policy == OffloadPolicy(device_bytes=1 << 60, master_weights="remainder")


def policy_of(line: str) -> OffloadPolicy:
    seen = []

    def offload(*args: object, policy: OffloadPolicy | None = None, **kwargs: object) -> None:
        seen.append(policy or OffloadPolicy())

    exec(line, {"offload_optimizer": offload, "OffloadPolicy": OffloadPolicy}, {"optimizer": 0, "model": 0})
    return seen[0]


# What is asked for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", builtin_machines())
def test_every_profile_can_be_read(name: str) -> None:
    assert machine_of(name.lower()).name == name


@pytest.mark.parametrize(("name", "billions"), [("Llama-3.1-8B", 8.03), ("Qwen3-14B", 14.77), ("Mixtral-8x7B", 46.70)])
def test_builtin_models_have_their_parameters(name: str, billions: float) -> None:
    assert model_of(name).numel / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_config_may_be_a_file_a_folder_or_a_type_of_transformers(tmp_path: Path) -> None:
    config = json.loads(builtin_models()["Llama-3.1-8B"].read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    numel = model_of(tmp_path).numel
    assert numel == model_of(str(tmp_path / "config.json")).numel < model_of("llama").numel
    assert model_of(tmp_path).name == tmp_path.name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deepseek_v3", r"latent attention \(kv_lora_rank\), shared experts \(n_shared_experts\)"),
        ("qwen2_moe", "shared experts"),
        ("qwen3_next", r"linear attention \(layer_types\)"),
        ("bert", "an MLP without a gate"),
        ("starcoder2", "an MLP without a gate"),
    ],
)
def test_a_config_of_what_is_no_plain_decoder_is_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"not a plain decoder: it has .*{says}.*Give package.module:function"):
        model_of(name)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3_moe", "gemma", "phi3", "granite", "gpt_oss"])
def test_a_decoder_has_as_many_parameters_as_the_model_of_its_config(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(name))
    assert model_of(name).numel == pytest.approx(sum(param.numel() for param in module.parameters()), rel=1e-3)


def test_a_config_whose_heads_cannot_be_grouped_is_refused(tmp_path: Path) -> None:
    config = json.loads(builtin_models()["Llama-3.1-8B"].read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 5}), encoding="utf-8")
    with pytest.raises(ValueError, match="num_attention_heads=32 is not a multiple of num_key_value_heads=5"):
        model_of(tmp_path)


def test_a_model_of_transformers_is_run_as_it_is() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    made = plan(module, tokens_per_step=64, sequence_length=32)
    assert made.numel == sum(param.numel() for param in module.parameters())
    assert made.forecasts[0].device.terms["logits"] > 0


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"tokens_per_step": 0}, "tokens_per_step must be a positive integer, got 0"),
        ({"tokens_per_step": 5}, "is not a multiple of ranks × sequence_length × micro_batches = 96"),
        ({"ranks": 6, "replicas": 4}, "an impossible mesh: 6 ranks"),
        ({"machine": "B300"}, "no machine 'B300': there are A100, H100"),
        ({"optimizer": "adamv"}, "optimizer must be one of adamw, adam"),
        ({"rank": 2}, "plan knows no rank; there are ranks, replicas, tokens_per_step"),
        ({"dtype": "fp8"}, "dtype must be one of fp32, bf16; got 'fp8'"),
    ],
)
def test_bad_questions_get_an_answer_that_helps(training: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        small_plan(**training)


def test_what_is_no_model_gets_an_answer_that_helps() -> None:
    with pytest.raises(ValueError, match="model must be a module, a name or a path; got list"):
        plan([nn.Linear(2, 2)], tokens_per_step=4096)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_this_machine_is_not_measured() -> None:
    with pytest.raises(ValueError, match=r"machine 'this' has no GPU to measure; name one: A100, H100"):
        small_plan(machine="this")


def test_without_platformdirs_there_is_no_place_for_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)  # as if it were not installed
    assert _cache_path() is None
    assert set(builtin_machines()) == {"A100", "H100", "H200", "RTX4090"}


def test_a_profile_in_the_users_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "fsdp_offload" / "machines"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(builtin_machines()["H200"].read_text(encoding="utf-8"), encoding="utf-8")
    assert machine_of("mine") == dataclasses.replace(machine_of("H200"), name="mine")


def test_a_profile_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    text = builtin_machines()["H200"].read_text(encoding="utf-8")
    profile = tmp_path / "mine.toml"
    profile.write_text(text.replace("kernel_us", "kernel_ns"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"missing, or not known: kernel_ns, kernel_us"):
        machine_of(profile)
    profile.write_text(text.replace("value = 3,", 'value = "3",'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"kernel_us must be \{ value = <number>, source = <text> \}"):
        machine_of(profile)
    profile.write_text(text.replace("value = 3,", "value = 7,"), encoding="utf-8")
    assert machine_of(str(profile)).kernel_us == 7


@pytest.mark.parametrize("name", ["Llama-3.1-8B", pytest.param("Mixtral-8x7B", marks=pytest.mark.long)])
def test_the_worked_cases_of_the_page_are_what_the_plan_says(name: str) -> None:
    page_text = (Path(__file__).resolve().parents[2] / "docs/plan.md").read_text(encoding="utf-8")
    assert worked_cases.HEAD in page_text
    assert "\n".join(worked_cases.cases(name)) in page_text
