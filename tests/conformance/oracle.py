"""One training run, and its plain twin: the same bits of everything that can be seen, after every step."""

import copy
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_offload import (
    OffloadPolicy,
    add_masters,
    clip_grad_norm_,
    is_offloaded,
    offload_model,
    reload_model,
    remove_offload,
)
from fsdp_offload.checkpoint import ArenaStager
from fsdp_offload.engine import speculation
from fsdp_offload.engine.engine import engine_of
from tests.async_writers import Waits
from tests.at_home import dropped_is_spoilt, not_at_home
from tests.conformance.axes import LAYOUTS, Case, build
from tests.conformance.following import Followed, of_small_pieces, seen
from tests.parity import assert_at_home, attach, leaves, local, params_of, random_state, same_value
from tests.twins import master_of, rounded

NEVER, ALWAYS = 1e9, 1e-3
"""Norms to clip by: beyond reach, and below every gradient."""
BUCKET_BYTES, SMALL_BYTES = 2048, 4096


PHASES = ("offload", "release", "reload")


class Loop:
    """The offloaded run."""

    waits: Waits
    followed: Followed | None = None
    random: Tensor | None = None
    """Random numbers that would be drawn next, behind the last step."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.seen: list[float] = []
        self.steps = 0
        self.kept: dict[str, Any] = {}  # what a habit wants to find again
        self.make()

    def make(self) -> None:
        torch.manual_seed(0)
        self.model = build(self.case, self.device)
        matrices = "matrices" in self.case.made.traits
        self.named = {
            name: param
            for name, param in self.model.named_parameters()
            if param.requires_grad and (param.dim() == 2 or not matrices)
        }
        params: Any = self.params
        if self.case.model == "groups":
            params = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.005}]
        self.optimizer = self.case.made(params)
        self.schedulers = [schedule(self.optimizer)]

    def attach(self) -> None:
        case = self.case
        policy = OffloadPolicy(
            overlap=case.overlap,  # type: ignore[arg-type]
            device_bytes="auto" if case.device_bytes == "auto" else SMALL_BYTES,
            bucket_bytes=BUCKET_BYTES,
            parameters=case.parameters,
            host_fraction=case.host,
            snapshot_bytes=(1 << 20) if case.save in ("async", "spare") else 0,
            serial=case.serial,
        )
        if case.masters != "none":
            add_masters(self.optimizer, case.masters)  # type: ignore[arg-type]
        attach(self.optimizer, model=self.model if LAYOUTS[case.layout].shard else None, policy=policy)
        if case.deltas:
            self.followed = Followed(self)

    def follow(self) -> None:
        """Apply deltas to the copy of the weights, with several steps in between, too."""
        if self.followed is not None and (self.steps * 7 + len(self.case.program)) % 3:
            self.followed.follow()

    @property
    def params(self) -> list[Any]:
        return list(self.named.values())

    def hosted(self) -> set[str]:
        """Which parameters the CPU updates."""
        engine: Any = engine_of(self.optimizer)
        by_param = {param: name for name, param in self.named.items()}
        return {by_param[shard.param] for shard in engine.plan.host_shards()}

    # -- what a loop does ---------------------------------------------------------------------------

    def batch(self, seed: int) -> Tensor:
        sharing = LAYOUTS[self.case.layout].sharing
        generator = torch.Generator().manual_seed(100 * seed + rank() // sharing)
        return torch.randint(0, 20, (2, 5), generator=generator).to(self.device)

    def backward(self, at: int, **options: Any) -> None:
        for micro in range(self.case.micro):
            loss = self.model(self.batch(10 * at + micro), **options)
            loss.backward()
            self.seen.append(loss.item())
            self.nap()

    def nap(self) -> None:
        """Sleep with gradients, where nothing has been updated with them."""
        if self.case.sleep and self.steps in (5, 7) and self.case.overlap != "iteration":
            self.sleep()

    def clip(self, limit: float | None = None, **options: Any) -> None:
        """By ``limit``, or as the case says; the first steps show that this loop clips."""
        if self.case.clip == "never" and limit is None:
            return
        if limit is None:
            binds = self.steps > 3 and (self.case.clip == "always" or self.steps % 3 == 2)
            limit = ALWAYS if binds else NEVER
        early = is_offloaded(self.optimizer) and self.case.overlap == "iteration"
        params = self.params
        self.seen.append(clip_by(limit, params, self.optimizer if early else None, **options))

    def look(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.model(self.batch(999)).item())
        self.model.train()

    def update(self, closure: Callable[[], Tensor] | None = None) -> Any:
        return self.optimizer.step(closure)  # type: ignore[arg-type]

    def scaled(self) -> Optimizer:
        """What a GradScaler is given."""
        return self.optimizer

    def step(self) -> None:
        """Clip, update, and clear."""
        self.clip()
        self.update()
        for scheduler in self.schedulers:
            scheduler.step()
        self.clear()

    def clear(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def synchronize(self) -> None:
        self.optimizer.synchronize()  # type: ignore[attr-defined]

    def phase(self, *names: str) -> None:
        for name in names:
            getattr(self.optimizer, f"{name}_states")()

    def sleep(self) -> None:
        offload_model(self.model)
        reload_model(self.model)

    # -- saved and resumed --------------------------------------------------------------------------

    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer]

    def copy(self) -> dict[str, Any]:
        model = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "optimizers": [copy.deepcopy(one.state_dict()) for one in self.optimizers()]}

    def restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        for one, state in zip(self.optimizers(), saved["optimizers"], strict=True):
            one.load_state_dict(copy.deepcopy(state))

    def states(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, folder: Path) -> None:
        dcp.save(self.states(), checkpoint_id=folder)

    def save_asynchronously(self, folder: Path) -> None:
        """By collectives of its own, beside those of training; the writer stands still until something waits for it."""
        stager = self.kept["stager"] = ArenaStager(self.optimizer)
        group = dist.new_group(backend="gloo")
        writer = self.waits.hold(folder)
        if dist.get_world_size() > 1:
            writer.let_go()  # it ends with those of other ranks, which may have nothing to wait for
        self.kept["future"] = dcp.async_save(
            self.states(), storage_writer=writer, async_stager=stager, process_group=group
        )
        writer.in_use = True

    def finish_saving(self) -> None:
        if "future" in self.kept:
            self.waits.let_go()
            self.kept.pop("future").result()
            self.kept.pop("stager").close()

    def resume(self, folder: Path) -> None:
        """In new objects, as a new process would."""
        self.finish_saving()
        schedules = [scheduler.state_dict() for scheduler in self.schedulers]
        self.make()
        self.attach()
        states = self.states()
        dcp.load(states, checkpoint_id=folder)
        set_model_state_dict(self.model, states["model"])
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=states["optimizer"])
        for scheduler, state in zip(self.schedulers, schedules, strict=True):
            scheduler.load_state_dict(state)

    # -- without offload for a while ----------------------------------------------------------------

    def remove(self) -> None:
        remove_offload(self.optimizer)

    def attach_again(self) -> None:
        self.attach()

    # -- what can be seen ---------------------------------------------------------------------------

    def live_state(self, name: str) -> dict[str, Any]:
        """Of a parameter, to be changed."""
        return self.optimizer.state.get(self.named[name], {})

    def state_of(self, name: str) -> dict[str, Any]:
        """Of a parameter; its master in fp32."""
        param = self.named[name]
        found = dict(self.optimizer.state.get(param, {}))
        if "master_param" in found and self.case.masters != "none":
            shard, kept = local(param.detach()).cpu(), local(found["master_param"]).cpu()
            found["master_param"] = master_of(self.case.masters, shard, kept)
        return found

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seen": torch.tensor(self.seen, dtype=torch.float64)}
        found["a scaler's"] = [hasattr(self.optimizer, name) for name in ("grad_scale", "found_inf")]
        for name, param in self.model.state_dict().items():
            found[name] = local(param.detach())
        found["random numbers"] = self.random
        for name in self.named:
            for key, value in sorted(self.state_of(name).items()):
                if not isinstance(value, Tensor):
                    found[f"{name} {key}"] = value
                    continue
                for number, leaf in enumerate(leaves(value)):
                    found[f"{name} {key} {number}"] = leaf
        for number, group in enumerate(self.optimizer.param_groups):
            found |= {f"group {number} {key}": value for key, value in group.items() if key != "params"}
        return found

    def orders(self) -> list[list[str]]:
        """List the keys of groups and states in their order, which is that of a load where there was one."""
        return [*map(list, self.optimizer.param_groups), *(list(self.state_of(name)) for name in self.named)]


def usual(loop: Loop, at: int) -> None:
    loop.backward(at)
    loop.step()


class Twin(Loop):
    """The plain run. Where a policy updates other tensors than the parameters, so does a plain optimizer here.

    Masters are an fp32 copy of the parameters, and what the CPU updates is a copy there, of a fused optimizer.
    """

    shadows: dict[str, Any]

    def __init__(self, case: Case, device: torch.device, hosted: Callable[[], set[str]]) -> None:
        self.which = hosted
        super().__init__(case, device)

    def make(self) -> None:
        super().make()
        self.shadows: dict[str, Tensor] = {}
        self.of_host: Optimizer | None = None

    def attach(self) -> None:
        self.sleep()
        if self.case.masters == "none" and not self.case.host:
            return
        for name, param in self.named.items():
            shadow = local(param.detach()).clone()
            lower = self.case.masters != "none" and shadow.dtype is torch.bfloat16
            self.shadows[name] = nn.Parameter(shadow.float() if lower else shadow)
        by_param = {param: name for name, param in self.named.items()}
        before = self.optimizer
        groups = [{**g, "params": [self.shadows[by_param[one]] for one in g["params"]]} for g in before.param_groups]
        self.optimizer = self.case.made(groups)
        for param, state in before.state.items():
            shadow = self.shadows[by_param[param]]
            self.optimizer.state[shadow] = {
                key: value if key == "step" else local(value).to(shadow.dtype, copy=True)
                for key, value in state.items()
            }
        if self.case.host:
            fused = self.case.optimizer != "sgd-momentum" or self.case.dtype != "bf16"  # there torch's trains nothing
            empty = [{**group, "params": [], "fused": fused, "foreach": None} for group in self.optimizer.param_groups]
            self.of_host = self.case.made(empty)
        rates, scheduled = [group["lr"] for group in before.param_groups], self.schedulers[0].state_dict()
        self.schedulers = [schedule(self.optimizer)]
        self.schedulers[0].load_state_dict(scheduled)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def divide(self) -> None:
        """Let the CPU have what it updates in the other run."""
        if self.of_host is None:
            return
        hosted = self.which()
        for own, others in zip(self.optimizer.param_groups, self.of_host.param_groups, strict=True):
            others |= {key: value for key, value in own.items() if key not in ("params", "fused", "foreach")}
            names = [
                name for name, one in self.shadows.items() if any(one is p for p in own["params"] + others["params"])
            ]
            for name in names:
                self._move(name, own, others, name in hosted)

    def _move(self, name: str, own: dict[str, Any], others: dict[str, Any], to_host: bool) -> None:
        old = self.shadows[name]
        begin, end = (own, others) if to_host else (others, own)
        if not any(old is one for one in begin["params"]):
            return
        device = torch.device("cpu") if to_host else self.device
        begin["params"] = [one for one in begin["params"] if one is not old]
        new = self.shadows[name] = nn.Parameter(old.detach().to(device))
        end["params"].append(new)
        states = [self.optimizer.state, self.of_host.state]  # type: ignore[union-attr]
        before, after = states if to_host else states[::-1]
        if old in before:
            after[new] = {key: value.to(device) for key, value in before.pop(old).items()}

    def remove(self) -> None:
        """It never had any."""

    def attach_again(self) -> None:
        self.sleep()

    def live_state(self, name: str) -> dict[str, Any]:
        shadow = self.shadows.get(name, self.named[name])
        return next((one.state[shadow] for one in self.optimizers() if shadow in one.state), {})

    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer] if self.of_host is None else [self.optimizer, self.of_host]

    def update(self, closure: Callable[[], Tensor] | None = None) -> Any:
        if not self.shadows:
            return super().update(closure)
        loss = closure() if closure is not None else None
        self.divide()
        for name, shadow in self.shadows.items():
            param = self.named[name]
            if self.case.masters == "none":
                shadow.data.copy_(local(param.detach()))  # somebody may have written it
            grad = param.grad
            shadow.grad = None if grad is None else local(grad).to(shadow.device, shadow.dtype, copy=True)
        for one in self.optimizers():
            one.step()
        for name, shadow in self.shadows.items():
            if shadow.grad is not None:
                low = local(self.named[name].detach())
                new = rounded(self.case.masters, shadow.detach(), low.dtype) if low.dtype != shadow.dtype else shadow
                low.copy_(new.detach())
        return loss

    def scaled(self) -> Optimizer:
        return _Scaled(self) if self.shadows else self.optimizer

    def clear(self, *, set_to_none: bool = True) -> None:
        for param in self.params if self.shadows else ():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()
        super().clear(set_to_none=set_to_none)

    def state_of(self, name: str) -> dict[str, Any]:
        if not self.shadows:
            return super().state_of(name)
        shadow = self.shadows[name]
        found = dict(self.live_state(name))
        if found and shadow.dtype != self.named[name].dtype:
            found["master_param"] = shadow.detach()
        return found

    def synchronize(self) -> None:
        """Nothing runs on."""

    def phase(self, *names: str) -> None:
        """There is none."""

    def sleep(self) -> None:
        """It stays awake; what an evaluation has left gathered is let go, as by a sleep."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def copy(self) -> dict[str, Any]:
        states = {name: copy.deepcopy(self.live_state(name)) for name in self.shadows}
        shadows = {name: one.detach().clone() for name, one in self.shadows.items()}
        return super().copy() | {"shadows": shadows, "states": states}

    def restore(self, saved: dict[str, Any]) -> None:
        if not self.shadows:
            super().restore(saved)
            for one, state in zip(self.optimizers(), copy.deepcopy(saved["optimizers"]), strict=True):
                own = {number: values for number, values in state["state"].items() if isinstance(number, int)}
                one.state |= {params_of(one)[number]: values for number, values in own.items()}  # torch's load rounds
            return
        self.model.load_state_dict(saved["model"])
        for one in self.optimizers():
            one.state.clear()
            for group, other in zip(one.param_groups, saved["optimizers"][0]["param_groups"], strict=True):
                group |= {key: value for key, value in other.items() if key not in ("params", "fused", "foreach")}
        for name, shadow in self.shadows.items():
            shadow.data.copy_(saved["shadows"][name])
            owner = next(o for o in self.optimizers() if any(shadow is p for g in o.param_groups for p in g["params"]))
            if saved["states"][name]:
                owner.state[shadow] = copy.deepcopy(saved["states"][name])

    def save(self, folder: Path) -> None:
        self.kept[str(folder)] = self.copy()

    save_asynchronously = save

    def resume(self, folder: Path) -> None:
        self.restore(self.kept.pop(str(folder)))
        self.model.zero_grad()  # new objects have no gradients


