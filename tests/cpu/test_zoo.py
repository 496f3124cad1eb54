"""The zoo of optimizers: what it says of classes that the dev extra has, and of some of our own.

Every class of every library in ``tests/zoo/requirements.txt``: ``python -m pytest -m zoo``, or ``python -m tests.zoo``.
"""

import json
import random
import tomllib
from collections.abc import Callable
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload import offload_optimizer
from fsdp_offload.optimizers import capabilities_of
from fsdp_offload.optimizers.capabilities import row_of, rows
from tests.zoo.__main__ import main
from tests.zoo.dependence import DependenceTrace
from tests.zoo.libraries import load
from tests.zoo.local import Around, Momentum
from tests.zoo.outcomes import (
    ATTACH_CRASHED,
    CRASHED,
    DO_NOT_COUNT,
    QUICK,
    REFUSED,
    RESUMED,
    SAME,
    SAMPLE,
    WRONG,
    Combination,
    Outcome,
    Row,
)
from tests.zoo.pool import judged_row
from tests.zoo.table import TOML_MARK, prose_of, to_markdown, to_toml
from tests.zoo.training import judge
from tests.zoo.verdicts import traced_verdict

pytestmark = pytest.mark.usefixtures("eager")

ONE = (Combination(1, 0, "small", 5),)
HERE = "tests.zoo.local"


def judged(cls: type[torch.optim.Optimizer], combinations: Any = QUICK, **kwargs: Any) -> Row:
    row = Row("", "", cls.__name__)
    for message in judge(cls, combinations, **kwargs):
        row.take(message)
    return row


@pytest.mark.parametrize(
    "key",
    [
        *(f"{HERE}:{name}" for name in ("Momentum", "Noisy", "SharedNorm")),
        "schedulefree.adamw_schedulefree:AdamWScheduleFree",
        "torchao.optim.adam:AdamW4bit",
        "transformers.optimization:Adafactor",
    ],
)
def test_the_same_bits(key: str) -> None:
    pytest.importorskip(key.split(".")[0])
    combinations = QUICK if key.startswith(HERE) else SAMPLE
    row = judged(load(key), combinations)
    assert [(str(one.combination), one.outcome, one.detail) for one in row.outcomes] == [
        (str(one), SAME, "") for one in combinations
    ]


@pytest.mark.parametrize("name", ["Wide", "Narrow"])
def test_the_same_bits_after_a_resume_in_a_fresh_process(name: str) -> None:
    """Their state has another dtype than parameters in bf16, or than those in fp32."""
    row = judged_row("", "", f"{HERE}:{name}", RESUMED, 300.0)
    assert [(one.outcome, one.detail) for one in row.outcomes] == [(SAME, "")] * len(RESUMED)


# The package's table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in rows() if name.startswith("torch.optim:")])
def test_the_tracer_says_of_torch_what_the_table_says(name: str) -> None:
    divides = rows()[name]["verdict"] in ("elementwise", "parameters")
    assert (traced_verdict(name) == "parameters") == divides


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name, row in rows().items() if row["library"] != "torch"])
def test_the_tracer_says_of_other_libraries_what_the_table_says(name: str) -> None:
    pytest.importorskip(name.split(":")[0].split(".")[0])
    assert traced_verdict(name).partition(":")[0] == rows()[name]["verdict"]


@pytest.mark.parametrize("name", ["SharedNorm", "LateNorm"])
def test_a_mixture_is_traced_to_its_line(name: str) -> None:
    where = traced_verdict(f"{HERE}:{name}")
    assert where.startswith("mixed: linalg_vector_norm in local.py:")


def test_a_row_is_true_of_exactly_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_of(torch.optim.AdamW) is rows()["torch.optim:AdamW"]
    assert row_of(torch.optim.AdamW)["verdict"] == "elementwise"
    same_name = type("AdamW", (torch.optim.AdamW,), {"__module__": "torch.optim"})
    assert not row_of(same_name)
    assert not capabilities_of(same_name).known
    monkeypatch.setattr(torch.optim, "AdamW", same_name)
    assert not row_of(same_name.__mro__[1])


