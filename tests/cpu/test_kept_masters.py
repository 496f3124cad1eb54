"""``add_masters``: a low-precision model trains as the same optimizer does on an fp32 copy of it, offloaded or not.

``tests/twins.py`` says what is compared. Masters that an optimizer keeps itself: ``test_fused_adam.py``.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from fsdp_offload import OffloadPolicy, add_masters, remove_offload
from fsdp_offload.optimizers.masters import close_master, open_master
from tests import state_dicts
from tests.cpu.test_parity_optimizers import FLAGS, implementations
from tests.fused_adam_reference import FusedAdam
from tests.parity import SMALL, Net, Run, Zoo, adamw, attach, same_bits, same_value
from tests.remedies import Unlisted
from tests.tiers import every_nth, spread
from tests.twins import LOW, MASTER, Twins, make_twins, master_of, rounded

WHOLE = OffloadPolicy(bucket_bytes=1 << 20)
KINDS = {kind: kind for kind in ("fp32", "remainder")}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FORMATS = {
    "fp32-bfloat16": ("fp32", torch.bfloat16),
    "fp32-float16": ("fp32", torch.float16),
    "remainder": ("remainder", torch.bfloat16),
}
EVERY_FORMAT = pytest.mark.parametrize(("kind", "dtype"), FORMATS.values(), ids=FORMATS)
IMPLEMENTATIONS = {str(chosen): chosen for chosen in ({"foreach": False}, {"foreach": True}, {"fused": True})}


# The formats ---------------------------------------------------------------------------------------------------------


def split(master: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Closed as remainder: the bf16 parameter and what is kept beside it."""
    weights = torch.empty_like(master, dtype=torch.bfloat16) if weights is None else weights
    kept = torch.empty_like(master, dtype=torch.int16)
    close_master("remainder", master, weights, kept)
    return weights, kept


def of_bits(*bits: int) -> Tensor:
    return (
        torch.tensor([value - (1 << 32) if value >> 31 else value for value in bits]).to(torch.int32).view(torch.float)
    )


def check_remainders(master: Tensor, weights: Tensor | None = None) -> None:
    before = master.clone()
    weights, kept = split(master, weights)
    joined = open_master("remainder", weights, kept)
    nan = before.isnan()
    assert torch.equal(weights.isnan(), nan)
    assert torch.equal(joined.isnan(), nan)
    assert same_bits(joined[~nan], before[~nan])
    assert same_bits(master_of("remainder", weights, kept)[~nan], before[~nan])
    assert torch.equal(weights[~nan], rounded("remainder", before, torch.bfloat16)[~nan])
    assert joined.stride() == kept.stride()


def test_every_upper_half_with_the_lower_halves_that_matter() -> None:
    """All signs, exponents, infinities, denormals and zeros; around each tie, and at both ends."""
    lower = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] << 16 | lower).flatten()
    check_remainders(((bits ^ 0x80000000) - 0x80000000).to(torch.int32).view(torch.float32))


ANY_BITS = st.integers(0, (1 << 32) - 1)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda flat: flat.clone(),
    "0-dim": lambda flat: flat[0].clone(),
    "empty": lambda flat: flat[:0].reshape(0, 7),
    "transposed": lambda flat: flat.view(4, 6).t(),
    "permuted": lambda flat: flat.view(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda flat: flat.view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "ones": lambda flat: flat.view(1, 6, 1, 4).transpose(1, 3),
    "not from the start": lambda flat: torch.cat([flat, flat])[5:29].view(6, 4),
}


@settings(deadline=None, max_examples=60)
@example(bits=[0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7FFFFFFF, 0xFFFFFFFF] * 3)
@example(bits=[0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x0000FFFF, 0x807FFFFF, 0x3F808000, 0xBF818000] * 3)
@given(bits=st.lists(ANY_BITS, min_size=24, max_size=24))
def test_any_bits_in_any_dense_layout(bits: list[int]) -> None:
    for make in LAYOUTS.values():
        check_remainders(make(of_bits(*bits)))


def test_parameters_need_not_be_dense() -> None:
    """A column of a table: what is kept for it is dense all the same."""
    master, table = torch.randn(40, 3), torch.zeros(40, 8, dtype=torch.bfloat16)
    check_remainders(master, table[:, 2:5])
    assert table[:, 2:5].all()
    assert not table[:, :2].any()
    assert not table[:, 5:].any()


