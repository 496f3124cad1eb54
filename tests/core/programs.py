"""Random training programs, run twice: plain, and moved by the core. Everything is compared bit by bit after each step.

On any device and any number of ranks: FSDP_OFFLOAD_TEST_DEVICE says on which.
"""

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_offload import OffloadPolicy, clip_grad_norm_, remove_offload
from fsdp_offload.core.engine import Engine, engine_of
from tests.parity import attach

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [
        {"weight_decay": 0.1},
        {"amsgrad": True, "foreach": True},
        {"fused": True},
        {"capturable": False, "foreach": False},
    ],
    "Adam": [{}, {"foreach": True}, {"fused": True}],
    "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "foreach": True}, {}],
    "RMSprop": [{"momentum": 0.5, "centered": True}],
    "Adagrad": [{}],
    "NAdam": [{}],
    "Adadelta": [{"foreach": True}],
}


class Block(nn.Module):
    def __init__(self, width: int, rows: int, *, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, rows), nn.Linear(rows, width)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice([8, 12])
        self.embed = nn.Embedding(rng.choice([5, 13, 32]), width)
        sizes = [rng.choice([1, 3, 7, 16, 40]) for _ in range(rng.randint(1, 4))]
        self.blocks = nn.ModuleList(Block(width, rows, norm=rng.random() < 0.5) for rows in sizes)
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=rng.random() < 0.5)
        if rng.random() < 0.3:
            self.head.weight = self.embed.weight
        if rng.random() < 0.3:
            self.blocks[0].up.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 5) if rng.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Program:
    """What one training does, all of it drawn from the seed."""

    seed: int
    mesh: DeviceMesh

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.overlap = rng.choice(["step", "forward", "iteration"])
        self.name = rng.choice([*OPTIMIZERS, "AdamW", "AdamW"])
        self.options = rng.choice(OPTIMIZERS[self.name])
        self.device_bytes = rng.choice(["auto", 2048, 6000, 12000])
        self.bucket_bytes = rng.choice([1024, 2048]) if self.device_bytes != "auto" else rng.choice([2048, 64 << 20])
        if self.device_bytes != "auto":
            self.bucket_bytes = min(self.bucket_bytes, self.device_bytes // 2)
        self.steps, self.micro, self.sync_each = rng.randint(3, 7), rng.choice([1, 1, 1, 2, 3]), rng.random() < 0.5
        self.warm = rng.choice([0, 0, 0, 1, 2])
        self.reshard = rng.choice([None, None, False])
        self.mixed, self.two_groups, self.bare_root = rng.random() < 0.2, rng.random() < 0.3, rng.random() < 0.15
        self.clips, self.schedules = rng.choice([None, None, 0.0, 0.3, 1.0]), rng.random() < 0.5
        self.parameters = rng.random() < 0.5
        if self.bare_root and (dist.get_world_size() > 1 or self.micro > 1):
            self.bare_root = False
        self.mixed = self.mixed and not self.bare_root
        self.clips_ours = not self.bare_root and rng.random() < 0.8  # torch clips plain tensors and DTensors apart

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        model = Model(rng).to(self.mesh.device_type)
        kwargs: dict[str, Any] = {"mesh": self.mesh}
        if self.mixed:
            kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, **kwargs, **({} if self.reshard is None else {"reshard_after_forward": self.reshard}))
        if not self.bare_root:
            fully_shard(model, **kwargs)
        params: Any = list(model.parameters())
        options = dict(self.options)
        if self.bare_root:
            options.pop("foreach", None)  # plain tensors and DTensors do not go into one list
            options.pop("fused", None)
        if self.two_groups and len(params) > 2:
            params = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]
        return model, getattr(torch.optim, self.name)(params, lr=1e-2, **options)

    def run(self, *, offloaded: bool) -> list[dict[str, Any]]:  # noqa: C901  # a training loop, top to bottom
        """Train; returns what can be seen after each step."""
        rng = random.Random(self.seed + 1)
        data = torch.Generator().manual_seed(self.seed + dist.get_rank())
        model, optimizer = self.build()
        sharded = [param for param in model.parameters() if hasattr(param, "to_local")]

        def loss() -> Tensor:
            x = torch.randint(0, model.embed.num_embeddings, (3, 4), generator=data).to(self.mesh.device_type)
            return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())

        for _ in range(self.warm):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        if offloaded:
            policy = OffloadPolicy(
                overlap=self.overlap,
                device_bytes=self.device_bytes,
                bucket_bytes=self.bucket_bytes,
                parameters=self.parameters,
            )
            attach(optimizer, model=model, policy=policy)
            engine = engine_of(optimizer)
            assert engine is not None
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, 1.0, 4) if self.schedules else None
        seen: list[dict[str, Any]] = []
        saved: Any = None
        for step in range(self.steps):
            roll = [rng.random() for _ in range(9)]
            values: dict[str, Any] = {}
            if roll[0] < 0.3:
                with torch.no_grad():
                    values["evaluation"] = loss()
            for micro in range(self.micro):
                if not self.bare_root:
                    model.set_requires_gradient_sync(self.sync_each or micro == self.micro - 1)
                one = loss()
                (one / self.micro).backward()
                values[f"loss {micro}"] = one.detach()
            if self.clips is not None:
                limit = 1e-3 if roll[1] < self.clips else 1e6
                if offloaded and self.clips_ours:
                    norm = clip_grad_norm_(optimizer, limit)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(sharded, limit)
                values["norm"] = getattr(norm, "full_tensor", lambda norm=norm: norm)()
            if roll[2] < 0.15 and not (self.overlap == "iteration" and self.clips is None):
                optimizer.zero_grad()  # the step is skipped, as a GradScaler does
                continue
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if roll[3] < 0.3:
                with torch.no_grad():
                    values["evaluation after"] = loss()
            if offloaded and roll[4] < 0.3:
                optimizer.offload_states()
                optimizer.release_states()
                if roll[5] < 0.5:
                    optimizer.reload_states()
            if roll[6] < 0.2:
                saved = copy.deepcopy(optimizer.state_dict())
            elif roll[6] < 0.35 and saved is not None:
                optimizer.load_state_dict(copy.deepcopy(saved))
            if roll[7] < 0.2:  # somebody writes parameters and state between steps
                if offloaded:
                    optimizer.synchronize()
                with torch.no_grad():
                    for param in model.parameters():
                        param.mul_(1.25)
                for param in model.parameters():
                    for value in optimizer.state.get(param, {}).values():
                        if isinstance(value, Tensor) and value.dim() and value.numel():
                            value.mul_(0.5)
            if roll[8] < 0.6 or step == self.steps - 1:
                if offloaded:
                    optimizer.synchronize()
                for name, param in model.named_parameters():
                    values[name] = local(param)
                    for key, value in optimizer.state.get(param, {}).items():
                        values[f"{name}.{key}"] = local(value)
            optimizer.zero_grad()
            seen.append(values)
        if offloaded:
            assert engine.core.cache.nbytes <= self.limit(engine)
            remove_offload(optimizer)
            for name, param in model.named_parameters():
                for key, value in optimizer.state.get(param, {}).items():
                    values[f"{name}.{key} after"] = local(value)
        else:
            values |= {
                f"{name} after": value
                for name, value in values.items()
                if "." in name and name not in dict(model.named_parameters())
            }
        return seen

    def limit(self, engine: Engine) -> int:
        """Return how many bytes the device may hold: the policy's, or those of the largest update."""
        if self.device_bytes == "auto":
            return 1 << 62
        return max(self.device_bytes, sum(pool.least * pool.nbytes for pool in engine.core.cache.pools))


def local(value: Any) -> Any:
    """A copy of this rank's part, on the host."""
    if isinstance(value, Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().cpu().clone()
    return value


def check(seed: int, mesh: DeviceMesh) -> None:
    """Run one program both ways."""
    program = Program(seed, mesh)
    plain, ours = program.run(offloaded=False), program.run(offloaded=True)
    assert len(plain) == len(ours)
    for step, (one, other) in enumerate(zip(plain, ours, strict=True)):
        assert one.keys() == other.keys(), (seed, step, one.keys() ^ other.keys())
        for name in one:
            same = torch.equal(one[name], other[name]) if isinstance(one[name], Tensor) else one[name] == other[name]
            assert same, f"program {seed}, step {step}: {name} differs ({program.overlap}, {program.name})"
