"""What offloading costs an iteration: a GPT under ``fully_shard``, each policy beside the plain optimizer.

On several devices: ``torchrun --standalone --nproc-per-node 2 -m fsdp_offload.bench train``.

The bound of a policy is what an iteration takes at least, from times of the same run: forward F, backward B, update U
alone; all loads L and all stores S alone; both at once T (see DESIGN.md section 3)::

    in the step           F + B + clip + max(U, T)
    overlap_forward       B + clip + max(F + U, T)
    update="backward"     max(F + B + U, T)
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .. import OffloadPolicy, offload_optimizer, remove_offload
from ..fsdp import fsdp_modules, local_shard
from .link import Link
from .record import bench_device, median, print_record, wall_ms

_MIB = 1 << 20

POLICIES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "step": {},
    "overlap_forward": {"overlap_forward": True},
    "prefetch": {"prefetch": "backward", "overlap_forward": True},
    "backward": {"update": "backward", "overlap_forward": True},
}


class Block(nn.Module):
    """Attention and a GELU MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner: Tensor = self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return x + inner


class GPT(nn.Module):
    """1.35 G parameters with the defaults of the bench."""

    def __init__(self, layers: int, width: int, vocabulary: int = 32_768) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, width // 128) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the next token."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main(
    layers: Annotated[int, typer.Option(help="Transformer blocks, each sharded by itself.")] = 24,
    width: Annotated[int, typer.Option(help="Of the model.")] = 2048,
    sequences: Annotated[int, typer.Option(help="In the batch of one device.")] = 12,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    staging_mib: Annotated[int, typer.Option(help="OffloadPolicy.staging_bytes, in MiB.")] = 640,
    bucket_mib: Annotated[int, typer.Option(help="OffloadPolicy.bucket_bytes, in MiB.")] = 128,
    iterations: Annotated[int, typer.Option(help="Timed together in one round.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds over all policies; medians are printed.")] = 3,
    only: Annotated[str, typer.Option(help="Only these policies, separated by commas; plain is always there.")] = "",
    clip: Annotated[bool, typer.Option(help="Clip by the global norm, where the policy allows it.")] = True,
) -> None:
    """Iteration time, memory and the bound of each policy, interleaved in one run."""
    with _process_group() as device:
        wanted = {"plain", *(only.split(",") if only else POLICIES)}
        bench = _Bench(device, layers, width, sequences, length, clip=clip)
        sizes = {"staging_bytes": staging_mib * _MIB, "bucket_bytes": bucket_mib * _MIB}
        results: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES if name in wanted}
        parts = bench.parts()
        for _ in range(rounds):
            for name, fields in POLICIES.items():
                if name in wanted:
                    policy = None if fields is None else OffloadPolicy(**{**sizes, **fields})
                    results[name].append(bench.measure(policy, iterations))
        link = Link(device)
        rates = [link.gb_per_s(64, load=True) for _ in range(3)], [link.gb_per_s(64, store=True) for _ in range(3)]
        both = median([link.gb_per_s(64, load=True, store=True) for _ in range(3)])
        state_bytes = bench.state_bytes
        load_ms, store_ms = (state_bytes / median(rate) / 1e6 for rate in rates)
        two_way_ms = 2 * state_bytes / both / 1e6
        if dist.get_rank() == 0:
            print_record(
                "train-parts",
                world_size=dist.get_world_size(),
                params=bench.params,
                tokens=sequences * length,
                state_bytes=state_bytes,
                **parts,
                load_ms=load_ms,
                store_ms=store_ms,
                two_way_ms=two_way_ms,
            )
            for name, found in results.items():
                _print(name, found, results["plain"], parts, two_way_ms)


def _print(
    name: str,
    found: list[dict[str, float]],
    plain: list[dict[str, float]],
    parts: dict[str, float],
    two_way_ms: float,
) -> None:
    forward, backward, update, clip = (parts[f"{part}_ms"] for part in ("forward", "backward", "update", "clip"))
    bounds = {
        "plain": forward + backward + clip + update,
        "step": forward + backward + clip + max(update, two_way_ms),
        "overlap_forward": backward + clip + max(forward + update, two_way_ms),
        "prefetch": backward + clip + max(forward + update, two_way_ms),
        "backward": max(forward + backward + update, two_way_ms),
    }
    ms = median([one["ms"] for one in found])
    plain_ms = median([one["ms"] for one in plain])
    figures = {key: median([one[key] for one in found]) for key in ("peak_bytes", "reserved_bytes")}
    print_record(
        "train",
        policy=name,
        ms=ms,
        over_plain_ms=ms - plain_ms,
        bound_ms=bounds[name],
        over_bound=ms / bounds[name],
        loss=found[0]["loss"],
        same_loss_as_plain=found[0]["loss"] == plain[0]["loss"],
        **figures,
    )


