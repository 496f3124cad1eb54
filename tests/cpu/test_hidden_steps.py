"""torch's ``set_optimizer_state_dict`` takes a step of its own where there is no state yet: it changes nothing else."""

import copy
from typing import Any

import torch
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from tests.overlapping import POLICIES, SIZES, Loop, same
from tests.policies import with_share
from tests.tiers import spread

MAKERS: dict[str, Any] = {
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
    "amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "tensor lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
    "sgd": lambda params: optim.SGD(params, lr=0.01, momentum=0.9),
}


@spread(
    policy={**POLICIES, "resident": {"staying": 20_000}},
    kind={kind: kind for kind in MAKERS},
    steps_before={"fresh": 0, "used": 3},
)
def test_loading_with_torchs_function(mesh: DeviceMesh, policy: dict[str, Any], kind: str, steps_before: int) -> None:
    options = StateDictOptions(full_state_dict=kind == "sgd")
    source = Loop(mesh, MAKERS[kind], None).train(3)
    state = get_optimizer_state_dict(source.model, source.optimizer, options=options)
    weights = copy.deepcopy(source.model.state_dict())
    plain, offloaded = (
        Loop(mesh, MAKERS[kind], chosen).train(steps_before) for chosen in (None, with_share(**SIZES, **policy))
    )
    for loop in (plain, offloaded):
        loop.model.load_state_dict(weights)
        set_optimizer_state_dict(loop.model, loop.optimizer, copy.deepcopy(state), options=options)
    assert same(plain, offloaded)
    for loop in (plain, offloaded):
        loop.train(3, first=10)
    assert same(plain, offloaded)
