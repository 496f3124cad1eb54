"""An optimizer that is not in the table moves as a whole: its own plain step, and the bits of plain training.

One that works element by element is an axis of the conformance suite; here others run through it, and fail in it.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer
from fsdp_offload.api import checks
from fsdp_offload.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_offload.device.lanes import DeviceLink
from fsdp_offload.engine.engine import engine_of
from tests.async_writers import not_the_same
from tests.conformance.axes import OPTIMIZERS, Case, Coupled, Made
from tests.conformance.oracle import Loop as Run
from tests.conformance.oracle import compare
from tests.conformance.programs import HABITS
from tests.distributed.launch import run_cases, spawn, this_device
from tests.overlapping import Loop, Net, assert_same_each_step, assert_trained, pair, same
from tests.parity import Matrices, Zoo, attach, local, loss_of, offloaded_names, same_value, take_step


class Own(Optimizer):
    """The beginning of a step of one's own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            group["step"] += 1
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


class Lazy(Own):
    """More state from the third step on, of another shape, and perhaps another dtype."""

    def __init__(self, params: Any, lr: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(params, lr)
        self.dtype = dtype

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 1:
            state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)
        if state["step"] > 2:
            wide = torch.zeros(local(param).numel() + 3, dtype=self.dtype, device=param.device)
            state.setdefault("wide", wide).add_(1)
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

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.last: dict[Tensor, Tensor] = {}

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("mean", torch.zeros_like(param)).add_(param.grad)
        if group["step"] > 1:
            self.last.setdefault(param, state["mean"]).mul_(0.5)
        param.sub_(state["mean"], alpha=group["lr"])


class Keeping(Holding):
    """New tensors in each step, which from the third one on it keeps in an attribute, and halves there in the next."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if param in self.last:
            self.last[param].mul_(0.5)
        state["mean"] = state.get("mean", torch.zeros_like(param)) * 0.9 + param.grad
        if group["step"] > 2:
            self.last[param] = state["mean"]
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


class Sharing(Own):
    """One tensor under two names from the constructor on, with a note on it, and a gradient on state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["mean"] = self.state[param]["velocity"] = torch.zeros_like(param)

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["mean"].mul_(0.9).add_(param.grad)
        state["mean"].largest = state["mean"].abs().max()
        state.setdefault("own", torch.zeros_like(param)).grad = param.grad.clone()
        param.sub_(state["velocity"], alpha=group["lr"])


class Aliasing(Own):
    """State that is the parameter, and its gradient."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("weights", param.detach())
        state["mean"] = state.get("mean", torch.zeros_like(param)) + state.get("before", param.grad)
        state["before"] = param.grad
        param.sub_(state["mean"], alpha=group["lr"])


class Hessian(Own):
    """Goes through the graph of the gradient in every third step."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        if state["count"] % 3 == 0:
            with torch.enable_grad():
                (product,) = torch.autograd.grad(param.grad, param, torch.ones_like(param.grad), retain_graph=True)
            state["mean"] = product.abs()
        param.sub_(param.grad.detach() + state.get("mean", torch.zeros_like(param)), alpha=group["lr"])


class Views(Own):
    """One entry is a view of another."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["both"] = torch.zeros(2, *local(param).shape, device=param.device)
            state["mean"] = state["both"][0]
        state["both"].mul_(0.9)
        state["mean"].add_(local(param.grad))
        local(param).sub_(state["mean"], alpha=group["lr"])


class Held(Own):
    """An attribute holds the tensors of the state, too."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        held: dict[Tensor, Tensor] = vars(self).setdefault("held", {})
        if not state:
            held[param] = state["mean"] = torch.zeros_like(param)
        held[param].mul_(0.9).add_(param.grad)
        param.sub_(state["mean"], alpha=group["lr"])