@settings(deadline=None, max_examples=60)
@given(bits=st.lists(ANY_BITS, min_size=8, max_size=8), written=st.sets(st.integers(0, 7)))
@pytest.mark.parametrize("dtype", LOW)
def test_a_whole_master_keeps_its_bits_where_nobody_has_written(
    dtype: torch.dtype, bits: list[int], written: set[int]
) -> None:
    kept = of_bits(*bits)
    weights = kept.to(dtype)
    for place in written:
        weights[place] = -2.5
    expected = [-2.5 if place in written else value for place, value in enumerate(kept.clone())]
    opened = open_master("fp32", weights, kept)
    assert opened is kept
    number = ~weights.isnan()
    assert torch.equal(opened[number], torch.tensor(expected)[number])
    assert opened[~number].isnan().all()


# Optimizers ----------------------------------------------------------------------------------------------------------


def cases() -> Iterator[Any]:
    """Each class and implementation in every format, and each flag in one of them."""
    for cls in (cls for cls in FLAGS if cls not in (optim.Muon, optim.Adafactor)):
        for name, chosen in implementations(cls):
            for number, flags in enumerate(FLAGS[cls]):
                for kind, dtype in FORMATS.values() if number == 0 else [FORMATS["fp32-bfloat16"]]:
                    label = [cls.__name__, name, *(f"{key}={value}" for key, value in flags.items()), kind, str(dtype)]
                    yield pytest.param(cls, {**flags, **chosen}, kind, dtype, id="-".join(label))


def cases_and_policies() -> Iterator[Any]:
    """With offload and without."""
    for name, policy in (("offloaded", SMALL), ("plain", None)):
        yield from (pytest.param(*case.values, policy, id=f"{case.id}-{name}") for case in cases())


@pytest.mark.parametrize(("cls", "kwargs", "kind", "dtype", "policy"), every_nth(cases_and_policies(), 6))
def test_same_bits(
    cls: type[optim.Optimizer], kwargs: dict[str, Any], kind: str, dtype: torch.dtype, policy: OffloadPolicy | None
) -> None:
    twins = make_twins(Zoo, lambda params: cls(params, **kwargs), kind, dtype, policy=policy)
    twins.train(4)
    twins.assert_trained()


@pytest.mark.parametrize(("kind", "bytes_per_element"), [("fp32", 12), ("remainder", 10)])
def test_bytes_of_state(kind: str, bytes_per_element: int) -> None:
    """A parameter of many buckets is cut, or the tests above would show nothing about its second range."""
    twins = make_twins(Zoo, adamw, kind)
    twins.train(1)
    numel = sum(param.numel() for param in twins.low.params.values())
    assert twins.low.optimizer.offload_report().memory.host_state_bytes == bytes_per_element * numel
    plan = vars(twins.low.optimizer)["_offload_engine"].engine.plan
    assert len(plan.shards[twins.low.params["long"]].buckets) > 2


# Training ------------------------------------------------------------------------------------------------------------


def mixed() -> nn.Module:
    """Linear layers in bf16, around a norm in fp32."""
    net = state_dicts.Net().bfloat16()
    state_dicts.all_used(net)
    net.norm.float()
    return net


@EVERY_KIND
def test_parameters_in_fp32_are_their_own_masters(kind: str) -> None:
    twins = make_twins(mixed, adamw, kind, dtype=None)
    twins.train(6, lambda run, step: run.loss(step).square().mean().backward())
    twins.assert_trained()
    with_master = [name for name, param in twins.low.params.items() if MASTER in twins.low.optimizer.state[param]]
    assert with_master == ["up.weight", "up.bias", "down.weight", "down.bias"]


def fp32_gradients(run: Run, step: int) -> None:
    """With bits that bf16 has no room for."""
    generator = torch.Generator().manual_seed(step)
    for param in run.params.values():
        param.grad_dtype = torch.float32
        param.grad = torch.randn(param.shape, generator=generator)