class _Scaled(torch.optim.SGD):
    """Has the gradients of the parameters, for a GradScaler, and updates what the twin updates."""

    def __init__(self, twin: Twin) -> None:
        super().__init__(twin.params, lr=0.0)
        self.twin = twin

    def step(self, closure: Any = None) -> Any:
        return self.twin.update(closure)


def clip_by(
    limit: float,
    params: list[nn.Parameter],
    optimizer: Optimizer | None = None,
    *,
    norm_type: float = 2.0,
    together: bool = True,
    **options: Any,
) -> float:
    """Return the norm. Torch's takes DTensors of one mesh; with several it is put together, as torchtitan does.

    With ``optimizer``, ours clips, which has these bits for any meshes, and lets updates run ahead.
    """
    of_mesh: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        of_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
    if together and optimizer is not None:
        return whole(clip_grad_norm_(optimizer, limit, norm_type, **options)).item()
    if together and len(of_mesh) == 1:
        return whole(nn.utils.clip_grad_norm_(params, limit, norm_type, **options)).item()
    grads = [[param.grad for param in one if param.grad is not None] for one in of_mesh.values()]
    norms = [whole(nn.utils.get_total_norm(one, norm_type, **options)) for one in grads if one]
    parts = torch.stack(norms)
    norm = parts.amax() if norm_type == float("inf") else (parts**norm_type).sum() ** (1.0 / norm_type)
    options.pop("error_if_nonfinite", None)
    for one in of_mesh.values():
        nn.utils.clip_grads_with_norm_(one, limit, norm, **options)
    return norm.item()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _collectives() -> int:
    """How many there have been, on all process groups."""
    return sum(group._get_sequence_number_for_group() for group in distributed_c10d._world.pg_map)