class Sometimes(Own):
    """A number in the place of a tensor in every second step."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        before = state.get("before", 0.5)
        param.sub_(param.grad + 0.1 * before, alpha=group["lr"])
        state["before"] = param.grad.clone() if isinstance(before, float) else 0.5


class Nesting(AdamW):
    """Subclasses inherit no row of the table."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.state["own"] = {"count": self.state["own"].get("count", 0) + 1}  # type: ignore[index]
        return super().step(closure)


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


class Thin(Own):
    """Keeps what no home can hold: a sparse tensor."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["last"] = local(param.grad).to_sparse()
        super().update(param, state, group)


class Two(NamedTuple):
    one: Tensor
    step: Tensor


class Counting(Own):
    """Counters on the CPU, one of them within a dict, tuples with names, and a size."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["count"], state["inner"] = torch.zeros(()), OrderedDict(step=torch.zeros((), dtype=torch.int64))
            state["two"], state["size"] = Two(torch.zeros_like(param), torch.zeros(())), param.shape
        state["count"] += 1
        state["inner"]["step"] += 1
        state["two"].one.add_(param.grad)
        param.sub_(state["two"].one, alpha=group["lr"])


CLASSES: dict[str, Callable[..., Optimizer]] = {
    "LBFGS": partial(LBFGS, max_iter=3, history_size=2),
    "strong Wolfe": partial(LBFGS, max_iter=4, line_search_fn="strong_wolfe"),
    "lazy, in fp64": partial(Lazy, dtype=torch.float64),
    "nesting": partial(Nesting, foreach=True),
    "SGD without state": type("Plain", (SGD,), {}),
    **{cls.__name__.lower(): cls for cls in (Coupled, Replacing, Lazy, Growing, Listing, Holding, Keeping)},
    **{cls.__name__.lower(): cls for cls in (Factors, Thin, Sharing, Sometimes, Views, Held, Failing, Aliasing)},
}
OPTIMIZERS |= {name: Made(make, {"lr": 0.05}, frozenset({"whole"})) for name, make in CLASSES.items()}
POLICIES: dict[str, dict[str, Any]] = {"state": {}, "spare": {"save": "spare"}}
KINDS = pytest.mark.parametrize("kind", [*CLASSES][:-2])
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)


def wrong(device: torch.device, kind: str, policy: str, *program: str, **more: Any) -> list[str]:
    """What is different after steps of a program; those of LBFGS are closures."""
    if kind in ("LBFGS", "strong Wolfe"):
        program = tuple({"usual": "closure", "reattach": "reattach_in_between"}.get(habit, habit) for habit in program)
    return compare(Case(optimizer=kind, model="frozen", program=program, **{**POLICIES[policy], **more}), device, OWN)


def lone(mesh: DeviceMesh, kind: str, policy: OffloadPolicy | None = None) -> Loop:
    return Loop(mesh, OPTIMIZERS[kind], policy, net=partial(Net, width=16, layers=2))


STATE = OffloadPolicy(bucket_bytes=1024)

# What loops do beside the habits of the conformance suite -------------------------------------------------------------


def exchange(run: Run, at: int) -> None:
    """Parameters exchange their state."""
    HABITS["usual"](run, at)
    state, one, other = run.optimizer.state, run.named["extra.up.weight"], run.named["blocks.1.up.weight"]
    state[one], state[other] = state[other], state[one]


def fail(run: Run, where: str) -> None:
    run.optimizer.fails = where  # type: ignore[attr-defined]
    with pytest.raises(LookupError, match="no such table"):
        run.update()
    run.optimizer.fails = ""  # type: ignore[attr-defined]


def fail_before(run: Run, at: int) -> None:
    """Nothing is lost."""
    run.backward(at)
    fail(run, "before")
    run.step()