@contextmanager
def _process_group() -> Iterator[torch.device]:
    if "RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    device = bench_device()
    if not dist.is_initialized():
        torch.accelerator.set_device_index(device.index)
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield device
    finally:
        dist.destroy_process_group()


class _Bench:
    """One model, trained on from policy to policy."""

    def __init__(
        self, device: torch.device, layers: int, width: int, sequences: int, length: int, *, clip: bool
    ) -> None:
        torch.manual_seed(0)
        self._device = device
        self._clip = clip
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        with device:
            model = GPT(layers, width)
            generator = torch.Generator(device).manual_seed(dist.get_rank())
            self._tokens = torch.randint(0, 32_768, (sequences, length + 1), generator=generator)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        self._model: nn.Module = model
        self._params = list(model.parameters())  # the shards; after a forward, the root has others for a while
        self._start = [param.detach().clone() for param in self._params]
        self.params = sum(param.numel() for param in self._params)
        self.state_bytes = sum(8 * local_shard(param).numel() for param in self._params)

    def parts(self) -> dict[str, float]:
        """Forward, backward and update alone."""
        optimizer = torch.optim.AdamW(self._params, lr=1e-5, fused=True)
        self._iterate(optimizer, 2)
        device = self._device
        loss = self._model(self._tokens)

        def forward_and_backward() -> None:
            self._model(self._tokens).backward()

        loss.backward()
        both = median(wall_ms(forward_and_backward, device, repeats=5))
        with torch.no_grad():
            forward = median(wall_ms(lambda: self._model(self._tokens), device, repeats=5))
        self._reshard()
        update = median(wall_ms(optimizer.step, device, repeats=5))
        clip = median(wall_ms(self._clip_gradients, device, repeats=5)) if self._clip else 0.0
        return {"forward_ms": forward, "backward_ms": both - forward, "update_ms": update, "clip_ms": clip}

    def _clip_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self._params, 1e9)  # all of its work, and the same bits afterwards

    def measure(self, policy: OffloadPolicy | None, iterations: int) -> dict[str, float]:
        """Milliseconds of an iteration and peaks of memory, after it has settled."""
        with torch.no_grad():
            for param, start in zip(self._params, self._start, strict=True):
                param.grad = None
                param.copy_(start)
        optimizer = torch.optim.AdamW(self._params, lr=1e-5, fused=True)
        gc.collect()
        torch.accelerator.empty_cache()
        if policy is not None:
            offload_optimizer(optimizer, model=self._model, policy=policy)
        clip = self._clip and (policy is None or policy.update == "step")
        self._iterate(optimizer, 4, clip=clip)
        torch.accelerator.reset_peak_memory_stats(self._device)
        dist.barrier()
        (ms,) = wall_ms(lambda: self._iterate(optimizer, iterations, clip=clip), self._device, repeats=1, warmup=0)
        result = {
            "ms": ms / iterations,
            "peak_bytes": torch.accelerator.max_memory_allocated(self._device),
            "reserved_bytes": torch.accelerator.max_memory_reserved(self._device),
            "loss": self._model(self._tokens).item(),
        }
        self._reshard()
        if policy is not None:
            optimizer.synchronize()  # type: ignore[attr-defined]
            _forget(optimizer)
        return result

    def _reshard(self) -> None:
        """The root stays gathered after a forward without a backward, and would not see the next step."""
        for module in fsdp_modules(self._model):
            module.reshard()

    def _iterate(self, optimizer: torch.optim.Optimizer, count: int, *, clip: bool = False) -> None:
        for _ in range(count):
            self._model(self._tokens).backward()
            if clip:
                self._clip_gradients()
            optimizer.step()
            optimizer.zero_grad()


def _forget(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()  # nothing that would have to go back to the device
    remove_offload(optimizer)
