"""Local numbers of experts become global ones, wherever wrappers and layers have put them."""

import pytest

from fsdp_offload.checkpoint import Experts

LAYER = "module.decoder.layers.3.mlp"
NAMES = [
    (f"{LAYER}.experts.linear_fc1.weight0", f"{LAYER}.experts.linear_fc1.weight22"),
    (f"{LAYER}.experts.linear_fc1.bias1", f"{LAYER}.experts.linear_fc1.bias23"),
    (f"{LAYER}.experts.linear_fc1.weight1_w", f"{LAYER}.experts.linear_fc1.weight23_w"),
    (f"{LAYER}.experts.linear_fc2.weight10", f"{LAYER}.experts.linear_fc2.weight32"),
    (f"{LAYER}.experts.local_experts.1.linear_fc1.weight", f"{LAYER}.experts.local_experts.23.linear_fc1.weight"),
    ("model.layers.0.block_sparse_moe.experts.10.w1.weight", "model.layers.0.block_sparse_moe.experts.32.w1.weight"),
    ("experts.0", "experts.22"),
    ("model.layers.0.grouped_linear.weight1", "model.layers.0.grouped_linear.weight23"),
    ("weight0", "weight22"),
]
OTHERS = [
    f"{LAYER}.router.weight",
    f"{LAYER}.shared_experts.linear_fc1.weight",
    f"{LAYER}.linear_fc1.weight",
    f"{LAYER}.experts.linear_fc1.weight",
    f"{LAYER}.experts.w13",
    "module.decoder.layers.0.experts_norm.0.weight",
    "module.decoder.layers.0.qweight0",
]
EXPERTS = Experts.of_rank(2, 11)


@pytest.mark.parametrize(("local", "numbered"), [*NAMES, *zip(OTHERS, OTHERS, strict=True)])
def test_names(local: str, numbered: str) -> None:
    assert EXPERTS.global_name(local) == numbered


def test_numbers_that_are_not_local_are_refused() -> None:
    with pytest.raises(ValueError, match=r"local experts are 0 to 10. Has it been renumbered already"):
        EXPERTS.global_name(EXPERTS.global_name(NAMES[0][0]))
    for first, count in ((-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=r"Experts\(first, count\): (first must be 0|count must be 1) or more"):
            Experts(first, count)
