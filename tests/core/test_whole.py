"""An optimizer that is not in the table moves as a whole: its own plain step, and the bits of plain training."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.checkpoint import ArenaStager, get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_offload.core.engine import Engine, engine_of
from fsdp_offload.torch_compat.homed import is_homed
from tests.async_writers import Waits, copied, loaded, not_the_same
from tests.conformance.axes import Coupled
from tests.distributed.launch import DEVICE_TYPE, spawn
from tests.overlapping import linear_blocks
from tests.parity import attach, host_copy, local, loss_of, offloaded_names


class Own(Optimizer):
    """The beginning of a step of one's own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            group["calls"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, self.state[param], group)
        return loss

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"])


class Replacing(Own):
    """New tensors in each step, one of them in the place of another."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["before"] = state.get("mean", torch.zeros_like(param))
        state["mean"] = state["before"] * 0.9 + param.grad
        param.sub_(state["mean"] + 0.1 * state["before"], alpha=group["lr"])


class Swapping(Own):
    """Two buffers take turns."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["a"], state["b"] = torch.zeros_like(param), torch.ones_like(param)
        state["a"], state["b"] = state["b"], state["a"]
        state["a"].add_(param.grad)
        param.sub_(state["a"] - 0.5 * state["b"], alpha=group["lr"])


class Lazy(Own):
    """More state from the third step on, of another dtype and another shape."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 1:
            state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)
        if state["step"] > 2:
            state.setdefault(
                "wide", torch.zeros(local(param).numel() + 3, dtype=torch.float64, device=param.device)
            ).add_(1)
        scale = 1 + state["wide"].sum().item() if "wide" in state else 1
        param.sub_(state.get("mean", param.grad), alpha=group["lr"] / scale)


class Growing(Own):
    """A tensor that changes its shape in each step."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        seen = state.get("seen", torch.zeros(1, device=param.device))
        state["seen"] = torch.cat([seen, local(param.grad).sum().reshape(1)])
        param.sub_(param.grad, alpha=group["lr"] * (1 + state["seen"].mean().abs().item()))


class Listing(Own):
    """A history in a list, and a tensor that is in it as well."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)
        history = state.setdefault("history", [])
        history.append(param.grad.clone())
        if len(history) == 3:
            history[0] = mean
        param.sub_(sum(history[-3:]) + history[0], alpha=group["lr"] / 10)  # type: ignore[arg-type]


class Holding(Own):
    """Keeps its state once more, in an attribute: from the second step on as the first one made it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.last: dict[Tensor, Tensor] = {}

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)
        if group["calls"] > 1:
            self.last.setdefault(param, state["mean"]).mul_(0.5)
        param.sub_(state["mean"], alpha=group["lr"])


class Factors(Own):
    """Statistics of rows and columns, and their inverse roots now and then, as Shampoo has them."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = local(param.grad).reshape(len(local(param)), -1)
        if not state:
            state["step"] = torch.zeros(())
            state["rows"], state["columns"] = (torch.eye(size, device=grad.device) for size in grad.shape)
            state["root"] = torch.eye(len(grad), device=grad.device)
        state["step"] += 1
        state["rows"].add_(grad @ grad.T)
        state["columns"].add_(grad.T @ grad)
        if state["step"] % 2 == 0 and len(grad):
            values, vectors = torch.linalg.eigh(state["rows"])
            state["root"] = vectors @ torch.diag(values.clamp(min=1e-3) ** -0.5) @ vectors.T
        local(param).sub_(
            (state["root"] @ grad @ state["columns"].diag().rsqrt().diag()).view_as(local(param)), alpha=group["lr"]
        )


class Nesting(AdamW):
    """Subclasses inherit no row of the table."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.state["own"] = {"count": self.state["own"].get("count", 0) + 1}  # type: ignore[index]
        return super().step(closure)


def trained(params: Any) -> list[Tensor]:
    return [param for param in params if param.requires_grad]


