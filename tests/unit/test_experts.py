"""Local numbers of experts become global ones, in every place where a state dict has names."""

import pytest
import torch

from fsdp_offload.checkpoint import Experts

LAYER = "module.decoder.layers.3.mlp"
LOCAL = [
    f"{LAYER}.experts.linear_fc1.weight0",
    f"{LAYER}.experts.linear_fc1.bias1",
    f"{LAYER}.experts.linear_fc1.weight1_w",
    f"{LAYER}.experts.linear_fc2.weight10",
    f"{LAYER}.experts.local_experts.1.linear_fc1.weight",
    f"{LAYER}.experts.local_experts.1.linear_fc2.bias",
]
GLOBAL = [
    f"{LAYER}.experts.linear_fc1.weight22",
    f"{LAYER}.experts.linear_fc1.bias23",
    f"{LAYER}.experts.linear_fc1.weight23_w",
    f"{LAYER}.experts.linear_fc2.weight32",
    f"{LAYER}.experts.local_experts.23.linear_fc1.weight",
    f"{LAYER}.experts.local_experts.23.linear_fc2.bias",
]
OTHERS = [
    f"{LAYER}.router.weight",
    f"{LAYER}.shared_experts.linear_fc1.weight",
    f"{LAYER}.linear_fc1.weight",
    f"{LAYER}.experts.linear_fc1.weight",
    "module.decoder.layers.0.experts_norm.weight0",
]
EXPERTS = Experts.of_rank(2, 11)


@pytest.mark.parametrize(("local", "numbered"), list(zip(LOCAL, GLOBAL, strict=True)))
def test_names(local: str, numbered: str) -> None:
    assert EXPERTS.global_name(local) == numbered
    assert EXPERTS.local_name(numbered) == local


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_stay(name: str) -> None:
    assert EXPERTS.global_name(name) == name == EXPERTS.local_name(name)


def test_every_layout_of_a_state_dict_is_renamed_and_back() -> None:
    local, numbered = LOCAL[0], GLOBAL[0]
    value = torch.ones(2)

    def layouts(name: str) -> dict[str, object]:
        return {
            "model": {name: value, OTHERS[0]: value},
            "nested": {
                "state": {name: {"exp_avg": value}},
                "param_groups": [{"params": [name, OTHERS[0]], "param_names": [name], "lr": 0.1}],
            },
            "flattened": {f"state.{name}.exp_avg": value, f"param_groups.{name}.lr": 0.1},
            "fsdp_dtensor": {"state": {name: {"exp_avg": value}}, "param_to_group_meta": {name: {"lr": 0.1}}},
        }

    found = EXPERTS.number(layouts(local))
    assert found == layouts(numbered)
    assert found["model"][numbered] is value
    assert EXPERTS.localize(found) == layouts(local)


def test_numbers_that_are_not_local_are_refused() -> None:
    once = EXPERTS.number({LOCAL[0]: 1})
    with pytest.raises(ValueError, match=r"local experts are 0 to 10. Has it been renumbered already"):
        EXPERTS.number(once)
    with pytest.raises(ValueError, match=r"this rank's experts are 22 to 32"):
        EXPERTS.localize({LOCAL[0]: 1})
    with pytest.raises(ValueError, match="first >= 0"):
        Experts(-1, 2)
