"""Splitting, merging and converting checkpoints in whatever chunks: right parts, and the same bits again."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoint_tools.stored.safetensors_folder import DTYPES as SAFETENSORS
from fsdp_offload.checkpoint.chunks import ragged_chunks
from tests.checkpoint_tools.saves import FUSED, GATE, UP, Rectangle, content, part_of, rule, same_bits, save, tiled
from tests.checkpoint_tools.tool import assert_same, made, values_of

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.complex128, torch.uint16, torch.bool]
SETTINGS = settings(
    max_examples=30,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Rectangle]:
    """Cut, and cut again; or cut as flat ranges are, which leaves thin rectangles."""
    if draw(st.booleans()) and math.prod(shape):
        bounds = draw(st.lists(st.integers(0, math.prod(shape)), max_size=3).map(sorted))
        whole = ((0,) * len(shape), shape)
        ranges = itertools.pairwise([0, *bounds, math.prod(shape)])
        chunks = [ragged_chunks(shape, whole, *each).chunks for each in ranges]
        return [(chunk.offsets, chunk.sizes) for found in chunks for chunk in found if chunk.numel]
    tiles: list[Rectangle] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        offsets, sizes = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(1, max(sizes[dim] - 1, 1)))
        for start, size in ((0, cut), (cut, sizes[dim] - cut)):
            if size > 0 or sizes[dim] == 0:
                at = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                tiles.append((at, (*sizes[:dim], min(size, sizes[dim]), *sizes[dim + 1 :])))
            if sizes[dim] == 0:
                break
    return tiles


@st.composite
def fused(
    draw: st.DrawFn, *, count: int = 2, least: int = 0, most_dims: int = 4
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What a rule of so many parts says, and a shape that it fits; parts have at least ``least`` rows."""
    layout = draw(st.sampled_from(["concatenated", "interleaved", "grouped", "stacked"]))
    groups = draw(st.integers(1, 3)) if layout == "grouped" else 1
    sizes: Any = "equal"
    total = count if layout == "stacked" else draw(st.integers(least, 4)) * count
    if layout == "grouped" or (layout == "concatenated" and draw(st.booleans())):
        each = st.lists(st.integers(least, 4), min_size=count, max_size=count)
        sizes = tuple(size * groups for size in draw(each.filter(any)))
        total = sum(sizes)
        sizes = "equal" if len(set(sizes)) == 1 else sizes
    others = draw(st.lists(st.integers(1, 4), min_size=layout == "stacked", max_size=most_dims - 1))
    dim = draw(st.integers(0, len(others)))
    shape = (*others[:dim], total, *others[dim:])
    fields = {"layout": layout, "groups": groups, "sizes": sizes}
    return {**fields, "dim": dim - len(shape) * draw(st.booleans())}, shape


@SETTINGS
@given(data=st.data())
def test_the_parts_are_right_and_merging_gives_back_the_same_bits(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("case")
    fields, shape = data.draw(fused())
    the_rule = rule(**fields)
    wholes = {
        "weight": content(shape, data.draw(st.sampled_from(DTYPES)), 0),
        "exp_avg": content(shape, torch.float32, 1),
    }
    saved = {name: tiled(whole, data.draw(tilings(shape))) for name, whole in wholes.items()}
    state: dict[str, Any] = {
        "model": {FUSED: saved["weight"], "other": torch.arange(3)},
        "optim": {
            "state": {FUSED: {"exp_avg": saved["exp_avg"], "step": torch.tensor(2.0)}},
            "param_groups": [{"lr": 0.5, "params": ["other", FUSED]}],
        },
    }
    files = {"single_file_per_rank": data.draw(st.booleans()), "thread_count": data.draw(st.integers(1, 3))}
    source = save(tmp_path / "source", state, **files)
    threads = data.draw(st.integers(1, 3))
    memory = ("--max-memory", threads * data.draw(st.sampled_from([64, 150, 2000])))
    values = values_of(made("split", source, tmp_path / "split", the_rule, *memory, threads=threads))
    for number, part in enumerate((GATE, UP)):
        assert same_bits(values[f"model.{part}"], part_of(the_rule, wholes["weight"], number))
        assert same_bits(values[f"optim.state.{part}.exp_avg"], part_of(the_rule, wholes["exp_avg"], number))
        assert same_bits(values[f"optim.state.{part}.step"], torch.tensor(2.0))
    assert values["optim.param_groups.0.params"] == ["other", GATE, UP]
    assert_same(made("merge", tmp_path / "split", tmp_path / "merged", the_rule, *memory, threads=threads), source)
    # Parts that others have saved, who do not divide all of them in the same way.
    parts = {key: part_of(the_rule, wholes["weight"], number) for number, key in enumerate((GATE, UP))}
    saved = {key: tiled(part, data.draw(tilings(tuple(part.shape)))) for key, part in parts.items()}
    others = save(tmp_path / "others", {"model": saved}, thread_count=data.draw(st.integers(1, 3)))
    memory = ("--max-memory", data.draw(st.sampled_from([128, 200, 4000])))
    merged = made("merge", others, tmp_path / "merged others", the_rule, "--yes", *memory)
    assert same_bits(values_of(merged)[f"model.{FUSED}"], wholes["weight"])


def loaded(folder: Path, files: str = "*.safetensors") -> dict[str, Any]:
    """By the safetensors package."""
    found = {}
    for file in folder.glob(files):
        with safe_open(file, framework="pt") as stream:
            assert stream.metadata() == {"format": "pt"}
            found |= {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
    return found


@SETTINGS
@given(data=st.data())
def test_to_safetensors_and_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path, dtypes = tmp_path_factory.mktemp("case"), list(SAFETENSORS.values())
    wholes, state = {}, {}
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
        wholes[f"{number}.weight"] = whole = content(shape, data.draw(st.sampled_from(dtypes)), number)
        state[f"{number}.weight"] = tiled(whole, data.draw(tilings(shape)))
    scalar = content((), data.draw(st.sampled_from(dtypes)), 9)
    everything = {"model": state, "optim": {"state": {"0.weight": {"step": scalar, "n": 3}}}}
    source = save(tmp_path / "source", everything, thread_count=data.draw(st.integers(1, 3)))
    sizes = [data.draw(st.sampled_from(each)) for each in ([1, 100, 10_000], [128, 300, 10_000])]
    options = ("--shard-size", sizes[0], "--max-memory", sizes[1])
    found = loaded(made("convert", source, tmp_path / "made", *options))
    assert found.keys() == {*wholes, "optim.state.0.weight.step"}
    assert all(same_bits(found[key], whole) for key, whole in wholes.items())
    assert same_bits(found["optim.state.0.weight.step"], scalar)
    assert_same(made("convert", tmp_path / "made", tmp_path / "back", *options), source)