CLASSES: dict[str, Callable[[Any], Optimizer]] = {
    "LBFGS": lambda params: LBFGS(trained(params), lr=0.1, max_iter=3, history_size=2),
    "strong Wolfe": lambda params: LBFGS(trained(params), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
    "coupled": partial(Coupled, lr=0.05),
    "replacing": Replacing,
    "swapping": Swapping,
    "lazy": Lazy,
    "growing": Growing,
    "listing": Listing,
    "holding": Holding,
    "factors": Factors,
    "nesting": lambda params: Nesting(params, lr=0.05, foreach=True),
    "SGD without state": type("Plain", (SGD,), {}),
}
POLICIES = {
    "state": OffloadPolicy(bucket_bytes=1024),
    "all": OffloadPolicy(parameters=True, bucket_bytes=1024, device_bytes=3000),
    "spare": OffloadPolicy(parameters=True, snapshot_bytes=1 << 20),
}


class Side:
    """A model in training; ``policy`` is ``None`` for the plain one."""

    def __init__(self, mesh: DeviceMesh, make: Callable[[Any], Optimizer], policy: OffloadPolicy | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 6, bias=False))
        self.model[2].bias.requires_grad_(False)
        for block in self.model[::2]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = make(self.model.parameters())
        self.policy, self.steps, self.seen = policy, 0, []
        self.device_type = mesh.device_type

    def attach(self) -> "Side":
        if self.policy is not None:
            attach(self.optimizer, model=self.model, policy=self.policy)
            engine = engine_of(self.optimizer)
            assert isinstance(engine, Engine)
            assert engine.layouts.capabilities.moves_whole
        return self

    def loss(self) -> Tensor:
        data = torch.Generator().manual_seed(self.steps)
        x = torch.randn(4, 6, generator=data).to(self.device_type)
        return (self.model(x) - x).square().mean()

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def step(self) -> None:
        if isinstance(self.optimizer, LBFGS):
            loss = self.optimizer.step(self.closure)
        else:
            loss = self.closure()
            self.optimizer.step()
        self.seen.append(loss.detach())
        self.steps += 1

    def train(self, steps: int) -> "Side":
        for _ in range(steps):
            self.step()
        return self

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"loss {number}": loss for number, loss in enumerate(self.seen)}
        for name, param in self.model.named_parameters():
            found[name] = host_copy(param.detach())
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state.get(param, {}).items()}
        groups = [sorted(group.items()) for group in self.optimizer.param_groups]
        return found | {"groups": [entry for group in groups for entry in group if entry[0] != "params"]}


def flat(value: Any) -> list[Any]:
    if isinstance(value, Tensor):
        return [type(value).__name__, host_copy(value)]
    if isinstance(value, dict):
        return [part for key in value for part in (key, *flat(value[key]))]
    if isinstance(value, list | tuple):
        return [len(value), *(part for one in value for part in flat(one))]
    return [value]


def assert_equal(one: Any, other: Any, what: str = "") -> None:
    for a, b in zip(flat(one), flat(other), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, what


def assert_same(plain: Side, ours: Side) -> None:
    one, other = plain.values(), ours.values()
    assert list(one) == list(other)
    for name in one:
        assert_equal(one[name], other[name], f"{name} after {plain.steps} steps")


def both(mesh: DeviceMesh, kind: str, policy: str) -> tuple[Side, Side]:
    return tuple(Side(mesh, CLASSES[kind], one).attach() for one in (None, POLICIES[policy]))  # type: ignore[return-value]


KINDS = pytest.mark.parametrize("kind", CLASSES)
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)


@KINDS
@EVERY_POLICY
def test_bits_are_those_of_plain_training(mesh: DeviceMesh, kind: str, policy: str) -> None:
    """Also with phases between steps; after removal; and where there is state when it is attached."""
    plain, ours = both(mesh, kind, policy)
    for step in range(6):
        if step > 2:
            ours.optimizer.offload_states()
            ours.optimizer.release_states()
        if step == 4:
            ours.optimizer.reload_states()
        assert_same(plain.train(1), ours.train(1))
        if policy == "all":
            assert all(map(is_homed, ours.model.parameters()))
        assert not any(bucket.state.block for bucket in engine_of(ours.optimizer).core.buckets)
    assert engine_of(ours.optimizer).core.cache.nbytes == 0 or policy != "state"
    remove_offload(ours.optimizer)
    assert_same(plain, ours)
    assert_same(plain.train(2), ours.train(2))
    ours.attach()
    assert_same(plain, ours)
    assert_same(plain.train(2), ours.train(2))


# By optimizer: state that has a home, and what is not made of dense tensors of its own, which stays and is told.
WHERE: dict[str, tuple[set[str], set[str]]] = {
    "LBFGS": ({"d", "prev_flat_grad"}, {"old_dirs", "old_stps"}),
    "coupled": ({"velocity"}, set()),
    "replacing": ({"before", "mean"}, set()),
    "swapping": ({"a", "b"}, set()),
    "lazy": ({"mean", "wide"}, set()),
    "growing": ({"seen"}, set()),
    "listing": (set(), {"history", "mean"}),
    "factors": ({"rows", "columns", "root"}, set()),
    "nesting": ({"exp_avg", "exp_avg_sq"}, set()),
}


