"""The 96 cases of Megatron's HybridDeviceOptimizer, bit by bit, on a device."""

from typing import Any

import pytest
import torch

from tests.seeds.test_megatron_hybrid import EVERY_CASE, run


@EVERY_CASE
def test_each_case_is_bitwise_that_of_plain_optimizers(
    case: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    run(case, device)
