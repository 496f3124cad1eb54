"""verl's functions around phases, and its engine's optimizer: what those of the example make of them.

verl asks for an older transformers than the other tests, and so is not part of the dev extra. To run these, install it
beside: ``pip install --no-deps -r tests/distributed/verl_requirements.txt``.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload import OffloadPolicy, is_offloaded, offload_report
from tests.distributed.frameworks import POLICY, batch, everything
from tests.distributed.launch import DEVICE_TYPE, spawn_cases, this_device
from tests.distributed.models import Net, build, shard_even

verl_functions = pytest.importorskip("verl.utils.fsdp_utils")
pytestmark = pytest.mark.distributed

RESIDENT = {**POLICY, "device_bytes": 4 * 4096 + 4000}


def optimizer_of(net: Net, policy: dict[str, Any] | None) -> Any:
    """As verl's engine builds it."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from examples.with_verl import OffloadEngineMixin

    class Engine(OffloadEngineMixin, FSDPEngine):
        offload_policy = OffloadPolicy(**policy or {})

    engine = object.__new__(FSDPEngine if policy is None else Engine)  # the rest of it wants a model from a hub
    engine.optimizer_config = SimpleNamespace(
        optimizer="AdamW",
        optimizer_impl="torch.optim",
        lr=0.01,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        override_optimizer_config={},
    )
    return engine._build_optimizer(net)


def train(functions: Any, policy: dict[str, Any] | None, folder: Path) -> tuple[list[float], list[Tensor]]:
    net = build(shard_even)
    optimizer = optimizer_of(net, policy)
    assert is_offloaded(optimizer) == (policy is not None)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 20)
    seen: list[float] = []
    saved = folder / f"{torch.distributed.get_rank()}.pt"
    for step in range(12):
        functions.load_fsdp_model_to_gpu(net)
        functions.load_fsdp_optimizer(optimizer, this_device())
        for micro in range(2):
            loss = net(batch(10 * step + micro, torch.distributed.get_rank()))
            seen.append(loss.item())
            loss.backward()
        seen.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor().item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 5:  # as its checkpoint manager: one file for each rank
            torch.save(optimizer.state_dict(), saved)
        functions.offload_fsdp_optimizer(optimizer)
        functions.offload_fsdp_model_to_cpu(net)
        if step == 8:
            optimizer.load_state_dict(torch.load(saved, weights_only=False))
    functions.load_fsdp_model_to_gpu(net)
    return seen, everything(net, [optimizer])


def verls() -> Any:
    """verl's functions; those for models ask CUDA where they are."""
    if DEVICE_TYPE != "cpu":
        return verl_functions
    names = ("load_fsdp_optimizer", "offload_fsdp_optimizer")
    nothing = dict.fromkeys(("load_fsdp_model_to_gpu", "offload_fsdp_model_to_cpu"), lambda model: None)
    return SimpleNamespace(**nothing, **{name: getattr(verl_functions, name) for name in names})


def same_as_verls(policy: dict[str, Any], folder: Path, *, ours: bool) -> list[str]:
    from examples import with_verl

    seen, left = train(verls(), None, folder)
    others, others_left = train(with_verl if ours else verls(), policy, folder)
    same = seen == others and all(map(torch.equal, left, others_left))
    return [] if same else ["other bits"]


def reported() -> list[str]:
    """After our load nothing is on the device that the policy does not keep there."""
    from examples import with_verl

    net = build(shard_even)
    optimizer = optimizer_of(net, POLICY)
    for step in range(2):
        net(batch(step, torch.distributed.get_rank())).backward()
        optimizer.step()
    before = offload_report(optimizer)
    with_verl.load_fsdp_optimizer(optimizer, this_device())
    after = offload_report(optimizer)
    return [] if after.memory.other_state_bytes == before.memory.other_state_bytes else [str(after)]


def test_phases(tmp_path: Path) -> None:
    cases: dict[str, Any] = {"report": reported}
    for name, policy in {"streamed": POLICY, "resident": RESIDENT}.items():
        for ours in (True, False):
            functions = "our functions" if ours else "verl's functions"
            cases[f"{name}, {functions}"] = partial(same_as_verls, policy, tmp_path, ours=ours)
    spawn_cases(cases, 2, tmp_path)