def test_the_table_is_written_from_what_was_found(tmp_path: Path) -> None:
    mixed = Row("b-lib", "2", "b_lib:Mixed", "", [Outcome(ONE[0], SAME)], "", "mixed: bmm in lib.py:3")
    some = Row("b-lib", "2", "b_lib:Some", "", [Outcome(ONE[0], REFUSED, "other parameters"), Outcome(ONE[0], SAME)])
    text = to_toml([mixed, some, row_with(SAME), Row("torch", "2", "torch.optim:Adam")], "2026-11-25")
    assert tomllib.loads(text) == {
        "b-lib": {"versions": "2", "date": date(2026, 11, 25), "classes": {"b_lib:Mixed": "mixed"}},
        "lib": {"versions": "1.0", "date": date(2026, 11, 25), "classes": {"lib.mod:Cls": "parameters"}},
    }
    written = resources.files("fsdp_offload.optimizers") / "table.toml"
    assert prose_of(Path(str(written)), TOML_MARK).endswith('"elementwise" }\n\n')


# What the harness has to notice ---------------------------------------------------------------------------------------


def behind(change: Callable[[Any], object]) -> Callable[..., None]:
    def attach(optimizer: Any, **kwargs: Any) -> None:
        offload_optimizer(optimizer, **kwargs)
        change(optimizer)

    return attach


def refusing_and_drawing(optimizer: Any, **kwargs: Any) -> None:
    torch.randn(1)
    raise ValueError("cannot be offloaded")


def failing(optimizer: Any, **kwargs: Any) -> None:
    raise TypeError("object layout differs")


INSTEAD = "Attach to the inner optimizer instead"
REFUSED_FIRST = "after it was refused (ValueError: cannot be offloaded): generator['torch']"
BROKEN: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., Any], str, str]] = {
    "lr": (Momentum, behind(lambda o: o.param_groups[0].update(lr=1.5)), WRONG, "step 1: parameter first.weight"),
    "draws": (Momentum, lambda optimizer, **_: random.random(), WRONG, "generator['python']"),
    "refuses and draws": (Momentum, refusing_and_drawing, WRONG, REFUSED_FIRST),
    "fails": (Momentum, failing, ATTACH_CRASHED, "TypeError: object layout differs"),
    "fails later": (
        *(Momentum, behind(lambda o: setattr(o, "step", lambda: {}["exp_avg"]))),
        *(CRASHED, "step 1: KeyError: 'exp_avg'"),
    ),
    # Who wraps another is refused, and that one is offloaded.
    "around": (Around, offload_optimizer, REFUSED, INSTEAD),
    "around, lr": (Around, behind(lambda o: o.param_groups[0].update(lr=1.5)), WRONG, INSTEAD),
}


@pytest.mark.parametrize(("cls", "attach", "outcome", "detail"), BROKEN.values(), ids=BROKEN)
def test_what_attaching_breaks_is_noticed(
    cls: type[torch.optim.Optimizer], attach: Callable[..., None], outcome: str, detail: str
) -> None:
    row = judged(cls, ONE, attach=attach)
    assert row.outcome == outcome
    assert detail in row.detail


# Libraries, files, the command line -----------------------------------------------------------------------------------


def row_with(*outcomes: str) -> Row:
    found = [Outcome(ONE[0], one, f"<{one}> | why") for one in outcomes]
    return Row("lib", "1.0", "lib.mod:Cls", "all, step()", found, "", "parameters")


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    result, page, table = tmp_path / "zoo.json", tmp_path / "zoo.md", tmp_path / "table.toml"
    page.write_text("# By hand\n\n" + to_markdown([row_with(WRONG)]))
    main(libraries="schedulefree", classes="SGDScheduleFree", json_file=result, markdown=page, table=table, processes=1)
    (row,) = json.loads(result.read_text())
    assert (row["cls"], row["outcome"], len(row["outcomes"])) == (
        "schedulefree.sgd_schedulefree:SGDScheduleFree",
        SAME,
        len(QUICK),
    )
    text = page.read_text()
    assert text.startswith("# By hand\n\n")
    assert "Of 1 classes, 1 run plain: 1 give the same bits, and 0 are refused." in text
    assert "SGDScheduleFree" in text.splitlines()[-1]
    assert "Defects" not in text
    assert tomllib.loads(table.read_text())["schedulefree"]["classes"].keys() == {row["cls"]}


@pytest.mark.zoo
def test_the_whole_zoo() -> None:
    rows = main(combinations="full", limit_s=900)
    counting = [row for row in rows if row.outcome not in DO_NOT_COUNT]
    assert len(counting) >= 300
    assert len({row.library for row in counting}) >= 15


# The trace of what flows into what: each kind of operator, in place and not, and the ways around them -----------------


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.randn(4, 4) for _ in range(3)]


@pytest.fixture
def trace(tensors: list[Tensor]) -> DependenceTrace:
    made = DependenceTrace()
    for number, tensor in enumerate(tensors):
        made.mark(tensor, number)
    return made