@spread(chosen=IMPLEMENTATIONS, kind=KINDS)
def test_gradients_in_fp32(kind: str, chosen: dict[str, bool]) -> None:
    twins = make_twins(Net, lambda params: adamw(params, **chosen), kind)
    twins.train(4, fp32_gradients)
    assert all(param.grad.dtype is torch.float32 for param in twins.low.params.values())


@EVERY_KIND
def test_frozen_parameters_and_a_group_that_is_added(kind: str) -> None:
    twins = make_twins(Zoo, adamw, kind)
    twins.low.params["bias"].requires_grad_(False)
    twins.train(2)
    start = torch.linspace(-1, 1, 300).bfloat16()
    twins.low.model.extra, twins.full.model.extra = nn.Parameter(start), nn.Parameter(start.float())
    for run in twins:
        run.optimizer.add_param_group({"params": [run.model.extra], "lr": 0.1})
        run.parts["start"]["extra"] = run.model.extra.detach().clone()
    twins.low.params["bias"].requires_grad_(True)
    twins.train(3)
    twins.assert_trained()


@pytest.mark.parametrize("chosen", [{"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("policy", [SMALL, None], ids=["offloaded", "not"])
def test_grad_scaler_skips_steps_of_fp16(chosen: dict[str, bool], policy: OffloadPolicy | None) -> None:
    twins = make_twins(Net, lambda params: adamw(params, **chosen), "fp32", torch.float16, policy=policy)
    for run in twins:
        run.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        run.parts["scaler"].scale(torch.zeros(()))
    for step in range(8):
        for run in twins:
            run.optimizer.zero_grad()
        for param in twins.low.params.values():
            param.grad_dtype = torch.float32  # torch does not unscale fp16
        scaler = twins.low.parts["scaler"]
        scaler.scale(twins.low.loss(step)).backward()
        if step in (0, 3):
            twins.low.params["up.weight"].grad[0, 0] = float("inf")
        twins.hand_over()
        if step == 0 and not chosen.get("fused"):
            twins.updated.clear()  # a fused optimizer creates its state even then
        for run in twins:
            run.parts["scaler"].step(run.optimizer)
            run.parts["scaler"].update()
        twins.steps += 1
        twins.assert_same()
    assert scaler.get_scale() == twins.full.parts["scaler"].get_scale()
    assert twins.low.optimizer.state[twins.low.params["up.weight"]]["step"] == 6


@spread(form=FORMATS, chosen=IMPLEMENTATIONS)
def test_masters_stay_when_the_offload_goes(form: tuple[str, torch.dtype], chosen: dict[str, bool]) -> None:
    twins = make_twins(Zoo, lambda params: adamw(params, **chosen), *form, policy=None)
    twins.train(2)
    twins.attach()
    twins.train(2)
    remove_offload(twins.low.optimizer)
    twins.assert_same()
    twins.train(2)
    twins.attach()  # and once more
    twins.train(2)
    twins.assert_trained()


def write_some(model: nn.Module) -> None:
    """What a user does who loads other weights; some of them are what they were."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["weight"][::2] = 0.25
    state["long"].fill_(-1.5)
    state["scale"].fill_(3.0)
    model.load_state_dict(state)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("policy", [SMALL, WHOLE], ids=["cut", "whole"])
def test_written_weights_win_and_the_others_keep_their_precision(dtype: torch.dtype, policy: OffloadPolicy) -> None:
    twins = make_twins(Zoo, adamw, "fp32", dtype, policy=policy)
    twins.train(3)
    write_some(twins.low.model)
    for one, other in zip(twins.full.params.values(), twins.low.params.values(), strict=True):
        with torch.no_grad():
            one.copy_(torch.where(one.to(dtype) == other, one, other.float()))
    twins.train(3)
    twins.assert_trained()


def test_weights_written_before_the_first_step_are_where_masters_start() -> None:
    for kind in ("fp32", "remainder"):
        twins = make_twins(Zoo, adamw, kind)
        write_some(twins.low.model)
        for one, other in zip(twins.full.params.values(), twins.low.params.values(), strict=True):
            one.data.copy_(other)
        twins.train(3)


# State dicts, and what is refused ------------------------------------------------------------------------------------


def saved(run: Run) -> dict[str, Any]:
    return copy.deepcopy({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})


def resumed_from(
    checkpoint: dict[str, Any], twins: Twins, *, weights_first: bool = True, policy: OffloadPolicy | None = SMALL
) -> Twins:
    """``twins`` with a fresh low-precision side, which has loaded ``checkpoint``."""
    fresh = make_twins(Zoo, adamw, twins.kind, twins.low.dtype, policy=policy)
    fresh.train(1)  # it had a state of its own
    if weights_first:
        fresh.low.model.load_state_dict(checkpoint["model"])
    fresh.low.optimizer.load_state_dict(checkpoint["optimizer"])
    if not weights_first:
        fresh.low.model.load_state_dict(checkpoint["model"])
    fresh.plain = fresh.full = twins.full
    fresh.steps = twins.steps
    # Changes nothing but the order in which torch lists the entries of a param group.
    fresh.full.optimizer.load_state_dict(saved(fresh.full)["optimizer"])
    return fresh


@spread(
    pairs=True,
    form=FORMATS,
    weights_first={"weights-first": True, "state-first": False},
    saver={"offloaded": SMALL, "plain": None},
    loader={"into-offloaded": SMALL, "into-plain": None},
)
def test_a_state_dict_goes_on_bitwise(
    form: tuple[str, torch.dtype], weights_first: bool, saver: OffloadPolicy | None, loader: OffloadPolicy | None
) -> None:
    twins = make_twins(Zoo, adamw, *form, policy=saver)
    twins.train(3)
    checkpoint = saved(twins.low)
    assert all(MASTER in state for state in checkpoint["optimizer"]["state"].values())
    resumed = resumed_from(checkpoint, twins, weights_first=weights_first, policy=loader)
    assert same_value(resumed.low.optimizer.state_dict()["state"], checkpoint["optimizer"]["state"])
    resumed.assert_same()
    resumed.train(3)
    resumed.assert_trained()


def test_missing_masters_are_made_from_the_parameters() -> None:
    twins = make_twins(Zoo, adamw, "fp32")
    twins.train(3)
    checkpoint = saved(twins.low)
    for state in checkpoint["optimizer"]["state"].values():
        del state[MASTER]
    for one, other in zip(twins.full.params.values(), twins.low.params.values(), strict=True):
        one.data.copy_(other)
    resumed = resumed_from(checkpoint, twins)
    resumed.assert_same()
    resumed.train(3)


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "message"),
    [
        ("remainder", MASTER, None, r"missing \['master_param'\]"),
        ("remainder", MASTER, torch.float32, r"'master_param' should have .*torch\.int16.* got .*torch\.float32"),
        ("fp32", MASTER, torch.int16, r"'master_param' should have .*torch\.float32.* got .*torch\.int16"),
        ("fp32", MASTER, torch.bfloat16, r"'master_param' should have .*torch\.float32.* got .*bfloat16"),
        ("fp32", "exp_avg", torch.bfloat16, r"'exp_avg' should have .*torch\.float32.* got .*torch\.bfloat16"),
    ],
)
def test_another_format_is_refused_and_changes_nothing(
    kind: str, name: str, dtype: torch.dtype | None, message: str
) -> None:
    """``None``: it is not there."""
    twins = make_twins(Zoo, adamw, kind)
    twins.train(2)
    state_dict = copy.deepcopy(twins.low.optimizer.state_dict())
    for state in state_dict["state"].values():
        value = state.pop(name)
        if dtype is not None:
            state[name] = value.to(dtype)
    own = twins.low.optimizer.state_dict()
    without_masters = attach(adamw(Zoo().bfloat16().parameters()))
    for optimizer, wrong, said in (
        (twins.low.optimizer, state_dict, message),
        (without_masters, own, r"extra \['master_param'\]"),  # which says more than a bf16 optimizer can keep
    ):
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(copy.deepcopy(wrong))
    twins.assert_same()
    twins.train(2)


@pytest.mark.parametrize("cls", [optim.Muon, optim.Adafactor, Unlisted, FusedAdam], ids=lambda cls: cls.__name__)
def test_optimizers_that_cannot_run_on_masters_are_refused(cls: type[optim.Optimizer]) -> None:
    optimizer = cls([nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))], lr=0.1)
    with pytest.raises(ValueError, match=f"add_masters .*{cls.__name__} is not one of them"):
        add_masters(optimizer)
    assert type(optimizer) is cls
