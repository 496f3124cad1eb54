"""Megatron-LM #2811: optimizer state and fp32 masters leave the GPU after the step and are back before the next.

The first tests run megatron-core's own DistributedOptimizer; where ranks have GPUs, around Transformer Engine's
FusedAdam, otherwise around the reference of its Python contract. Those after them need one process.
"""

import copy
import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from fsdp_offload import is_offloaded, offload_optimizer, offload_report, offload_states, release_states, reload_states
from tests.cpu.test_megatron_chain import STAYING, Loop, assert_same
from tests.cpu.test_megatron_chain import train as train_both
from tests.distributed import megatron_optimizer as megatron
from tests.distributed.launch import DEVICE_TYPE, spawn
from tests.distributed.test_fused_adam import fused_adam
from tests.fused_adam import BF16, FP32, MASTERS, FusedPair, same_state_dicts
from tests.proofs import TRAINS, proves

if DEVICE_TYPE == "cpu":  # the process from which ranks are forked imports it for all of them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are not installed
        pytest.importorskip("megatron.core.optimizer")
        pytest.importorskip("megatron.core.distributed")

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer")

PHASES = (offload_states, release_states, reload_states)
# Before the first of them, between them, and after the last.
UP_TO = {name: PHASES[:count] for count, name in enumerate(("on the device", "leaving", "away", "coming back"))}
EVERY_PHASE = pytest.mark.parametrize("phases", UP_TO.values(), ids=UP_TO)


# Megatron's own DistributedOptimizer ---------------------------------------------------------------------------------


def copy_masters_and_release(chain: Any) -> None:
    """As Megatron with MXFP8 parameters, whose buffers are filled from the masters: hence two calls, not one."""
    for one in chain.chained_optimizers:
        one._copy_main_params_to_param_buffer()
    release_states(chain)


def run_case(rank: int, world_size: int, name: str, release: Any = release_states) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if megatron.ON_GPU:
        pytest.importorskip("transformer_engine.pytorch")  # before megatron-core, which looks for it
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    with mock.patch.object(megatron, "release_states", release):
        problems = megatron.compare(name)
    parallel_state.destroy_model_parallel()
    assert not problems, problems


def cases() -> Iterator[Any]:
    """On two ranks; the quick tier leaves out overlapped communication, and one rank."""
    for name, ranks in itertools.product(megatron.CASES, (2, 1)):
        yield pytest.param(name, ranks, marks=pytest.mark.long if "overlapped" in name or ranks == 1 else ())


@proves("Megatron-LM's optimizers", "megatron-core", TRAINS)
@pytest.mark.distributed
@pytest.mark.parametrize(("state", "ranks"), [*cases()])
def test_the_three_call_sites_leave_the_bits_and_free_all_of_the_state(state: str, ranks: int, tmp_path: Path) -> None:
    """Losses, norms, parameters, state and what Megatron saves; loads of that, also while state and masters are away.

    ``mains``: fp32 masters that are the inner optimizer's parameters. The others are precision-aware: ``masters`` has
    fp32 masters as state of FusedAdam, and ``remainders`` what they have more than their bf16 parameters.
    """
    spawn(run_case, ranks, tmp_path, state)


# FusedAdam -----------------------------------------------------------------------------------------------------------


def pair_of(**kwargs: Any) -> FusedPair:
    return FusedPair(fused_adam(), device=DEVICE_TYPE, policy=STAYING, **kwargs)


def go_through(optimizer: Any, phases: tuple[Callable[[Any], None], ...] = PHASES) -> None:
    for phase in phases:
        phase(optimizer)


