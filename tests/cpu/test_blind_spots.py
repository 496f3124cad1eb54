"""Optimizers of one's own, of every kind that a step in buckets would change: each gives the bits of plain training."""

import math
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.parity import Run, Zoo, attach, batch, make_pair, params_of


class Plain(Optimizer):
    """Momentum, one parameter after the other; ``update`` is what a subclass adds to it."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        context = self.before()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    self.without_gradient(param)
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(param)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(param.grad)
                self.update(group, param, state, context)

    def before(self) -> Any: ...

    def without_gradient(self, param: Tensor) -> None: ...

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * group["lr"])

    def trained(self) -> list[Tensor]:
        return [param for param in params_of(self) if param.grad is not None]


class TinyMean(Plain):
    """A mean over all parameters, far below half a unit in the last place of any of them."""

    def before(self) -> None:
        mean = sum(param.grad.mean() for param in self.trained())
        for param in self.trained():
            param.add_(mean * 1e-12)


class BatchesProducts(Plain):
    """One kernel for all matrices of a shape: the same bits here, and others where it is chosen by the batch's size."""

    def before(self) -> dict[Tensor, Tensor]:
        matrices = [param for param in self.trained() if param.shape == (24, 20)]
        if not matrices:
            return {}
        grads = torch.stack([param.grad for param in matrices])
        products = torch.bmm(grads, grads.mT @ grads)
        return dict(zip(matrices, products.unbind(), strict=True))

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(context.get(param, state["momentum"]) * group["lr"])


class OneDrawOfNumpy(Plain):
    def before(self) -> float:
        return 1 + 1e-3 * np.random.random()

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * (group["lr"] * context))


class OneDrawOfItsOwn(OneDrawOfNumpy):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def before(self) -> Tensor:
        return 1 + 1e-30 * torch.rand(1, generator=self.generator)


