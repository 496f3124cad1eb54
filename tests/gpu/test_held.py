"""On a device: tensors that others hold, and threads; all of it together, for long, with streams that are late."""

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload.checkpoint import get_optimizer_state_dict
from tests.conformance.oracle import NEVER
from tests.core.test_held import *  # noqa: F403
from tests.core.test_held import Reader, copies_of
from tests.gpu.streams import Slow, offloaded, plain
from tests.overlapping import Loop, same


class Writer(threading.Thread):
    """Holds a state dict, and reads it late, as a stager does; what it has read has to be that of the call."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(daemon=True)
        self.held: Any = get_optimizer_state_dict(loop.model, loop.optimizer), get_model_state_dict(loop.model)
        self.expected, self.found = copies_of(self.held), []
        self.may_read = threading.Event()

    def run(self) -> None:
        assert self.may_read.wait(60)
        self.found = copies_of(self.held)
        del self.held


@pytest.mark.parametrize("kind", ["L", "S", "U"])
@pytest.mark.parametrize("parameters", [False, True])
def test_a_reader_closures_saves_and_interrupts_together(
    mesh: DeviceMesh, slow: Slow, kind: str, *, parameters: bool
) -> None:
    """No other bit, and no thread that waits for ever, in 200 iterations."""
    rng = random.Random(f"{kind}{parameters}")
    expected, loop = plain(mesh), offloaded(mesh, {"overlap": "iteration", "parameters": parameters})
    reader = Reader(loop, random.Random(1))
    slow(kind, 50_000)
    writer: Writer | None = None
    for at in range(200):
        way = rng.choice(["clip", "closure", "interrupted closure"]) if at > 4 else "clip"
        if writer is None and at > 4 and rng.random() < 0.1:
            writer = Writer(loop)
            writer.start()
        for each in (expected, loop):
            if way == "clip":
                each.backward(at)
                each.clip(NEVER)
            if each is loop and writer is not None:
                writer.may_read.set()
                writer.join(60)
                assert all(map(torch.equal, writer.expected, writer.found))
                assert writer.found
                writer = None
            if way == "clip":
                each.step()
                continue

            def closure(each: Loop = each, at: int = at, *, fails: bool = way != "closure") -> Tensor:
                each.optimizer.zero_grad()
                loss = each.model(each.batch(10 * at))
                if fails:
                    raise KeyboardInterrupt
                loss.backward()
                return loss

            if way != "closure":
                with pytest.raises(KeyboardInterrupt):
                    each.optimizer.step(closure)
                closure(fails=False)
                each.step()
            else:
                each.optimizer.step(closure)
                each.optimizer.zero_grad()
        if at == 10:
            reader.start()
        if at % 50 == 49:
            assert same(expected, loop), at
    reader.stop()
