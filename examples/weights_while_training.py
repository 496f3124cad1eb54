"""Read all weights from host memory in a thread while training continues, without a gather or device memory.

    python examples/weights_while_training.py

Parameters are in host memory (``OffloadPolicy(parameters=True)``). A thread copies them again and again, as an export
would. Exit code 0 means that no copy mixed the weights of two steps. Runs on a GPU, or on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_offload import OffloadPolicy, offload_optimizer
from fsdp_offload.listeners import weights


class Homes:
    """Source of (name, whole tensor) in the form of vLLM's ``WeightSource``, which verl's ``send_weights`` takes, too.

    For one rank, whose shards are whole tensors. With several ranks, send each one's ``tensor.to_local()``, or gather.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and shape of each weight; vLLM has a ``ParamMeta`` for these."""
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights(self._model)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of one step; the tensors are valid until the loop ends."""
        for name, tensor in weights(self._model):
            yield name, tensor.to_local()  # type: ignore[attr-defined]


def main(argv: Sequence[str] | None = None) -> int:
    """Train and read; return 0 if each set of weights was that of one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args(argv)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "29534", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    warnings.filterwarnings("ignore", message="offload_optimizer: ")  # it warns that a CPU gains nothing

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(4))).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Spare host memory of the size of state and parameters: with it, training does not wait for the reader.
    policy = OffloadPolicy(
        parameters=True, overlap="forward", snapshot_bytes=16 * sum(p.numel() for p in model.parameters())
    )
    offload_optimizer(optimizer, model=model, policy=policy)

    source, ended = Homes(model), threading.Event()
    print("parameters:", source.metadata())
    steps, sets = [{name: tensor.clone() for name, tensor in source}], list[dict[str, Tensor]]()

    def read() -> None:
        while not ended.is_set():
            sets.append({name: tensor.clone() for name, tensor in source})

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(args.steps):
        model(torch.randn(8, args.width, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append({name: tensor.clone() for name, tensor in source})  # read in this thread, to compare with
    ended.set()
    reader.join()
    mixed = [one for one in sets if not any(all(torch.equal(one[n], step[n]) for n in one) for step in steps)]
    print(f"{len(sets)} sets while {args.steps} steps were trained; {len(mixed)} of them are those of no step")
    dist.destroy_process_group()
    return int(bool(mixed))


if __name__ == "__main__":
    sys.exit(main())