def fail_half_way(run: Run, at: int) -> None:
    """Refused until a load; plain training knows no way back."""
    saved, seen = run.copy(), [*run.seen]
    if is_offloaded(run.optimizer):
        run.backward(at)
        fail(run, "behind")
        for refused in (run.update, run.optimizer.state_dict, run.remove):
            with pytest.raises(RuntimeError, match=r"LookupError: no such table.*half updated"):
                refused()
        run.clear()
        run.seen = seen
    run.restore(saved)
    HABITS["usual"](run, at)


def fail_in_closure(run: Run, at: int) -> None:
    def failing() -> Tensor:
        raise LookupError("no data")

    for _ in range(2):
        with pytest.raises(LookupError, match="no data"):
            run.update(failing)
        HABITS["closure"](run, at)


def reattach_in_between(run: Run, at: int) -> None:
    run.remove()
    HABITS["closure"](run, at)
    run.attach_again()


def create_graph(run: Run, at: int) -> None:
    run.model(run.batch(at)).backward(create_graph=True)
    run.step()


def exchange_in_closure(run: Run, at: int) -> None:
    """Each home is read before it is written."""
    run.backward(at)
    names = "extra.up.weight", "blocks.1.up.weight"
    means = [run.live_state(name)["mean"].to(run.named[name].device) for name in names]

    def exchange() -> None:
        for name in names:
            run.live_state(name)["mean"] = means.pop()

    run.update(exchange)  # type: ignore[arg-type]
    run.clear()


def load_itself(run: Run, at: int) -> None:
    """Load what there is, and not a copy."""
    HABITS["usual"](run, at)
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def save_in_closure(run: Run, at: int) -> None:
    def closure() -> Tensor:
        run.seen += [local(value).double().sum().item() for value in run.model.state_dict().values()]
        run.clear()
        run.backward(at)
        return torch.tensor(run.seen[-1])

    run.update(closure)


MORE = (exchange, fail_before, fail_half_way, fail_in_closure, reattach_in_between, save_in_closure)
MORE += (exchange_in_closure, load_itself)
OWN = {**HABITS, **{habit.__name__: habit for habit in MORE}}


@KINDS
@EVERY_POLICY
def test_bits_are_those_of_plain_training(mesh: DeviceMesh, kind: str, policy: str) -> None:
    """Also with phases between steps; after removal; and where there is state when it is attached."""
    program = (*("usual",) * 6, "reattach", "usual", "usual")
    assert not wrong(torch.device(mesh.device_type), kind, policy, *program, phases="between")


@KINDS
def test_save_load_and_go_on(mesh: DeviceMesh, kind: str) -> None:
    more = {"save": "memory", "attached": "late" if kind in ("coupled", "replacing") else "first"}
    assert not wrong(torch.device(mesh.device_type), kind, "state", *("usual",) * 7, **more)


PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "parameters exchange state": ("coupled", ("exchange",) * 3),
    "the first step fails": ("failing", ("fail_before", "usual", "usual")),
    "a step fails": ("failing", ("usual", "usual", "fail_before", "usual", "usual")),
    "the first step fails half-way": ("failing", ("fail_half_way", "usual", "usual")),
    "a step fails half-way": ("failing", ("usual", "usual", "fail_half_way", "usual", "usual")),
    "a closure fails": ("LBFGS", ("fail_in_closure",) * 2),
    "a closure saves the model": ("LBFGS", ("save_in_closure",) * 3),
    "a closure exchanges homes": ("failing", ("usual", "usual", "exchange_in_closure", "usual", "usual")),
    "views are loaded": ("views", ("usual", "load_itself", "usual", "usual")),
    "what is held is loaded": ("held", ("usual", "load_itself", "usual", "usual")),
    "state is the parameter or its gradient": ("aliasing", (*("usual",) * 5, "reattach", "usual")),
}


@pytest.mark.parametrize(("kind", "program"), PROGRAMS.values(), ids=PROGRAMS)
@EVERY_POLICY
def test_programs(mesh: DeviceMesh, kind: str, program: tuple[str, ...], policy: str) -> None:
    assert not wrong(torch.device(mesh.device_type), kind, policy, *program)


