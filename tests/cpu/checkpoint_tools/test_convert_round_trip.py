"""DCP to safetensors and back: the same bits, keys, paths and objects, in whatever chunks, files and memory."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoint_tools.look.diff import all_keys, diff
from checkpoint_tools.stored.reading import open_checkpoint
from checkpoint_tools.stored.safetensors_folder import DTYPES
from tests.checkpoint_tools.checkpoints import STATE, save, save_on_two_ranks
from tests.checkpoint_tools.converted import converted
from tests.checkpoint_tools.offline import assert_same, check_zip_files, same_bits, tiled, values_of
from tests.cpu.checkpoint_tools.test_offline_round_trip import SETTINGS, tilings

ALL_DTYPES = list(DTYPES.values())


def loaded(folder: Path) -> dict[str, Any]:
    """By the safetensors package."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            assert stream.metadata() == {"format": "pt"}
            found.update({key: stream.get_tensor(key) for key in stream.keys()})  # noqa: SIM118
    return found


def content(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits; of a bool, one of two."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


@SETTINGS
@given(data=st.data())
def test_there_and_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("case")
    wholes, state = {}, {}
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple))
        wholes[f"{number}.weight"] = whole = content(shape, data.draw(st.sampled_from(ALL_DTYPES)), number)
        state[f"{number}.weight"] = tiled(whole, data.draw(tilings(shape)))
    scalar = content((), data.draw(st.sampled_from([d for d in ALL_DTYPES if "float4" not in str(d)])), 9)
    everything = {"model": state, "optim": {"state": {"0.weight": {"step": scalar, "n": 3}}}}
    source = save(tmp_path / "source", everything, thread_count=data.draw(st.integers(1, 3)))
    options: dict[str, Any] = {
        "shard_bytes": data.draw(st.sampled_from([1, 100, 10_000])),
        "max_memory_bytes": data.draw(st.sampled_from([128, 300, 10_000])),
    }
    converted(source, tmp_path / "made", **options)
    found = loaded(tmp_path / "made")
    assert found.keys() == {*wholes, "optim.state.0.weight.step"}
    assert all(same_bits(found[key], whole) for key, whole in wholes.items())
    assert same_bits(found["optim.state.0.weight.step"], scalar)
    back = converted(tmp_path / "made", tmp_path / "back", **options)
    check_zip_files(back)
    assert_same(back, open_checkpoint(source))


def test_objects_and_paths_come_back(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {**STATE, "rng": {"python": (3, (1, 2), None)}})
    made = converted(source, tmp_path / "made")
    back = converted(tmp_path / "made", tmp_path / "back")
    old = open_checkpoint(source)
    assert_same(back, old)
    for one, other in ((old, back), (old, made)):
        assert diff(one, other, all_keys(one, other)) == []


def test_files_are_about_as_large_as_asked(tmp_path: Path) -> None:
    state = {f"{number}": torch.ones(25) for number in range(10)} | {"large": torch.ones(100)}
    source = save(tmp_path / "source", {"model": state})
    converted(source, tmp_path / "made", shard_bytes=250)
    names = [f"model-{number:05}-of-00006.safetensors" for number in range(1, 7)]
    assert sorted(file.name for file in (tmp_path / "made").glob("*.safetensors")) == names
    back = converted(tmp_path / "made", tmp_path / "back", shard_bytes=250)
    assert len(back.tensors["model.large"].chunks) == 2
    assert len(back.items_by_file()) == 7
    assert_same(back, open_checkpoint(source))


@pytest.mark.distributed
def test_what_ranks_have_written(tmp_path: Path) -> None:
    for source in save_on_two_ranks(tmp_path):
        made = converted(source, tmp_path / f"{source.name}-made", max_memory_bytes=128)
        assert len(made.tensors["model.fused"].chunks) == 1
        assert_same(converted(made.path, tmp_path / f"{source.name}-back"), open_checkpoint(source))


def test_the_model_alone_and_all_else_alone(tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    model = converted(source, tmp_path / "model", what="model")
    others = converted(source, tmp_path / "others", what="optimizer")
    old = set(open_checkpoint(source).tensors) | set(open_checkpoint(source).objects)
    assert set(model.tensors) == {key for key in old if key.startswith("model.")}
    assert {*others.tensors, *others.objects} == old - set(model.tensors)
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    back = converted(tmp_path / "model", tmp_path / "back")
    assert back.tensors.keys() == model.tensors.keys()
    both = converted(source, tmp_path / "both")
    only = converted(both.path, tmp_path / "only", what="optimizer", excluded=("optim.param_groups*",))
    assert {*only.tensors, *only.objects} == {key for key in old if key.startswith(("optim.state", "nothing"))}


@pytest.mark.parametrize(
    ("state", "prefix", "names"),
    [
        ({"model": {"model.a": torch.ones(1), "head": torch.ones(1)}}, "model.", {"model.a", "head"}),
        ({"model.a": torch.ones(1), "head": torch.ones(1)}, "", {"model.a", "head"}),
        ({"model.a": torch.ones(1), "model.b": torch.ones(1)}, "", {"model.a", "model.b"}),
        ({"model": {"module": {"a": torch.ones(1)}}}, "model.", {"module.a"}),
    ],
)
def test_which_prefix_the_model_has(tmp_path: Path, state: Any, prefix: str, names: set[str]) -> None:
    source = save(tmp_path / "source", state)
    converted(source, tmp_path / "made")
    assert loaded(tmp_path / "made").keys() == names
    assert_same(converted(tmp_path / "made", tmp_path / "back"), open_checkpoint(source))


def test_a_prefix_that_is_given(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {"module.a": torch.ones(1), "b": torch.ones(2)}})
    converted(source, tmp_path / "made", key_prefix="model.module.")
    assert loaded(tmp_path / "made").keys() == {"a", "model.b"}
    assert_same(converted(tmp_path / "made", tmp_path / "back"), open_checkpoint(source))
    other = converted(tmp_path / "made", tmp_path / "other", key_prefix="net.")
    assert set(other.tensors) == {"net.a", "model.b"}


def test_the_same_name_in_the_model_and_elsewhere(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {"x": torch.ones(2)}, "x": torch.zeros(3)})
    converted(source, tmp_path / "made")
    assert_same(converted(tmp_path / "made", tmp_path / "back"), open_checkpoint(source))


def test_a_url(tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    converted(f"file://{source}", "memory://made")
    back = converted("memory://made", tmp_path / "back")
    assert_same(back, open_checkpoint(source))
    assert values_of(back)
