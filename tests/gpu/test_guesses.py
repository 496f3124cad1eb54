"""Clipping with updates in the backward, on real streams: who waits, and who does not. Bits: ``test_conformance``."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import clip_grad_norm_
from fsdp_offload.core.guesses import WayBack
from tests.clipping import ALWAYS, NEVER, guesses_of, train
from tests.gpu.streams import LONG_CYCLES, Slow, offloaded, plain
from tests.overlapping import POLICIES, same

CLIPPED_ONCE = [ALWAYS if at == 7 else NEVER for at in range(12)]


def test_other_bits_without_the_wait_for_old_parameters(
    mesh: DeviceMesh, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite can fail."""
    expected = train(plain(mesh), CLIPPED_ONCE)
    slow("S", LONG_CYCLES)
    assert same(expected, train(offloaded(mesh, POLICIES["iteration"]), CLIPPED_ONCE))
    keep = WayBack.keep

    def unnoted(self: WayBack, bucket: Any) -> None:
        before = [dict(item.used) for item in bucket.weights]
        keep(self, bucket)
        for item, used in zip(bucket.weights, before, strict=True):
            item.used = used

    monkeypatch.setattr(WayBack, "keep", unnoted)
    assert not same(expected, train(offloaded(mesh, POLICIES["iteration"]), CLIPPED_ONCE))


def test_a_step_that_stands_does_not_wait_for_the_device(mesh: DeviceMesh) -> None:
    """The host waits for the factor alone: compute goes on with work that was issued before."""
    loop = train(offloaded(mesh, POLICIES["iteration"]), [NEVER] * 5)
    torch.cuda.synchronize()
    loop.backward(5)
    clip_grad_norm_(loop.optimizer, NEVER)  # without a look at the norm, which would wait
    behind = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    behind.record()
    loop.step()
    assert not behind.query()
    assert guesses_of(loop).taken_back == 0