@pytest.mark.parametrize(("kind", "homes", "left"), [(kind, *names) for kind, names in WHERE.items()], ids=WHERE)
def test_what_lives_on_the_host(mesh: DeviceMesh, kind: str, homes: set[str], left: set[str]) -> None:
    side = Side(mesh, CLASSES[kind], POLICIES["state"]).attach().train(5)
    report = side.optimizer.offload_report()
    assert offloaded_names(side.optimizer) == homes
    assert left <= set(report.left_out)
    assert any("not made of dense tensors of its own" in note for note in report.notes) == bool(left)


@KINDS
@EVERY_POLICY
def test_save_load_and_go_on(mesh: DeviceMesh, kind: str, policy: str) -> None:
    plain, ours = both(mesh, kind, policy)
    saved = []
    for side in (plain, ours):
        empty = copy.deepcopy(side.optimizer.state_dict())
        assert not any(key for key in empty["state"] if isinstance(key, int))
        side.optimizer.load_state_dict(empty)
        side.train(3)
        saved.append(copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict())))
        side.train(2)
    assert_same(plain, ours)
    for fresh in (False, True):
        for number, side in enumerate((plain, ours) if not fresh else both(mesh, kind, policy)):
            if fresh:
                side.steps = 5
            side.model.load_state_dict(copy.deepcopy(saved[number][0]))
            side.optimizer.load_state_dict(copy.deepcopy(saved[number][1]))
            side.seen = []
            side.train(3)
            saved.append(side)
        assert_same(*saved[-2:])


@EVERY_POLICY
def test_state_that_parameters_exchange(mesh: DeviceMesh, policy: str) -> None:
    seen = []
    for one in (None, POLICIES[policy]):
        model = linear_blocks(mesh, 6)
        optimizer = Coupled(model.parameters(), lr=0.05)
        if one is not None:
            attach(optimizer, model=model, policy=one)
        for _ in range(3):
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state, first, last = optimizer.state, model[0].weight, model[2].weight
            state[first], state[last] = state[last], state[first]
        values = [*model.parameters(), *(state[param]["velocity"] for param in model.parameters())]
        seen.append([host_copy(value) for value in values])
    assert all(map(torch.equal, *seen))


class Failing(Own):
    """Fails before, or behind, the first update; notes where the state is that it sees."""

    fails = ""
    seen: ClassVar[set[int]] = set()

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if self.fails == "before":
            raise LookupError("no such table")
        state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)
        self.seen.add(local(state["mean"]).data_ptr())
        param.sub_(state["mean"], alpha=group["lr"])
        if self.fails == "behind":
            raise LookupError("no such table")


def test_a_step_never_sees_what_lives_on_the_host(mesh: DeviceMesh) -> None:
    """Nor tensors, wherever they are, that somebody has put in the place of homes."""
    side = Side(mesh, Failing, POLICIES["state"]).attach().train(2)
    for state in side.optimizer.state.values():
        state["mean"] = state["mean"] * 2
    exchanged = {local(state["mean"]).data_ptr() for state in side.optimizer.state.values()}
    side.optimizer.seen.clear()
    side.train(1)
    assert side.optimizer.seen
    assert not exchanged.intersection(side.optimizer.seen)


@EVERY_POLICY
@pytest.mark.parametrize("steps", [0, 2])
def test_nothing_is_lost_if_a_step_fails_before_it_writes(mesh: DeviceMesh, policy: str, steps: int) -> None:
    sides = [Side(mesh, Failing, one).attach().train(steps) for one in (None, POLICIES[policy])]
    for side in sides:
        side.closure()
        side.optimizer.fails = "before"
        with pytest.raises(LookupError, match="no such table"):
            side.optimizer.step()
        side.optimizer.fails = ""
        side.optimizer.step()
    assert_same(*sides)
    assert_same(*(side.train(2) for side in sides))


@EVERY_POLICY
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_that_fails_half_way_is_refused_until_a_load(mesh: DeviceMesh, policy: str, steps: int) -> None:
    plain, ours = (Side(mesh, Failing, one).attach().train(steps) for one in (None, POLICIES[policy]))
    saved = copy.deepcopy((ours.model.state_dict(), ours.optimizer.state_dict()))
    ours.closure()
    ours.optimizer.fails = "behind"
    with pytest.raises(LookupError, match="no such table"):
        ours.optimizer.step()
    for refused in (ours.optimizer.step, ours.optimizer.state_dict, lambda: remove_offload(ours.optimizer)):
        with pytest.raises(RuntimeError, match=r"LookupError: no such table.*half updated"):
            refused()
    ours.optimizer.fails = ""
    ours.model.load_state_dict(saved[0])
    ours.optimizer.load_state_dict(saved[1])
    assert_same(plain, ours)
    assert_same(plain.train(2), ours.train(2))


