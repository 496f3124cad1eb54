"""NeMo-RL #2248: the optimizer leaves through one pinned buffer that is kept for the next time, and can be freed.

That training has the same bits whenever it leaves and comes back is the axis ``phases`` of the conformance suite.
"""

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, offload_report, offload_states, release_states, reload_states, synchronize
from tests.cpu.test_megatron_chain import Loop as Chain
from tests.overlapping import Loop, adamw, same
from tests.parity import leaves

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer")

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
STAYING = OffloadPolicy(bucket_bytes=1 << 12, device_bytes=1 << 22)
"""All state stays on the device between steps, as without offload, until it is told to go."""


def moving(optimizer: Any) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [leaf for value in values for leaf in leaves(value) if leaf.dim()]


def go(optimizer: Any) -> None:
    offload_states(optimizer)
    release_states(optimizer)


# The buffer ----------------------------------------------------------------------------------------------------------


def test_one_cached_buffer_is_used_again_in_every_cycle(mesh: DeviceMesh) -> None:
    loop = Loop(mesh, adamw, STAYING).train(2)
    taken = offload_report(loop.optimizer).memory
    seen = []
    for step in range(2, 6):
        go(loop.optimizer)
        seen.append([leaf.data_ptr() for leaf in moving(loop.optimizer)])
        reload_states(loop.optimizer)
        loop.train(1, first=step)
    assert all(pointers == seen[0] for pointers in seen)
    assert offload_report(loop.optimizer).memory.host_bytes == taken.host_bytes <= 1.05 * taken.host_state_bytes
    assert same(Loop(mesh, adamw, None).train(6), loop)


def test_all_tensors_lie_in_one_buffer_bit_by_bit(mesh: DeviceMesh) -> None:
    """Coalesced: one after the other, where an allocation for each would lie anywhere."""
    loop = Loop(mesh, adamw, STAYING).train(2)
    before = [leaf.clone() for leaf in moving(loop.optimizer)]
    go(loop.optimizer)
    assert all(map(torch.equal, moving(loop.optimizer), before))
    found = sorted((leaf.data_ptr(), leaf.nbytes) for leaf in moving(loop.optimizer))
    assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(found))
    assert found[-1][0] + found[-1][1] - found[0][0] <= 1.05 * sum(nbytes for _, nbytes in found)
    reload_states(loop.optimizer)
    assert all(map(torch.equal, moving(loop.optimizer), before))


# The paired free -----------------------------------------------------------------------------------------------------


def test_the_paired_free_gives_the_buffer_of_masters_back_and_the_next_cycle_takes_another() -> None:
    """Megatron's chain: fp32 masters are parked in a buffer. State has its homes all the time, which stay."""
    on, off = Chain(True, STAYING), Chain(False)
    inner = on.dense.optimizer
    homes_bytes = offload_report(inner).memory.host_bytes
    for step in range(4):
        for loop in (on, off):
            loop.train_step(step)
        go(on.optimizer)
        away = offload_report(inner).memory.host_bytes
        assert away >= 3 * sum(main.numel() * 4 for main in on.dense.mains)  # two moments and the master
        reload_states(on.optimizer, free_host_memory=True)
        gc.collect()
        assert offload_report(inner).memory.host_bytes == homes_bytes
        synchronize(on.optimizer)
        assert all(map(torch.equal, on.values(), off.values()))


# Its configuration ---------------------------------------------------------------------------------------------------


def test_the_pages_say_what_becomes_of_its_keys() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    offload = ("use_pinned_optimizer_offload", "offload_optimizer_for_logprob", "offload_optimizer_for_refit")
    of_megatron = ("optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer")
    assert [key for key in (*offload, *of_megatron) if key not in text] == []