class MixesGroups(Plain):
    """What one group's parameters do depends on another group's."""

    def before(self) -> None:
        norms = [[p.grad.norm() for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if len(norms) > 1 and all(norms):
            for param in self.param_groups[1]["params"]:
                if param.grad is not None:
                    param.grad.mul_(norms[0][0])


class Helper:
    def __init__(self) -> None:
        self.calls = 0


class CountsInAHelper(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.helper = Helper()

    def before(self) -> None:
        self.helper.calls += 1

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * (group["lr"] / self.helper.calls))


class DecaysAnyway(Plain):
    def without_gradient(self, param: Tensor) -> None:
        param.mul_(0.99)


class CountsAnyway(Plain):
    """Counts steps of a parameter also where it has no gradient."""

    def without_gradient(self, param: Tensor) -> None:
        self.state[param].setdefault("momentum", torch.zeros_like(param))
        self.state[param]["step"] = self.state[param].get("step", 0) + 1

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * (group["lr"] / state["step"]))


class TwoNames(Plain):
    """Two names in the state for one tensor."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        state.setdefault("velocity", state["momentum"])
        param.sub_(state["velocity"] * group["lr"])


class SharesWithTheParameter(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        state.setdefault("weights", param.detach())
        super().update(group, param, state, context)


class HangsAGradientOnItsState(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        state.setdefault("before", torch.zeros_like(param)).grad = param.grad.clone()
        super().update(group, param, state, context)


class HangsANoteOnItsState(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        state["momentum"].largest = state["momentum"].abs().max()
        super().update(group, param, state, context)


class WritesAnothersState(Plain):
    def before(self) -> None:
        first, *others = self.trained()
        for other in others:
            if other.shape == first.shape and "momentum" in self.state[other]:
                self.state[other]["momentum"].copy_(first.grad)


class SkipsTheStep(Plain):
    """If any gradient is not finite, with one look at each parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if all(torch.isfinite(param.grad).all() for param in self.trained()):
            super().step(closure)


class TableOfIds(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.chosen = {id(param) for param in params_of(self)}

    def before(self) -> None:
        chosen = [param.grad for param in self.trained() if id(param) in self.chosen]
        if chosen:
            norm = torch.stack([grad.norm() for grad in chosen]).norm()
            for grad in chosen:
                grad.div_(norm)


class BoundMethod(Plain):
    """Steps through a method that is bound to the real optimizer, whoever's step it is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.run = super().step

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.run(closure)


class GradientAsState(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        state["before"] = param.grad
        super().update(group, param, state, context)


class GrowingHistory(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        norm = param.grad.norm().view(1)
        state["history"] = torch.cat([state["history"], norm])[-5:] if "history" in state else norm.repeat(2)
        super().update(group, param, state, context)


class EstimatesTheHessian(Plain):
    """Goes through the graph of the gradients now and then, for all parameters; each bucket would do it anew."""

    def before(self) -> Any:
        trained = [param for param in self.trained() if param.grad is not None and param.grad.requires_grad]
        if not trained or self.state[trained[0]].get("step", 0) % 10 != 9:
            return
        grads = [param.grad for param in trained]
        with torch.enable_grad():
            products = torch.autograd.grad(grads, trained, grad_outputs=[torch.ones_like(g) for g in grads])  # type: ignore[arg-type]
        for param, product in zip(trained, products, strict=True):
            self.state[param]["hessian"] = product.abs()


class Twins(nn.Module):
    """Several parameters of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(torch.randn(4, 3, 3, 3) for _ in range(2))
        self.matrices = nn.ParameterList(torch.randn(24, 20) for _ in range(3))
        self.vectors = nn.ParameterList(torch.randn(24) for _ in range(3))

    forward = Zoo.forward


def train_apart(run: Run, step: int) -> float:
    """The groups have learning rates of their own from the second step on."""
    if step == 1:
        for number, group in enumerate(run.optimizer.param_groups):
            group["lr"] = 0.05 / (1 + number)
    return seeded(run, step)


def in_two_groups(cls: Callable[..., Optimizer]) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        params = list(params)
        return cls([{"params": params[::2]}, {"params": params[1::2], **({} if cls is LargestRate else {"lr": 0.01})}])

    return make


class HalvesItsRate(Plain):
    def before(self) -> None:
        for group in self.param_groups:
            group["lr"] = group["lr"] / 2
            group["betas"] = (group["betas"][0] * 0.9, 0.5)

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * group["lr"] * group["betas"][0])


class HalvesItsTensorRate(HalvesItsRate):
    """In place: the tensor that a scheduler may hold."""

    def before(self) -> None:
        for group in self.param_groups:
            group["lr"].mul_(0.5)

    update = Plain.update


class ReadsItsOwnNorm(Plain):
    """Looks at values on the host, each parameter at its own."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        norm = state["momentum"].norm().item()
        if norm > 1:
            param.sub_(state["momentum"] * (group["lr"] / norm))
        else:
            param.sub_(state["momentum"] * group["lr"])


class DrawsForEach(Plain):
    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * group["lr"] * torch.rand_like(param) * random.random() * np.random.random())


class StacksNorms(Plain):
    """One tensor for the norms of all, computed with element by element: nothing mixes."""

    def before(self) -> dict[Tensor, Tensor]:
        trained = self.trained()
        norms = torch.stack(torch._foreach_norm([param.grad for param in trained])) if trained else torch.empty(0)
        return dict(zip(trained, norms.add(1e-3).reciprocal().clamp(max=2.0).unbind(), strict=True))

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * context[param] * group["lr"])


class MatricesOnly(Plain):
    """Refuses anything else, as optimizers that orthogonalize do."""

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        if param.dim() != 2:
            raise ValueError("matrices only")
        left, _, right = torch.linalg.svd(state["momentum"], full_matrices=False)
        param.sub_(left @ right * group["lr"])


class StateInTheConstructor(Plain):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        if lr > 1:
            raise ValueError("learning rate above 1")
        super().__init__(params, lr)
        for param in params_of(self):
            self.state[param]["momentum"] = torch.zeros_like(param)
            self.state[param]["step"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["momentum"].mul_(0.9).add_(param.grad)
                    self.state[param]["step"] += 1
                    param.sub_(self.state[param]["momentum"] * group["lr"])


class FlagOfAGroup(Plain):
    """A group without parameters would say something else; a plain step never has one."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.trains = False

    def before(self) -> None:
        self.trains = all(any(p.grad is not None for p in group["params"]) for group in self.param_groups)


class ForeachOnly(Plain):
    """As torch's foreach functions, which refuse an empty list."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                self.state[param].setdefault("momentum", torch.zeros_like(param))
            momenta = [self.state[param]["momentum"] for param in params]
            torch._foreach_mul_(momenta, 0.9)
            torch._foreach_add_(momenta, [param.grad for param in params])
            torch._foreach_add_(params, momenta, alpha=-group["lr"])


class CountsInTheFirstGroup(Plain):
    """One counter for all groups, where some classes keep it."""

    def before(self) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * (group["lr"] / self.param_groups[0]["k"]))


class LargestRate(Plain):
    """All groups are updated with the largest learning rate; equal ones would not tell."""

    def before(self) -> float:
        return max(group["lr"] for group in self.param_groups)

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_(state["momentum"] * context)


class NotedOnParameters(Plain):
    """What is written on a parameter decides what is kept for it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for number, param in enumerate(params_of(self)):
            param.rank = 1 + number % 3  # type: ignore[attr-defined]

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        if param.requires_grad:
            state.setdefault("factors", torch.zeros(param.rank, 4)).add_(1)  # type: ignore[attr-defined]
        super().update(group, param, state, context)


class Whitens(Plain):
    """Decomposes matrices before it writes any parameter; that fails where one is not finite, as plain training."""

    def before(self) -> dict[Tensor, Tensor]:
        matrices = [param for param in self.trained() if param.dim() == 2]
        return {param: torch.linalg.svd(param.grad).U for param in matrices}  # type: ignore[arg-type]

    def update(self, group: dict[str, Any], param: Tensor, state: dict[str, Any], context: Any) -> None:
        param.sub_((context[param] @ param if param in context else state["momentum"]) * group["lr"])


class CountsInEachGroup(Plain):
    def before(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def seeded(run: Run, step: int) -> float:
    """A step of training in which every generator starts alike on both sides, and some gradients are missing."""
    random.seed(step)
    np.random.seed(step)
    run.optimizer.zero_grad()
    loss = run.loss(step)
    loss.backward(create_graph=isinstance(run.optimizer, EstimatesTheHessian))
    first, *_, last = params_of(run.optimizer)
    if step % 4 == 3:
        first.grad = None
    if step == 6 and isinstance(run.optimizer, SkipsTheStep):
        assert last.grad is not None
        last.grad.fill_(math.nan)
    run.optimizer.step()
    return loss.item()


CLASSES: list[type[Plain]] = [
    *(TinyMean, BatchesProducts, OneDrawOfNumpy, OneDrawOfItsOwn, MixesGroups, CountsInAHelper, DecaysAnyway),
    *(CountsAnyway, TwoNames, SharesWithTheParameter, HangsAGradientOnItsState, HangsANoteOnItsState),
    *(WritesAnothersState, SkipsTheStep, TableOfIds, BoundMethod, GradientAsState, GrowingHistory),
    *(EstimatesTheHessian, Plain, ReadsItsOwnNorm, StacksNorms, Whitens, DrawsForEach, StateInTheConstructor),
    *(FlagOfAGroup, ForeachOnly, CountsInTheFirstGroup, CountsInEachGroup, LargestRate, NotedOnParameters),
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("two_groups", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
def test_the_same_bits(cls: type[Plain], *, two_groups: bool) -> None:
    pair = make_pair(Twins, in_two_groups(cls) if two_groups else cls)
    pair.train(11, train_apart)
    pair.assert_trained()
    pair.detach()
    pair.train(2, seeded)


def test_options_that_the_step_writes() -> None:
    pair = make_pair(Twins, lambda params: HalvesItsRate(params, betas=(0.9, 0.99)))
    pair.train(5)


def test_a_rate_that_is_a_tensor_may_be_written_in_the_step() -> None:
    pair = make_pair(Twins, lambda params: HalvesItsTensorRate(params, lr=torch.tensor(0.1)))  # type: ignore[arg-type]
    rate = pair.offloaded.optimizer.param_groups[0]["lr"]
    pair.train(5)
    assert pair.offloaded.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1 / 2**5)


def test_matrices_only() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(12, 30) for _ in range(3))

        forward = Zoo.forward

    pair = make_pair(Model, MatricesOnly)
    pair.train(10)
    pair.assert_trained()


def test_a_constructor_is_not_asked_to_take_what_a_scheduler_has_set() -> None:
    """Adding a group makes layouts anew, under a learning rate that the constructor would refuse."""
    pair = make_pair(Twins, StateInTheConstructor, policy=None)
    for run in pair:
        run.optimizer.param_groups[0]["lr"] = 1.5
        for param in run.model.parameters():
            run.optimizer.state.pop(param)
            run.optimizer.state[param] = {"momentum": torch.zeros_like(param), "step": 0}
    pair.attach()
    pair.train(3)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_layouts_are_learnt_anew_outside_what_the_constructor_accepts(cls: type[Optimizer]) -> None:
    pair = make_pair(Twins, lambda params: cls(params, lr=0.1))
    pair.train(2)
    for run in pair:
        run.optimizer.param_groups[0]["lr"] = -1e-3  # a scheduler may do that
        run.optimizer.param_groups[0]["maximize"] = True
    pair.train(3)


def test_groups_without_any_gradient_count_the_step() -> None:
    pair = make_pair(Twins, in_two_groups(CountsInEachGroup))

    def freeze(run: Run, step: int) -> float:
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        for param in run.optimizer.param_groups[1]["params"]:
            param.grad = None
        run.optimizer.step()
        return loss.item()

    pair.train(2, freeze)
    pair.train(2)
    pair.train(2, freeze)
    assert [group["k"] for group in pair.offloaded.optimizer.param_groups] == [6, 6]


def test_a_group_for_each_of_many_layers() -> None:
    """Learning rates by layer: not all of them are tried, and all of them train."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(3, 4) for _ in range(40))

        forward = Zoo.forward

    def make(params: Any) -> Optimizer:
        return CountsInTheFirstGroup([{"params": [param], "lr": 0.1 / (1 + n)} for n, param in enumerate(params)])

    pair = make_pair(Layers, make)
    pair.train(4)
    pair.assert_trained()


def test_a_parameter_that_is_listed_twice_is_refused() -> None:
    param = nn.Parameter(torch.randn(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([param, param])
    with pytest.raises(ValueError, match="lists a parameter more than once"):
        attach(optimizer)


# Around the step ------------------------------------------------------------------------------------------------------


def test_what_a_user_adds_to_the_state_is_saved_and_loaded() -> None:
    pair = make_pair(Zoo, torch.optim.AdamW)
    pair.train(2)
    for run in pair:
        for param in params_of(run.optimizer)[:3]:
            run.optimizer.state[param]["note"] = torch.arange(3.0)
    pair.train(2)
    for run in pair:
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    pair.train(2)
    state = pair.plain.optimizer.state_dict()
    fresh = make_pair(Zoo, torch.optim.AdamW)
    fresh.each(lambda run: run.optimizer.load_state_dict(state))
    with torch.no_grad():
        for run in fresh:
            for param, trained in zip(run.model.parameters(), pair.plain.model.parameters(), strict=True):
                param.copy_(trained)
    fresh.assert_same()
    fresh.train(2)


def test_a_profiler_sees_the_name_of_the_users_class() -> None:
    pair = make_pair(Zoo, torch.optim.AdamW)
    pair.train(1)
    pair.offloaded.loss(1).backward()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:  # or torch 2.11 warns
        pair.offloaded.optimizer.step()
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#AdamW.step" in names
    assert not any("Offloaded" in name for name in names)


def test_a_pre_hook_may_replace_the_arguments_of_a_step() -> None:
    model = Zoo()
    optimizer = attach(torch.optim.AdamW(model.parameters()))
    model(batch(0, torch.device("cpu"), torch.float32)).backward()
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, lambda: 7.0), kwargs))
    assert optimizer.step() == 7.0
    handle = optimizer.register_step_pre_hook(lambda *_: 1)
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()
    handle.remove()


def test_a_compiled_step_says_that_it_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = Zoo()
    optimizer = attach(torch.optim.AdamW(model.parameters()))
    model(batch(0, torch.device("cpu"), torch.float32)).backward()
    torch.compile(optimizer.step)()
    assert len(re.findall("runs as it is", caplog.text)) == 1
    caplog.clear()
    other = attach(torch.optim.AdamW(model.parameters()))
    other.step()
    assert not caplog.text