OPTIONS = {
    f"{name}, {str(dtype).removeprefix('torch.')} moments": {
        **masters,
        "exp_avg_dtype": dtype,
        "exp_avg_sq_dtype": dtype,
        "use_decoupled_grad": name != "none",  # as the precision-aware optimizer gives gradients
    }
    for (name, masters), dtype in itertools.product(MASTERS.items(), (FP32, BF16))
    if name != "fp16"
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@EVERY_OPTION
def test_fused_adam_takes_the_same_steps_with_the_phases_between_them(options: dict[str, Any]) -> None:
    pair = pair_of(**options)
    for _ in range(4):
        pair.step(1)  # compares all there is, bit by bit
        go_through(pair.offloaded.optimizer)


@EVERY_OPTION
def test_all_state_of_fused_adam_is_away_after_the_release(options: dict[str, Any]) -> None:
    pair = pair_of(**options).step(2)
    here = offload_report(pair.offloaded.optimizer)
    go_through(pair.offloaded.optimizer, (offload_states, release_states))
    away = offload_report(pair.offloaded.optimizer)
    assert here.memory.kept_state_bytes > 0
    assert away.memory.kept_state_bytes == away.memory.device_bytes == 0
    assert away.memory.host_state_bytes == here.memory.host_state_bytes
    reload_states(pair.offloaded.optimizer)
    first = offload_report(pair.offloaded.optimizer)
    assert first.memory.kept_state_bytes > 0, "what is used next comes at once"
    pair.step(1)
    back = offload_report(pair.offloaded.optimizer)
    assert first.memory.kept_state_bytes <= back.memory.kept_state_bytes <= here.memory.kept_state_bytes


@EVERY_PHASE
def test_state_dicts_and_loads_are_right_with_a_reload_pending_and_in_every_other_phase(phases: Any) -> None:
    pair = pair_of(master_weights=True).step(2)
    weights = copy.deepcopy(pair.plain.model.state_dict())
    go_through(pair.offloaded.optimizer, phases)
    saved = same_state_dicts(pair)
    pair.step(2)
    go_through(pair.offloaded.optimizer, phases)
    for run in pair:
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(copy.deepcopy(saved))
    pair.step(2)


# fp32 masters, and loops that differ from the three sites ------------------------------------------------------------


def loops() -> tuple[Loop, Loop]:
    """With the flag and without it: bf16 parameters with fp32 masters in one optimizer, fp32 ones in another."""
    return Loop(True, STAYING), Loop(False)


def train(pair: tuple[Loop, Loop], *steps: int) -> None:
    train_both(pair, *steps)
    assert_same(*pair)


def held_bytes(loop: Loop) -> list[int]:
    return [main.untyped_storage().nbytes() for main in loop.dense.mains]


@pytest.mark.parametrize("steps", [0, 1])
def test_masters_stay_the_same_tensors_and_no_parameter_of_the_model_leaves(steps: int) -> None:
    """The framework holds on to both: it copies from one to the other after the step. Also before the first one."""
    on, off = loops()
    train_both((on, off), *range(steps))
    mains, before = list(on.dense.mains), held_bytes(on)
    go_through(on.optimizer, (offload_states, release_states))
    assert not any(held_bytes(on))
    assert all(param.untyped_storage().nbytes() for param in on.model.parameters())
    reload_states(on.optimizer)
    assert held_bytes(on) == before
    assert all(one is other for one, other in zip(on.dense.mains, mains, strict=True))
    train((on, off), steps, steps + 1)


def test_many_cycles_change_neither_values_nor_host_memory() -> None:
    on, off = loops()
    train((on, off), 0)
    go_through(on.optimizer)
    before = [offload_report(one.optimizer).memory.host_bytes for one in (on.dense, on.experts)]
    for step in range(1, 4):
        for _ in range(4):
            go_through(on.optimizer)
            assert_same(on, off)
        train((on, off), step)
    assert [offload_report(one.optimizer).memory.host_bytes for one in (on.dense, on.experts)] == before


def test_a_reload_that_is_left_to_the_step() -> None:
    """As under CUDA graphs, where no hook of Python runs."""
    on, off = loops()
    on.finalize = functools.partial(on.finalize_model_grads, group="dp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the wrapped hook is never called
        train((on, off), 0, 1, 2)


# The order of MXFP8, and Megatron's own flags ------------------------------------------------------------------------


@pytest.mark.distributed
def test_masters_go_into_the_parameter_buffer_between_the_offload_and_the_release(tmp_path: Path) -> None:
    spawn(run_case, 2, tmp_path, "mains", copy_masters_and_release)


DEV = json.loads(Path(__file__).with_name("megatron_dev_config.json").read_text(encoding="utf-8"))
"""``OptimizerConfig`` of Megatron-LM's branch dev: fields with their defaults, and flags that it exchanges."""


def as_given(**flags: Any) -> Any:
    """A config before the branch dev exchanged flags."""
    return SimpleNamespace(**flags)


def from_data(**flags: Any) -> Any:
    """The branch dev's, as ``__post_init__`` leaves it."""
    exchanged = {DEV["becomes"].get(name, name): value for name, value in flags.items()}
    assert exchanged.keys() <= DEV["fields"].keys()
    return SimpleNamespace(**DEV["fields"] | exchanged)


def from_source(**flags: Any) -> Any:
    """The branch dev's own class, out of a checkout; what it imports comes from the megatron-core that is installed."""
    checkout = os.environ.get("FSDP_OFFLOAD_TEST_MEGATRON_DEV")
    if checkout is None:
        pytest.skip("FSDP_OFFLOAD_TEST_MEGATRON_DEV names no checkout of Megatron-LM's branch dev")
    path = Path(checkout, "megatron/core/optimizer/optimizer_config.py")
    spec = importlib.util.spec_from_file_location("megatron.core.optimizer.config_of_dev", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    as_text = {field.name: str(field.default) for field in dataclasses.fields(module.OptimizerConfig)}
    assert as_text == {name: str(value) for name, value in DEV["fields"].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that the flag is deprecated
        return module.OptimizerConfig(use_distributed_optimizer=True, **flags)


OFFLOADS = [name for name, default in DEV["fields"].items() if "offload" in name and default is False]
OFFLOADS.remove("use_torch_optimizer_for_cpu_offload")  # with optimizer_cpu_offload alone


@pytest.mark.parametrize("config_of", [as_given, from_data, from_source])
@pytest.mark.parametrize("flag", OFFLOADS)
def test_megatrons_own_flags_beside_ours_are_refused(config_of: Callable[..., Any], flag: str) -> None:
    """Its reviewers asked for an assert: two offloads at once would both move the state."""
    loop = Loop(False)
    loop.experts.config = config_of(**{flag: True})
    with pytest.raises(ValueError, match=flag):
        offload_optimizer(loop.optimizer, policy=STAYING)
    assert not is_offloaded(loop.dense)
    loop.experts.config = config_of()
    offload_optimizer(loop.optimizer, policy=STAYING)
    assert is_offloaded(loop.optimizer)


def test_megatrons_own_offloader_beside_ours_is_refused() -> None:
    """Whatever flags have made it."""
    loop = Loop(False)
    loop.dense._optimizer_state_offloader = object()
    with pytest.raises(ValueError, match="Leave both off"):
        offload_optimizer(loop.optimizer, policy=STAYING)
    loop.dense._optimizer_state_offloader = None
    offload_optimizer(loop.optimizer, policy=STAYING)
