"""Flat optimizer state becomes state of its parameters' shapes, as reshaping all of it does."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.core.errors import CheckpointError
from tests.checkpoint_tools.checkpoints import save
from tests.checkpoint_tools.converted import converted
from tests.checkpoint_tools.offline import check_zip_files, same_bits, tiled, values_of
from tests.cpu.checkpoint_tools.test_offline_round_trip import SETTINGS

NAME = "module.decoder.weight"


def flat(whole: torch.Tensor, bounds: list[int]) -> Any:
    ranges = itertools.pairwise([0, *sorted(bounds), whole.numel()])
    return tiled(whole.reshape(-1), [((begin,), (end - begin,)) for begin, end in ranges if begin < end])


@SETTINGS
@given(data=st.data())
def test_any_ranges_of_any_shape(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("case")
    shape = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple))
    bounds = data.draw(st.lists(st.integers(0, math.prod(shape)), max_size=4))
    moment = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    states = {NAME: {"exp_avg": flat(moment, bounds), "whole": moment, "step": torch.tensor(2.0)}}
    state = {"model": {NAME: torch.zeros(shape)}, "optim": {"state": states, "param_groups": [{"lr": 0.5}]}}
    source = save(tmp_path / "source", state, thread_count=data.draw(st.integers(1, 2)))
    made = converted(source, tmp_path / "made", flat=True, max_memory_bytes=data.draw(st.sampled_from([128, 400])))
    check_zip_files(made)
    values = values_of(made)
    assert same_bits(values[f"optim.state.{NAME}.exp_avg"], moment)
    assert same_bits(values[f"optim.state.{NAME}.whole"], moment)
    assert values["optim.param_groups.0.lr"] == 0.5
    assert made.paths[f"optim.state.{NAME}.exp_avg"] == ("optim", "state", NAME, "exp_avg")


def test_a_parameter_without_dimensions_and_one_without_elements(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"scale": (), "none": (0, 3), "bias": (4,), "row": (1, 4)}
    model = {name: torch.ones(shape) for name, shape in shapes.items()}
    states = {name: {"exp_avg": torch.arange(float(value.numel()))} for name, value in model.items()}
    source = save(tmp_path / "source", {"model": model, "optim": {"state": states}})
    made = converted(source, tmp_path / "made", flat=True)
    values = values_of(made)
    for name, shape in shapes.items():
        assert same_bits(values[f"optim.state.{name}.exp_avg"], states[name]["exp_avg"].reshape(shape))


def test_shapes_from_another_checkpoint_with_other_prefixes(tmp_path: Path) -> None:
    moment = torch.arange(12.0)
    source = save(tmp_path / "source", {"optimizer": {"state": {f"module.module.{NAME}": {"exp_avg": moment}}}})
    model = save(tmp_path / "model", {"model": {NAME: torch.zeros(3, 4)}})
    with pytest.raises(CheckpointError, match="has no model, whose shapes are needed; give --shapes-from"):
        converted(source, tmp_path / "made", flat=True)
    key = f"optimizer.state.module.module.{NAME}.exp_avg"
    converted(model, tmp_path / "safetensors")
    for number, other in enumerate((model, tmp_path / "safetensors")):
        made = converted(source, tmp_path / f"made-{number}", flat=True, shapes_from=other)
        assert torch.equal(values_of(made)[key], moment.view(3, 4))


def test_what_is_not_known(tmp_path: Path) -> None:
    def made(name: str, model: dict[str, Any], states: dict[str, Any], **options: Any) -> Any:
        source = save(tmp_path / name, {"model": model, "optim": {"state": states}})
        return converted(source, tmp_path / f"{name}-made", flat=True, **options)

    moment = {"exp_avg": torch.arange(12.0)}
    with pytest.raises(CheckpointError, match=r"optim\.state\.a\.exp_avg has 12 elements, and model\.a has shape"):
        made("size", {"a": torch.ones(3, 5)}, {"a": moment})
    with pytest.raises(CheckpointError, match=r"no tensor of the model is called a; give --shapes-from"):
        made("owner", {"b": torch.ones(3, 4)}, {"a": moment})
    with pytest.raises(CheckpointError, match=r"may belong to several tensors of the model"):
        made("two", {"x.a": torch.ones(3, 4), "y.a": torch.ones(4, 3)}, {"a": moment})
    with pytest.raises(CheckpointError, match="has no flat state"):
        made("none", {"a": torch.ones(12)}, {"a": moment})
    assert not list(tmp_path.glob("*-made*"))
    states = {"a": {**moment, "row": torch.ones(3)}}
    left = made("excluded", {"a": torch.ones(3, 4)}, states, excluded=("*.row",))
    assert left.tensors["optim.state.a.row"].shape == (3,)
    assert left.tensors["optim.state.a.exp_avg"].shape == (3, 4)