@EVERY_POLICY
def test_a_closure_that_fails_costs_nothing(mesh: DeviceMesh, policy: str) -> None:
    def failing() -> Tensor:
        raise LookupError("no data")

    plain, ours = both(mesh, "LBFGS", policy)
    for side in (plain, ours):
        for _ in range(2):
            with pytest.raises(LookupError, match="no data"):
                side.optimizer.step(failing)
            side.train(1)
    assert_same(plain, ours)


def test_state_by_name(mesh: DeviceMesh) -> None:
    plain, ours = both(mesh, "coupled", "all")
    with pytest.raises(ValueError, match="not known before its first step"):
        get_optimizer_state_dict(ours.model, ours.optimizer, for_load=True)
    for side in (plain, ours):
        side.train(3)
    wanted = torchs_state_dict(plain.model, plain.optimizer)
    for other in (get_optimizer_state_dict, torchs_state_dict):
        assert_equal(wanted, other(ours.model, ours.optimizer))
    saved = copy.deepcopy((ours.model.state_dict(), get_optimizer_state_dict(ours.model, ours.optimizer)))
    fresh = both(mesh, "coupled", "all")[1]
    fresh.model.load_state_dict(saved[0])
    set_optimizer_state_dict(fresh.model, fresh.optimizer, saved[1])
    fresh.steps, fresh.seen = 3, ours.seen[:3]
    assert_same(plain.train(2), fresh.train(2))
    made = both(mesh, "coupled", "all")[1]
    torchs_state_dict(made.model, made.optimizer)
    assert get_optimizer_state_dict(made.model, made.optimizer, for_load=True)["state"]


def test_it_is_told_and_modes_that_have_no_effect_are(mesh: DeviceMesh) -> None:
    side = Side(mesh, CLASSES["coupled"], None)
    policy = OffloadPolicy(overlap="iteration")
    with warnings.catch_warnings(record=True, action="always") as told:
        offload_optimizer(side.optimizer, model=side.model, policy=policy)
    messages = [str(one.message) for one in told]
    assert any("overlap='iteration' has no effect on Coupled" in message for message in messages)
    assert any("Coupled is not in the table of optimizers and moves as a whole" in message for message in messages)
    assert not any("NOTHING IS OFFLOADED" in message for message in messages)
    assert offload_optimizer(side.optimizer, model=side.model, policy=policy, exist_ok=True) is side.optimizer
    with pytest.raises(ValueError, match="host_fraction"):
        offload_optimizer(Coupled(side.model.parameters(), lr=0.05), policy=OffloadPolicy(host_fraction=0.5))


def save_and_load_on_ranks(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(DEVICE_TYPE, (world_size,))
    for kind in [*CLASSES][2:]:
        for policy in ("state", "all"):
            test_save_load_and_go_on(mesh, kind, policy)


@pytest.mark.distributed
def test_uneven_shards_on_two_ranks(tmp_path: Path) -> None:
    """Of 7, 5 and 6 rows; a sum over ranks is the optimizer's own affair."""
    spawn(save_and_load_on_ranks, 2, tmp_path)


@EVERY_POLICY
def test_a_closure_may_save_the_model(mesh: DeviceMesh, policy: str) -> None:
    plain, ours = both(mesh, "LBFGS", policy)
    for side in (plain, ours):
        saved: list[Tensor] = []

        def closure(side: Side = side, saved: list[Tensor] = saved) -> Tensor:
            saved += map(host_copy, side.model.state_dict().values())
            return side.closure()

        for _ in range(3):
            side.optimizer.step(closure)
        side.seen = saved
    assert_same(plain, ours)


@pytest.mark.parametrize("kind", ["coupled", "replacing"])
@EVERY_POLICY
def test_a_save_holds_what_was_there_at_the_call(
    mesh: DeviceMesh, tmp_path: Path, waits: Waits, kind: str, policy: str
) -> None:
    plain, ours = both(mesh, kind, policy)
    stager = ArenaStager(ours.optimizer)
    for side in (plain, ours):
        side.train(2)
    state = {
        "model": get_model_state_dict(ours.model),
        "optimizer": get_optimizer_state_dict(ours.model, ours.optimizer),
    }
    expected, writer = copied(state), waits.hold(tmp_path)
    future = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    writer.in_use = True
    for side in (plain, ours):
        side.train(2)
    assert bool(waits.count) == (policy != "spare" or kind == "replacing")  # what changes its name is written at home
    waits.let_go()
    future.result()
    assert not list(not_the_same(expected, loaded(tmp_path, expected)))
    stager.close()
    assert_same(plain, ours)