# By optimizer: state that has a home, and what is not made of dense tensors of its own, which stays and is told.
WHERE: dict[str, tuple[set[str], set[str]]] = {
    "LBFGS": ({"d", "prev_flat_grad"}, {"old_dirs", "old_stps"}),
    "coupled": ({"velocity"}, set()),
    "replacing": ({"before", "mean"}, set()),
    "lazy": ({"mean", "wide"}, set()),
    "growing": ({"seen"}, set()),
    "listing": (set(), {"history", "mean"}),
    "factors": ({"rows", "columns", "root"}, set()),
    "thin": (set(), {"last"}),
    "nesting": ({"exp_avg", "exp_avg_sq"}, set()),
}


def closure_of(loop: Loop, at: int) -> Tensor:
    loop.optimizer.zero_grad()
    loop.backward(at)
    return torch.tensor(loop.seen[-1])


@pytest.mark.parametrize(("kind", "homes", "left"), [(kind, *names) for kind, names in WHERE.items()], ids=WHERE)
def test_what_lives_on_the_host(mesh: DeviceMesh, kind: str, homes: set[str], left: set[str]) -> None:
    loop = lone(mesh, kind, STATE)
    for at in range(5):
        loop.optimizer.step(partial(closure_of, loop, at))
    report = loop.optimizer.offload_report()  # type: ignore[attr-defined]
    assert offloaded_names(loop.optimizer) == homes
    assert left <= set(report.left_out)
    assert any("not made of dense tensors of its own" in note for note in report.notes) == bool(left)


