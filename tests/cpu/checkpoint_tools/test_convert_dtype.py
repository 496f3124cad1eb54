"""The model's floats are cast on the way; nothing else is."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint_tools.checkpoints import run_here, save
from tests.checkpoint_tools.converted import converted
from tests.checkpoint_tools.offline import check_zip_files, same_bits, tiled, values_of
from tests.cpu.checkpoint_tools.test_command_line import assert_one_line

# Values that are halfway between two of bf16, too large for fp16, and no numbers.
ODD = torch.tensor([1.0 + 2**-9, 3e38, 1e-45, torch.inf, -0.0, torch.nan] * 50_000).view(600, 500)
STATE = {
    "model": {
        "a": tiled(ODD, [((0, 0), (250, 500)), ((250, 0), (350, 200)), ((250, 200), (350, 300))]),
        "half": torch.ones(3, 2, dtype=torch.bfloat16),
        "count": torch.arange(5),
        "byte": torch.ones(4).to(torch.float8_e4m3fn),
    },
    "optim": {"state": {"a": {"exp_avg": ODD, "step": torch.tensor(3.0)}}},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_models_floats_are_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    source = save(tmp_path / "source", STATE)
    made = converted(source, tmp_path / "made", dtype=dtype, shard_bytes=1 << 20)
    values = values_of(made)
    assert same_bits(values["model.a"], ODD.to(dtype))
    assert same_bits(values["model.half"], torch.ones(3, 2, dtype=dtype))
    assert same_bits(values["model.count"], torch.arange(5))
    assert values["model.byte"].dtype == torch.float8_e4m3fn
    assert same_bits(values["optim.state.a.exp_avg"], ODD)
    back = converted(tmp_path / "made", tmp_path / "back", dtype=torch.float32, max_memory_bytes=1 << 18)
    assert same_bits(values_of(back)["model.a"], ODD.to(dtype).float())
    check_zip_files(back)


def test_of_the_command_line(tmp_path: Path) -> None:
    source = save(tmp_path / "source", {"model": {"a": torch.ones(2)}})
    assert run_here("convert", source, tmp_path / "made", "--dtype", "bf16").returncode == 0
    assert "bfloat16" in run_here("inspect", tmp_path / "made").stdout
    assert_one_line(run_here("convert", source, tmp_path / "new", "--dtype", "int8"), "--dtype is fp32, bf16, fp16")