def schedule(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 5)


def compare(case: Case, device: torch.device, habits: dict[str, Callable[[Loop, int], None]]) -> list[str]:
    """Train both; what is not the same, by name, and after which step, and what is not where it lives."""
    never_stops = mock.patch.multiple(speculation, STOPS_ABOVE=1.0, GOES_ON_BELOW=1.0)  # whatever a habit takes back
    with never_stops, warnings.catch_warnings(), dropped_is_spoilt(), pytest.MonkeyPatch.context() as patch:
        # A step that is left out is none of a scheduler's business here.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad", category=UserWarning)
        patch.setattr(Loop, "waits", Waits(patch), raising=False)
        of_small_pieces(patch)
        return _compare(case, device, habits)


def _compare(case: Case, device: torch.device, habits: dict[str, Callable[[Loop, int], None]]) -> list[str]:
    loop = Loop(case, device)
    runs = (loop, Twin(case, device, loop.hosted))
    folder = _shared_folder()
    try:
        for at in range(0 if case.attached == "first" else 2):
            for run in runs:
                run.backward(at)
                run.optimizer.step()
                run.clear()
        for run in runs:
            if case.attached == "behind a look":
                run.look()  # the root stays gathered, until somebody attaches
            run.attach()
        for at, habit in enumerate(case.program):
            for run in runs:
                _one_step(run, at + 3, habits[habit], folder)
            if case.looks == "each" or at == len(case.program) - 1:
                problems = different(*(run.everything() for run in runs))
                problems += _misplaced(loop)
                if case.save in ("none", "memory") and case.masters == "none" and not case.host:
                    problems += [] if runs[0].orders() == runs[1].orders() else ["orders"]
                problems = _of_all_ranks(problems, loop)
                if problems:
                    return [f"after step {at} ({habit}): {', '.join(problems[:6])}"]
    finally:
        loop.finish_saving()
        if case.deltas and is_offloaded(loop.optimizer):
            seen["taken back"] += engine_of(loop.optimizer).speculation.rolled_back
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder)
    return []


