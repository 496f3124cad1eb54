"""torchtitan's own command line on the CPU: ``torchrun -m tests.distributed.titan_on_cpu --module ... --config ...``.

Its config manager, trainer and loop run as they are. What they lack without an accelerator is given here: a device,
which torchtitan asks torch for and takes to be CUDA, and in the two configs, which are functions of a registry as users
write them, an attention whose backward runs on the CPU (flex's does not) and reductions that gloo has.
"""

import functools
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_offload import offload_report
from fsdp_offload.fsdp.fully_shard import fsdp_modules

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

containers: list[Any] = []


def debugmodel() -> "Trainer.Config":
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    spec = config.model_spec
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.parallelize_fn = functools.partial(parallelize, spec.parallelize_fn)
    return config


def parallelize(theirs: Callable[..., nn.Module], model: nn.Module, **options: Any) -> nn.Module:
    sharded = theirs(model, **options)
    for module in fsdp_modules(sharded):
        module.set_force_sum_reduction_for_comms(True)
    return sharded


def offloaded_debugmodel() -> "Trainer.Config":
    from fsdp_offload.integrations.torchtitan import offloaded

    config = debugmodel()
    config.optimizer = offloaded(config.optimizer)
    config.model_spec.post_optimizer_build_fn = lambda container, *_: containers.append(container)  # for the report
    return config


def be_an_accelerator() -> None:
    """Say what torchtitan asks of a device, before its other modules import these names."""
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        current_device=lambda: 0,
        empty_cache=lambda: None,
        get_device_name=lambda _: "CPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        set_device=lambda _: None,
        synchronize=lambda: None,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    be_an_accelerator()
    runpy.run_module("torchtitan.train", run_name="__main__")
    for container in sys.modules["tests.distributed.titan_on_cpu"].containers:  # as torchtitan has imported this file
        print(offload_report(container.optimizers[0]))  # noqa: T201
