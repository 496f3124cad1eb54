"""accelerate with FSDP2: ``prepare``, accumulation, clipping, schedules, ``save_state`` and ``load_state``."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fsdp_offload import is_offloaded, offload_report
from tests.distributed.frameworks import (
    IN_BACKWARD,
    MICRO_BATCHES,
    OVERLAPPED,
    POLICY,
    SAVED_AT,
    STEPS,
    as_torchrun,
    batch,
    record,
    same_scripts,
)
from tests.distributed.launch import DEVICE_TYPE, spawn
from tests.distributed.models import Net, decay_groups
from tests.parity import assert_at_home, attach
from tests.proofs import OTHER_RANKS, RESUMES, TRAINS, proves

pytest.importorskip("accelerate")
pytestmark = pytest.mark.distributed

SEEN_PER_STEP = MICRO_BATCHES + 1  # losses and the norm


def accelerator_for(rank: int, world_size: int, state_dict_type: str) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)  # of the script before in this process
    GradientState._reset_state()
    as_torchrun(rank, world_size)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type=state_dict_type,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(cpu=DEVICE_TYPE == "cpu", fsdp_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES)
    # It would leave FSDP to accelerators; what it does after this line is the same on a CPU.
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def script(
    rank: int,
    world_size: int,
    folder: Path,
    name: str,
    *,
    policy: dict[str, Any] | None = None,
    save: Path | None = None,
    load: Path | None = None,
    state_dict_type: str = "SHARDED_STATE_DICT",
) -> None:
    """What a user writes; offloaded if there is a policy."""
    from fsdp_offload.integrations.accelerate import prepare

    accelerator = accelerator_for(rank, world_size, state_dict_type)
    torch.manual_seed(0)
    model = Net()
    frozen = next(model.parameters()).requires_grad_(requires_grad=False)
    groups = list(decay_groups(model))
    for group in groups:  # clipping is given all parameters of the model
        group["params"] = [param for param in group["params"] if param is not frozen]
    optimizer = optim.AdamW(groups, lr=0.01)
    scheduler = optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 20)
    if policy is None:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    else:
        model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler, policy=policy)
        again = prepare(accelerator, model, optimizer, policy=policy)  # may be called again, also without the policy
        assert again[1] is prepare(accelerator, model, optimizer, device_placement=[True, True])[1] is optimizer
    assert is_offloaded(optimizer) == (policy is not None)
    if load is not None:
        accelerator.load_state(load)
    seen = []
    for step in range(0 if load is None else SAVED_AT, STEPS):
        for micro in range(MICRO_BATCHES):
            with accelerator.accumulate(model):
                loss = model(batch(10 * step + micro, rank))
                seen.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if step % 4 == 1:
            model.eval()
            with torch.no_grad():
                model(batch(999, rank))
            model.train()
        if save is not None and step == SAVED_AT - 1:
            accelerator.save_state(save)
    if policy is not None:
        report = offload_report(optimizer)
        assert report.memory.host_state_bytes > 0
        assert ("the loop clips" in str(report)) == (policy.get("overlap") == "iteration")
        optimizer.optimizer.synchronize()
        assert_at_home(optimizer.optimizer)
    record(folder, name, rank, seen, model, [optimizer])


@proves("accelerate", "accelerate", TRAINS, RESUMES, OTHER_RANKS)
@pytest.mark.parametrize(
    "state_dict_type", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.long)]
)
def test_training_saving_and_resuming(tmp_path: Path, state_dict_type: str) -> None:
    plain, offloaded = tmp_path / "of-plain", tmp_path / "of-offloaded"
    kind: dict[str, Any] = {"state_dict_type": state_dict_type}
    first = {
        "plain": {**kind, "save": plain},
        "offloaded": {**kind, "save": offloaded, "policy": POLICY},
        "overlapped": {**kind, "policy": OVERLAPPED},
        "in backward": {**kind, "policy": IN_BACKWARD},
    }
    same_scripts(script, tmp_path, 2, first)
    later = {
        "offloaded from plain": {**kind, "load": plain, "policy": POLICY},
        "plain from offloaded": {**kind, "load": offloaded},
        "overlapped from offloaded": {**kind, "load": offloaded, "policy": OVERLAPPED},
    }
    same_scripts(script, tmp_path, 2, later, like="plain", seen_since=SAVED_AT * SEEN_PER_STEP)
    alone = {"plain alone": {**kind, "load": plain}, "offloaded alone": {**kind, "load": plain, "policy": POLICY}}
    same_scripts(script, tmp_path, 1, alone)  # another number of ranks


def run_misuse(rank: int, world_size: int) -> None:
    from fsdp_offload.integrations.accelerate import prepare

    warnings.filterwarnings("ignore", message="offload_optimizer: ")
    accelerator = accelerator_for(rank, world_size, "SHARDED_STATE_DICT")
    model: Any = Net()
    optimizer: Any = optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match="takes the policy by its name"):
        prepare(accelerator, model, optimizer, POLICY)
    with pytest.raises(ValueError, match="OffloadPolicy has no bucket"):
        prepare(accelerator, model, optimizer, policy={"bucket": 1})
    loss = nn.Parameter(torch.ones(3))
    for params in (Net().parameters(), [*model.parameters(), loss]):
        with pytest.raises(
            ValueError, match=r"AdamW are not parameters of Net; the first is param_groups\[0\]\.params"
        ):
            prepare(accelerator, model, optim.AdamW(params))
    assert not any(hasattr(module, "reshard") for module in model.modules())  # nothing has been sharded
    with pytest.raises(KeyError, match="couldn't be switched"):  # as accelerate by itself, which has sharded by then
        accelerator.prepare(other := Net(), optim.AdamW([*other.parameters(), loss]))
    part: Any = Net()
    part, of_part = prepare(accelerator, part, optim.AdamW([*part.parameters()][:1]), policy=POLICY)
    assert is_offloaded(of_part)
    assert of_part.param_groups[0]["params"][0] is next(part.parameters())
    model, optimizer = prepare(accelerator, model, optimizer, policy=POLICY)
    with pytest.raises(RuntimeError, match=r"offloaded already, .*say in one place .*fsdp_offload\.integrations"):
        prepare(accelerator, model, optimizer, policy=OVERLAPPED)
    for given in (False, True):  # attached too early
        model = Net()
        optimizer = attach(optim.AdamW(model.parameters()), model=model if given else None)
        match = r"exchanged .*after offload_optimizer\(\).*Attach afterwards: .*fsdp_offload\.integrations"
        model, _ = accelerator.prepare(model, optimizer)
        if not given:  # else at the first forward
            model(batch(0, rank)).backward()
        with pytest.raises(RuntimeError, match=match):
            model(batch(0, rank)) if given else optimizer.step()


def test_a_policy_in_the_wrong_place_and_attaching_too_early(tmp_path: Path) -> None:
    spawn(run_misuse, 2, tmp_path)