def _misplaced(loop: Loop) -> list[str]:
    """List what is not where the policy says, or takes more of the device than it says."""
    case, engine = loop.case, engine_of(loop.optimizer)
    try:
        assert_at_home(loop.optimizer)
    except AssertionError as error:
        return [str(error)]
    if engine.layouts.capabilities.moves_whole and any(bucket.state.block for bucket in engine.core.buckets):
        return ["state that moves as a whole is still on the device"]
    if case.parameters:
        return not_at_home(loop.model, loop.optimizer)
    # A range that may not be cut is never less.
    taken = sum(max(0, pool.made - pool.beyond) * pool.nbytes for pool in engine.core.cache.pools)
    largest = max((bucket.state.nbytes for bucket in engine.plan.buckets), default=0)
    fits = case.device_bytes == "auto" or "whole" in case.made.traits or taken <= max(SMALL_BYTES, largest)
    return [] if fits else [f"{taken} bytes of the device are taken"]


def _one_step(run: Loop, at: int, habit: Callable[[Loop, int], None], folder: Path) -> None:
    case, run.steps = run.case, at
    before = _collectives()
    if case.phases == "within":  # the call sites of Megatron's loop
        run.phase("offload")
        with torch.no_grad():
            run.seen.append(run.model(run.batch(10 * at + 9)).item())
        run.phase("release")
    if case.phases == "own":  # of each rank: no collective is in them
        run.phase(*PHASES[: (rank() + at) % 4])
    torch.manual_seed(at)
    habit(run, at)
    run.random = random_state(run.device)
    run.follow()
    if case.phases == "own":
        run.phase(*PHASES[rank() % 3 :])
    if case.phases == "between" and at % 2:
        run.phase("offload", "release", *(["reload"] if at % 4 == 1 else []))
    if case.save != "async":  # whose writer has some of its own, whenever it comes to them
        run.seen.append(_collectives() - before)
    if case.sleep and at in (5, 7):
        run.sleep()
    if case.save == "memory" and at in (4, 7):
        run.kept["saved"] = run.copy()
    if case.save == "memory" and at in (6, 8):
        run.restore(run.kept["saved"])
    if case.save == "sync" and at == 5:
        run.save(folder / "saved")
        run.resume(folder / "saved")
    if case.save == "async" and at == 5:
        run.save_asynchronously(folder / "saved")
    if case.save == "async" and at == 7:
        run.resume(folder / "saved")


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    if one.keys() != other.keys():
        return [f"only in one of them: {sorted(one.keys() ^ other.keys())[:6]}"]
    return [name for name in one if not same_value(one[name], other[name])]


def _of_all_ranks(problems: list[str], loop: Loop) -> list[str]:
    """They leave a case together, and have taken back the same steps, although each has other gradients."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return problems
    decided = engine_of(loop.optimizer).speculation
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (problems, (decided.committed, decided.rolled_back)))
    found = [f"rank {rank}: {problem}" for rank, (of_rank, _) in enumerate(gathered) for problem in of_rank]
    decisions = [counts for _, counts in gathered]
    return found if len({*decisions}) == 1 else [*found, f"ranks have decided otherwise: {decisions}"]


def _shared_folder() -> Path:
    names = [tempfile.mkdtemp()] if not dist.is_initialized() or dist.get_rank() == 0 else [""]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return Path(names[0])