def test_the_first_state_leaves_the_devices_allocator(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, emptied = lone(mesh, "growing", STATE), list[int]()  # once: activations would not fit what is left there
    monkeypatch.setattr(DeviceLink, "empty_cache", lambda link: emptied.append(loop.schedulers[0].last_epoch))
    loop.train(3)
    assert emptied == [0]


def test_a_step_never_sees_what_lives_on_the_host(mesh: DeviceMesh) -> None:
    """Nor tensors, wherever they are, that somebody has put in the place of homes."""
    loop = lone(mesh, "failing", STATE).train(2)
    for state in loop.optimizer.state.values():
        state["mean"] = state["mean"] * 2
    exchanged = [local(state["mean"]) for state in loop.optimizer.state.values()]
    Failing.seen.clear()
    loop.train(1)
    assert Failing.seen
    assert Failing.seen.isdisjoint(one.data_ptr() for one in exchanged)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_step_through_the_graph_of_the_gradients() -> None:
    plain, loop = pair(None, STATE, Hessian, net=Matrices)
    assert_same_each_step(plain, loop, 7, create_graph)
    loop.remove()
    assert_same_each_step(plain, loop, 3, create_graph)
    assert_trained(plain)


@pytest.mark.parametrize("cls", [Views, Held, Aliasing])
def test_classes_whose_state_shares_memory_train(cls: type[Own]) -> None:
    """Their programs, after a load and after offload is removed, compare what has moved."""
    loop = Loop(None, cls, None, net=Zoo).train(2)
    assert_trained(loop)


@pytest.mark.parametrize("twice", [False, True])
def test_counters_come_to_where_they_have_been(twice: bool) -> None:
    """A meta device stands for a GPU: there, counters by other names than ``step`` come with a plain load."""
    optimizer = attach(Counting(Zoo().parameters()))
    take_step(optimizer, 2)
    engine_of(optimizer).device = torch.device("meta")
    for _ in range(1 + twice):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in (state for param, state in optimizer.state.items() if param.dim()):
        assert [one.device.type for one in (state["count"], state["inner"]["step"], *state["two"])] == (
            ["cpu", "cpu", "meta", "meta"]
        )
        assert (type(state["inner"]), type(state["two"]), type(state["size"])) == (OrderedDict, Two, torch.Size)


@pytest.mark.parametrize("verdict", [None, "mixed", "separable"])
def test_parameters_stay_on_the_device(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, verdict: str | None) -> None:
    """The error names a way to divide the class only if its row says that there is one."""
    monkeypatch.setattr(checks, "row_of", lambda cls: {} if verdict is None else {"verdict": verdict})
    loop = lone(mesh, "replacing").train(2)
    with pytest.raises(ValueError, match=r"Replacing moves as a whole, .*Use parameters=False") as refused:
        offload_optimizer(loop.optimizer, model=loop.model, policy=OffloadPolicy(parameters=True))
    assert ("trust_separable" in str(refused.value)) == (verdict == "separable")
    assert not is_offloaded(loop.optimizer)


def test_state_by_name(mesh: DeviceMesh) -> None:
    plain, loop, fresh = lone(mesh, "coupled"), lone(mesh, "coupled", STATE), lone(mesh, "coupled", STATE)
    with pytest.raises(ValueError, match="not known before its first step"):
        get_optimizer_state_dict(loop.model, loop.optimizer, for_load=True)
    wanted = torchs_state_dict(plain.model, plain.train(3).optimizer)
    loop.train(3)
    for get in (get_optimizer_state_dict, torchs_state_dict):
        state = get(loop.model, loop.optimizer)
        assert not list(not_the_same(wanted, state))
    fresh.model.load_state_dict(copy.deepcopy(loop.model.state_dict()))
    set_optimizer_state_dict(fresh.model, fresh.optimizer, copy.deepcopy(state))
    fresh.schedulers[0].load_state_dict(loop.schedulers[0].state_dict())
    fresh.seen = [*loop.seen]
    assert same(plain.train(2, first=3), fresh.train(2, first=3))
    made = lone(mesh, "coupled", STATE)
    torchs_state_dict(made.model, made.optimizer)
    assert get_optimizer_state_dict(made.model, made.optimizer, for_load=True)["state"]


def test_copies_and_loads_by_name_keep_the_types_of_containers() -> None:
    models = Zoo(), Zoo()
    saving, fresh = (attach(Counting(model.parameters())) for model in models)
    take_step(saving)
    set_optimizer_state_dict(models[1], fresh, get_optimizer_state_dict(models[0], saving, cpu_offload=True))
    assert same_value(saving.state_dict(), fresh.state_dict())


def test_it_is_told_and_modes_that_have_no_effect_are(mesh: DeviceMesh) -> None:
    loop = lone(mesh, "coupled")
    attach = partial(offload_optimizer, loop.optimizer, model=loop.model, policy=OffloadPolicy(overlap="iteration"))
    with warnings.catch_warnings(record=True, action="always") as told:
        attach()
    messages = [str(one.message) for one in told]
    assert any("overlap='iteration' has no effect on Coupled" in message for message in messages)
    assert any("Coupled is not in the table of optimizers and moves as a whole" in message for message in messages)
    assert not any("NOTHING IS OFFLOADED" in message for message in messages)
    assert attach(exist_ok=True) is loop.optimizer
    with pytest.raises(ValueError, match="host_fraction"):
        offload_optimizer(OPTIMIZERS["coupled"](loop.params), policy=OffloadPolicy(host_fraction=0.5))


def run_on_ranks(rank: int, world_size: int) -> None:
    """All but LBFGS, whose searches are not made for shards."""
    train = partial(wrong, this_device(), layout="uneven", save="memory")
    cases = {kind: partial(train, kind, "state", *("usual",) * 7) for kind in [*CLASSES][2:-2]}
    run_cases({**cases, "closures": partial(train, "replacing", "state", *("closure",) * 4)})


@pytest.mark.distributed
def test_uneven_shards_on_two_ranks(tmp_path: Path) -> None:
    """A sum over ranks is the optimizer's own affair."""
    spawn(run_on_ranks, 2, tmp_path)