def into(trace: DependenceTrace, run: Callable[[], Any]) -> list[set[int]]:
    """The origins of each tensor that ``run`` returns."""
    with trace:
        result = run()
    return [trace.origins_of(one) for one in (result if isinstance(result, list | tuple) else [result])]


def part_of(whole: Tensor, part: Tensor) -> Tensor:
    whole[:2].copy_(part[:2])
    return whole


def into_a_buffer(tensors: list[Tensor]) -> list[Tensor]:
    buffer = torch.empty(3 * 16)
    for number, tensor in enumerate(tensors):
        buffer[16 * number :][:16].copy_(tensor.flatten())
    return [part.view(4, 4) for part in buffer.mul_(2).split(16)]


def foreach_in_place(tensors: list[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors[:2]]
    torch._foreach_lerp_(copies, tensors[1:], 0.5)
    return copies


CASES: dict[str, tuple[Callable[[list[Tensor]], Any], list[set[int]]]] = {
    "binary": (lambda t: t[0] + t[1], [{0, 1}]),
    "scalar": (lambda t: t[0] * 2, [{0}]),
    "view": (lambda t: t[0].view(-1)[3:7], [{0}]),
    "only the shape": (lambda t: torch.zeros_like(t[0]), [set()]),
    "new": (lambda t: t[0].new_ones(3), [set()]),
    "stack": (torch.stack, [{0, 1, 2}]),
    "stack, element by element": (lambda t: list((torch.stack(t).sqrt() + 1).unbind()), [{0}, {1}, {2}]),
    "stack along another dimension": (lambda t: list(torch.stack(t, dim=1)[:, 1:].unbind(1)), [{1}, {2}]),
    "cat and split": (lambda t: list(torch.cat(t, dim=-1).mul(2).split(4, dim=1)), [{0}, {1}, {2}]),
    "a batch of products": (lambda t: list(torch.bmm(torch.stack(t), torch.stack(t)).unbind()), [{0, 1, 2}] * 3),
    "broadcast": (lambda t: list((torch.stack(t) * t[1][0, 0]).unbind()), [{0, 1}, {1}, {1, 2}]),
    "into a buffer": (into_a_buffer, [{0}, {1}, {2}]),
    "other elements over the same bytes": (lambda t: torch.stack(t).view(torch.int16), [{0, 1, 2}]),
    "split": (lambda t: t[1].chunk(2), [{1}, {1}]),
    "in place": (lambda t: t[0].clone().add_(t[2]), [{0, 2}]),
    "copy": (lambda t: torch.empty(4, 4).copy_(t[2]), [{2}]),
    "overwritten": (lambda t: t[0].clone().zero_(), [set()]),
    "a part overwritten": (lambda t: part_of(t[0].clone(), t[1]), [{0, 1}]),
    "the other part": (lambda t: part_of(t[0].clone(), t[1])[2:], [{0}]),
    "out": (lambda t: torch.add(t[0], 1, out=torch.empty(4, 4)), [{0}]),
    "foreach": (lambda t: torch._foreach_add(t, 1), [{0}, {1}, {2}]),
    "foreach of two lists": (lambda t: torch._foreach_mul(t[:2], t[1:]), [{0, 1}, {1, 2}]),
    "foreach with one tensor": (lambda t: torch._foreach_mul(t[:2], t[2].sum()), [{0, 2}, {1, 2}]),
    "foreach norms": (torch._foreach_norm, [{0}, {1}, {2}]),
    "foreach in place": (foreach_in_place, [{0, 1}, {1, 2}]),
    "foreach with a scalar for each": (lambda t: torch._foreach_mul(t, [1.0, 2.0, 3.0]), [{0}, {1}, {2}]),
    "matmul": (lambda t: t[0] @ t[0].T, [{0}]),
    "linalg": (lambda t: torch.linalg.svd(t[1]).S, [{1}]),
}


@pytest.mark.parametrize(("run", "expected"), CASES.values(), ids=CASES)
def test_operators(
    trace: DependenceTrace, tensors: list[Tensor], run: Callable[[list[Tensor]], Any], expected: list[set[int]]
) -> None:
    assert into(trace, lambda: run(tensors)) == expected


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.sum(0).tolist(),
    "numpy": lambda t: t.sum().numpy(),
    "equal": lambda t: torch.equal(t[0], t[1]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_numbers_of_several_parameters_that_are_read_on_the_host(
    trace: DependenceTrace, tensors: list[Tensor], read: Callable[[Tensor], object]
) -> None:
    with trace:
        read(tensors[0])
        torch.stack([tensor.sum() for tensor in tensors]).tolist()  # one by one
        assert not trace.mixed_reads
        read(torch.stack(tensors))
    assert trace.mixed_reads
