"""The one pass over masters: it runs, gives the bits of the eager code, or steps aside."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from fsdp_offload.optimizers import masters
from fsdp_offload.optimizers.masters import AdamWStep, MasterRange, is_exact
from tests.parity import Zoo
from tests.twins import Twins, make_twins
from tests.unit.test_rows_of_weights import compare_by_kernel

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0)
USUAL = AdamWStep(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
STEPS = [
    USUAL,
    AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01),
    AdamWStep(0.1, 0.9, 0.98, 1e-6, 0.0),
    AdamWStep(1e-2, 0.8, 0.9, 1e-3, 0.3),
    AdamWStep(1e-2, 0.3, 0.4, 1e-3, 0.3),
]
FORMATS = [
    ("fp32", torch.bfloat16, torch.bfloat16),
    ("fp32", torch.bfloat16, torch.float32),
    ("fp32", torch.float16, torch.float16),
    ("remainder", torch.bfloat16, torch.bfloat16),
    ("remainder", torch.bfloat16, torch.float32),
]


@pytest.fixture(autouse=True)
def nothing_tried() -> Iterator[None]:
    masters.is_exact.cache_clear()
    yield
    masters.is_exact.cache_clear()


def scratch(kind: Any, weights: torch.dtype, grad: torch.dtype) -> MasterRange:
    return masters._scratch(kind, weights, grad, DEVICE)


@pytest.mark.parametrize(("kind", "weights", "grad"), FORMATS, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_it_gives_the_bits_of_the_eager_code(
    step: AdamWStep, kind: Any, weights: torch.dtype, grad: torch.dtype
) -> None:
    assert is_exact(step._replace(lr=1e-3), kind, weights, grad, DEVICE)  # as it is tried in training


@pytest.mark.parametrize("numel", [1, 63, 64, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("kind", ["fp32", "remainder"])
def test_any_size(kind: Any, numel: int) -> None:
    parts = []
    for _ in range(2):
        whole = scratch(kind, torch.bfloat16, torch.bfloat16)
        parts.append(MasterRange(*(one[:numel].clone() for one in whole[:-1]), whole.step))
    for _ in range(3):
        masters.update_master(USUAL, kind, parts[0])
        masters._eager(USUAL, kind, parts[1])
    assert all(map(masters.same_bits, *parts))


def twins_of(kind: str, **options: Any) -> Twins:
    options = options or {"fused": True}
    return make_twins(Zoo, lambda params: optim.AdamW(params, lr=0.02, **options), kind, device="cuda")


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    seen: list[Tensor] = []
    update = masters.update_master

    def counted(step: AdamWStep, kind: Any, part: MasterRange) -> None:
        seen.extend([part.weights] if part.weights.numel() else [])
        update(step, kind, part)

    monkeypatch.setattr(masters, "update_master", counted)
    return seen


@pytest.mark.parametrize("kind", ["fp32", "remainder"])
def test_a_step_takes_it_once_there_is_state(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = twins_of(kind)
    twins.train(1)
    seen = launches(monkeypatch)
    twins.train(1)
    trials = 3  # of the one set of hyperparameters
    a_step = len(seen) - trials
    assert a_step > 5
    twins.train(5)
    assert len(seen) == trials + 6 * a_step
    twins.assert_trained()


@pytest.mark.parametrize(
    "kwargs",
    [{"foreach": True}, {"fused": True, "amsgrad": True}, {"fused": True, "maximize": True}, {"capturable": True}],
    ids=str,
)
def test_other_steps_do_without(kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    twins = twins_of("remainder", **kwargs)
    seen = launches(monkeypatch)
    twins.train(3)
    assert not seen


def test_it_steps_aside_where_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = masters._eager

    def otherwise(step: AdamWStep, kind: Any, part: MasterRange) -> None:
        eager(step, kind, part)
        part.exp_avg[7] = torch.nextafter(part.exp_avg[7], part.exp_avg[8])

    monkeypatch.setattr(masters, "_eager", otherwise)
    assert not is_exact(USUAL, "remainder", torch.bfloat16, torch.bfloat16, DEVICE)
    seen = launches(monkeypatch)
    twins = twins_of("remainder")
    twins.train(1)
    tried = len(seen)
    twins.train(3)
    assert len(seen) <= tried + 3  # trials only


def test_a_schedule_of_betas_is_not_tried_for_ever() -> None:
    formats = torch.bfloat16, torch.bfloat16, DEVICE
    found = [is_exact(USUAL._replace(beta1=0.5 + n / 1000), "fp32", *formats) for n in range(40)]
    assert found[0]
    assert not any(found[masters._MOST_TRIALS :])


def test_eager_code_and_kernel_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter with and without the kernel, in the middle of its training: the counters go on."""
    allowed = [True]

    def may_run(*args: Any) -> bool:
        return allowed[0] and is_exact(*args)

    may_run.cache_info = is_exact.cache_info
    monkeypatch.setattr(masters, "is_exact", may_run)
    twins = twins_of("remainder")
    for turn in range(6):
        allowed[0] = turn % 2 == 0
        twins.train(1)
    twins.assert_trained()


def test_the_kernel_of_weight_deltas_has_the_formulas() -> None:
    compare_by_kernel("cuda")
