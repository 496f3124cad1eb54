"""Whether an optimizer that no table knows updates each parameter independently of the others.

Nothing that its step writes for one parameter may depend on another's values; nor on how many parameters a step has,
or how often it is called. On scratch parameters (:mod:`scratch`):

1. a few steps are traced (:mod:`dependence`), which finds a mixture whatever the numbers are and names its line;
2. the same steps are made whole and in buckets of one parameter each, and have to leave the same bits, the same
   attributes and the same generators of random numbers: for what comes past the dispatcher, and for what counts;
3. where Python looks at values, one parameter's gradient is changed by orders of magnitude, which no other may notice.
"""

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..state.layout import leaves_of
from ..torch_compat.dtensor import compute_device
from .dependence import DependenceTrace, Mixture
from .scratch import (
    Scratch,
    constructed_like,
    instance_attributes_of,
    is_counter,
    like_optimizer,
    random_states,
    random_values,
    randomness_kept,
    restore_random_states,
    scratch_params,
    some_groups_of,
    takes_fractions,
    untouched,
)

_STEPS = 12
_JUMPS = (99, 2_519, 9_999, 65_535)
"""Counters of steps are set to these, as some classes begin something after a warm-up or do it every so often: 2,520 is
a multiple of all numbers to 10 and of many above, 65,536 of the powers of two."""


@dataclass(frozen=True)
class Verdict:
    """Findings about a class with these groups.

    Attributes:
        problem: why its step cannot be divided by parameter; empty if it can.
        all_groups: a bucket's step has to see all param groups, those without parameters in it empty.
        draws: its step draws random numbers, so that parameters have to come in the order of a plain step.
    """

    problem: str = ""
    all_groups: bool = False
    draws: bool = False


class _NotSeparableError(Exception):
    """The text is the reason."""


def judge(cls: type[Optimizer], optimizer: Optimizer) -> Verdict:
    """Try whether the step of ``optimizer``, of class ``cls``, can be made in buckets. Leaves no trace in it.

    Compiled functions run eagerly here: what flows where does not depend on that.
    """
    device = next((compute_device(p) for group in optimizer.param_groups for p in group["params"]), None)
    if device is None:
        return Verdict()
    with (
        randomness_kept(device),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        untouched(optimizer) as seen,
    ):
        try:
            verdict = _Trial(cls, some_groups_of(cls, optimizer), device).verdict()
        except _NotSeparableError as reason:
            verdict = Verdict(str(reason))
    return Verdict(f"its step reaches {seen[0]} by another way than the parameters it has") if seen else verdict


class _Trial:
    """The scratch steps of one optimizer."""

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer, device: torch.device) -> None:
        self._cls = cls
        self._optimizer = optimizer
        self._device = device
        self._random = random_states(device)
        self._construct = False
        self._all_groups = False
        self._opaque = False
        dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
        self._narrow = torch.float16 in dtypes

    def verdict(self) -> Verdict:
        self._find_a_start()
        trace = self._trace()
        draws = self._has_drawn()
        if trace is None or trace.reads or self._opaque:
            self._perturb([] if trace is None else trace.reads)
        self._compare_divided()
        self._without_gradients()
        self._differentiate()
        return Verdict("", self._all_groups, draws)

    # Beginning -------------------------------------------------------------------------------------------------------

    def _start(self) -> Scratch:
        """Make the scratch optimizer, the same every time, and with the same random numbers from here on."""
        restore_random_states(self._device, self._random)
        params, known = scratch_params(self._optimizer, torch.Generator(self._device).manual_seed(0))
        if self._construct:
            return constructed_like(self._cls, self._optimizer, params)
        return like_optimizer(self._cls, self._optimizer, params, known)

    def _find_a_start(self) -> None:
        """Find out whether the class needs its constructor, which may make the state of its parameters."""
        problem = self._problem_of_a_step()
        if problem is None:
            return
        self._construct = True
        if self._problem_of_a_step() is not None:
            message = f"its step fails on scratch tensors ({type(problem).__name__}: {problem})"
            raise _NotSeparableError(message) from problem

    def _problem_of_a_step(self) -> Exception | None:
        try:
            scratch = self._start()
            self._give_gradients(scratch, 0)
            scratch.step_whole()
        except Exception as error:  # noqa: BLE001  # whatever a foreign step raises is the answer
            return error
        return None

    def _give_gradients(
        self,
        scratch: Scratch,
        step: int,
        scale: float = 1.0,
        *,
        without: Callable[[Scratch], Sequence[Tensor]] | None = None,
    ) -> None:
        """Give every parameter its gradient of this step, but for those that ``without`` names."""
        generator = torch.Generator(self._device).manual_seed(1 + step)
        for param in scratch.flat:
            grad = random_values(torch.empty_like(param), generator)
            param.grad = grad.mul_(scale) if takes_fractions(param) else grad
        for param in () if without is None else without(scratch):
            param.grad = None

    # Traced ----------------------------------------------------------------------------------------------------------

    def _trace(self) -> DependenceTrace | None:
        """Steps under a trace, after each of which everything written has to come from its own parameter alone.

        Returns:
            What was seen on the way; ``None`` where the class does not run under a trace.
        """
        scratch, trace = self._start(), DependenceTrace()
        self._traced = scratch
        layouts: dict[tuple[int, str], Any] = {}
        moved = False
        for step in self._steps_of(scratch, _STEPS):
            self._give_gradients(scratch, step)
            before = [param.detach().clone() for param in scratch.flat]
            for number, param in enumerate(scratch.flat):
                trace.mark(param, number)
                trace.mark(param.grad, number)  # type: ignore[arg-type]
            try:
                with trace:
                    scratch.step_whole()
            except Exception:  # noqa: BLE001  # it runs without a trace, as was seen: some things cannot be traced
                if step < _STEPS:
                    return None
                break
            for param, old in zip(scratch.flat, before, strict=True):
                changed = not _same_bits(param, old)
                moved |= changed
                self._opaque |= changed and not trace.was_written(param)
            _check_origins(scratch, trace)
            _check_layouts(scratch, layouts)
            trace.forget_all_but(scratch.tensors())
        if not moved and not any(scratch.states.values()):
            raise _NotSeparableError(
                "its step has changed none of the scratch parameters, so what it does to yours cannot be seen"
            )
        _check_bare(scratch)
        self._check_aliases(scratch)
        return trace

    def _steps_of(self, scratch: Scratch, count: int) -> Iterator[int]:
        """Numbers of steps to make; between the last ones, counters jump ahead."""
        before: dict[_Place, float] = {}
        for step in range(count):
            before = _numbers_in(scratch)
            yield step
        counters = [place for place, value in _numbers_in(scratch).items() if before.get(place) == value - 1 < 1e9]
        for jump in _JUMPS:
            _advance(scratch, counters, jump)
            yield from (jump, jump + 1)

    def _has_drawn(self) -> bool:
        """Return whether the traced steps have moved any generator since they began."""
        now = random_states(self._device)
        moved = [self._traced.generators, self._start().generators]
        return not _same(now, self._random) or not all(map(_same, *moved))

    def _check_aliases(self, scratch: Scratch) -> None:
        """Two names for one tensor would become two homes, and what is written to one would not show in the other."""
        owners = {_address(param): (number, "the parameter") for number, param in enumerate(scratch.flat)}
        gradients = {_address(param.grad) for param in scratch.flat if param.grad is not None} - {0}
        shared: dict[tuple[int, str], tuple[int, str]] = {}
        for number, name, leaves in _state_leaves(scratch):
            for address in filter(None, map(_address, leaves)):
                if address in gradients:
                    raise _NotSeparableError(f"its state {name!r} is a gradient itself, which training writes into")
                if address in owners:
                    shared[number, name] = owners[address]
                owners.setdefault(address, (number, f"its state {name!r}"))
        before = {(number, name): _bits(leaves) for number, name, leaves in _state_leaves(scratch)}
        self._give_gradients(scratch, 1)
        try:
            scratch.step_whole()
        except Exception:  # noqa: BLE001  # counters have jumped
            return
        for number, name, leaves in _state_leaves(scratch):
            if (number, name) in shared and before.get((number, name)) != _bits(leaves):
                whose, what = shared[number, name]
                raise _NotSeparableError(
                    f"its state {name!r} shares memory with {what}{'' if whose == number else ' of another one'}"
                )

    # In buckets ------------------------------------------------------------------------------------------------------

    def _compare_divided(self) -> None:
        """Compare steps whole with the same steps divided, for gradients of several sizes, each from the start."""
        scales = (1.0, 1e-2, 1e2) if self._narrow else (1.0, 1e-4, 1e6)
        problem = self._difference(scales[0])
        if problem:
            self._all_groups = True
            if len(self._optimizer.param_groups) < 2 or self._difference(scales[0]):
                raise _NotSeparableError(problem)
        for scale in scales[1:]:
            problem = self._difference(scale, steps=3, jump=False)
            if problem:
                raise _NotSeparableError(problem)

    def _difference(self, scale: float, steps: int = _STEPS, *, jump: bool = True) -> str:
        """Say what differs between whole and divided after some steps; empty if nothing does."""
        whole = self._start()
        seen: list[tuple[list[Any], dict[str, Any]]] = []
        for step in self._steps_of(whole, steps) if jump else range(steps):
            self._give_gradients(whole, step, scale)
            try:
                whole.step_whole()
            except Exception:  # noqa: BLE001  # plain training would fail as well
                break
            seen.append((_bits_of(whole), random_states(self._device)))
        divided = self._start()
        for number, step in enumerate(self._steps_of(divided, steps) if jump else range(steps)):
            if number == len(seen):
                break
            self._give_gradients(divided, step, scale)
            try:
                divided.step_divided(all_groups=self._all_groups)
            except Exception as error:  # noqa: BLE001  # likewise
                return f"its step fails when parameters are updated one at a time ({type(error).__name__}: {error})"
            bits, random_after = seen[number]
            for library, state in random_states(self._device).items():
                if not _same(state, random_after.get(library)):
                    return f"its step draws numbers from {library} for each call, and not for each parameter"
            if _bits_of(divided) != bits:
                return "updating its parameters one at a time gives another result than updating them together"
        place = _difference_of(whole, divided)
        return f"its step counts in place, in {place}, how often it is called" if place else ""

    def _without_gradients(self) -> None:
        """A parameter without a gradient is in no bucket: nothing may happen to it, now or later. Nor to its group."""
        plans = [_every_second, _every_second, _last_group, _nobody, _nobody]
        whole = self._start()
        seen: list[list[Tensor]] = []
        for step, without in enumerate(plans):
            self._give_gradients(whole, step, without=without)
            try:
                whole.step_whole()
            except Exception:  # noqa: BLE001  # it wants gradients for all: its user has them
                return
            seen.append([param.detach().clone() for param in whole.flat])
        divided = self._start()
        for step, (without, expected) in enumerate(zip(plans, seen, strict=True)):
            self._give_gradients(divided, step, without=without)
            try:
                divided.step_divided(all_groups=self._all_groups)
            except Exception as error:  # likewise
                message = f"its step fails where a group has no gradient ({type(error).__name__}: {error})"
                raise _NotSeparableError(message) from error
            if not all(map(_same_bits, divided.flat, expected)):
                raise _NotSeparableError("its step also changes parameters that have no gradient, or their state")
        place = _difference_of(whole, divided)
        if place:
            raise _NotSeparableError(f"{place} ends elsewhere where a group has no gradient")

    def _perturb(self, reads: Sequence[Mixture]) -> None:
        """Change an element of some parameters' gradients, and see whether what is written for the others changes.

        Parameters are changed in sets: those whose number has a certain bit, and those that have it not. Of any two
        parameters each is in a set without the other, so that few sets see what each one does to every other.
        """
        places = ", ".join(dict.fromkeys(map(str, reads[:3])))
        seen_at = f" (values are read on the host: {places})" if places else ""
        ordinary = [1e3 if self._narrow else 1e12, 0.0, math.inf, math.nan]
        for scale, factors in ((1.0, ordinary), (1e-30, [1.0])):  # what is below a threshold with tiny gradients
            plain = self._perturbed((), 1.0, scale)
            for numbers in _separating_sets(len(plain or ())):
                for factor in factors:
                    found = self._perturbed(numbers, factor, scale)
                    if found is None:
                        continue  # it refuses such gradients
                    pairs = enumerate(zip(plain or (), found, strict=True))
                    if any(one != other for place, (one, other) in pairs if place not in numbers):
                        raise _NotSeparableError(
                            f"the size of one parameter's gradient changes what it does to other parameters{seen_at}"
                        )
        problem = self._difference(math.nan, steps=2, jump=False)
        if problem:
            raise _NotSeparableError(problem + seen_at)

    def _perturbed(self, numbers: Collection[int], factor: float, scale: float) -> list[Any] | None:
        scratch = self._start()
        try:
            for step in range(2):
                self._give_gradients(scratch, step, scale)
                for number in numbers if step == 0 else ():
                    scratch.flat[number].grad.view(-1)[:1].fill_(factor)  # type: ignore[union-attr]
                scratch.step_whole()
        except Exception:  # noqa: BLE001  # some look for numbers that are not finite
            return None
        return _bits_of(scratch)

    def _differentiate(self) -> None:
        """Give gradients that have a graph, as after ``backward(create_graph=True)``: a step may not go through it.

        Each bucket would do it anew, for its own parameters alone.
        """
        scratch, calls = self._start(), list[object]()
        refuse = partial(_note_call, calls)
        with mock.patch.object(torch.autograd, "grad", refuse), mock.patch.object(torch.autograd, "backward", refuse):
            for step in self._steps_of(scratch, _STEPS):
                self._give_gradients(scratch, step)
                for param in scratch.flat:
                    if takes_fractions(param):
                        param.grad.requires_grad_()  # type: ignore[union-attr]
                try:
                    scratch.step_whole()
                except Exception:  # noqa: BLE001  # it does not take such gradients
                    break
        if calls:
            raise _NotSeparableError("its step differentiates the gradients once more, for all parameters together")


def _note_call(calls: list[object], *args: object, **kwargs: object) -> NoReturn:
    calls.append((args, kwargs))
    raise RuntimeError("a scratch step does not differentiate")


def _separating_sets(count: int) -> list[set[int]]:
    """Sets of the numbers below ``count``; each number is in one of them that lacks any other given one."""
    sets = [
        {number for number in range(count) if (number >> bit & 1) == value}
        for bit in range(max(1, (count - 1).bit_length()))
        for value in (0, 1)
    ]
    return [numbers for numbers in sets if numbers]


def _every_second(scratch: Scratch) -> Sequence[Tensor]:
    return scratch.flat[1::2] or scratch.flat


def _last_group(scratch: Scratch) -> Sequence[Tensor]:
    return scratch.params[-1] if len(scratch.params) > 1 else ()


def _nobody(scratch: Scratch) -> Sequence[Tensor]:
    del scratch
    return ()


def _check_layouts(scratch: Scratch, known: dict[tuple[int, str], Any]) -> None:
    """Refuse state that changes its shape or dtype: its home has been measured once."""
    for number, name, leaves in _state_leaves(scratch):
        layout = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
        before = known.setdefault((number, name), layout)
        if before != layout:
            raise _NotSeparableError(f"its state {name!r} changes from {before} to {layout} between steps")


def _check_origins(scratch: Scratch, trace: DependenceTrace) -> None:
    if trace.mixed_reads:
        raise _NotSeparableError(f"its step looks at a value of several parameters at once: {trace.mixed_reads[0]}")
    for number, param in enumerate(scratch.flat):
        written = [("what is written to a parameter", [param.detach()])]
        for name, value in scratch.states.get(param, {}).items():
            if isinstance(value, Tensor):
                written.append((f"its state {name!r}", leaves_of(value)))
        for what, leaves in written:
            where = trace.foreign_origin(leaves, number)
            if where is not None:
                raise _NotSeparableError(f"{what} depends on other parameters: {where}")


def _check_bare(scratch: Scratch) -> None:
    """Refuse what hangs on a plain state tensor: it does not move with it. Wrapper types say what they are made of."""
    for param in scratch.flat:
        for name, value in scratch.states.get(param, {}).items():
            if type(value) is Tensor and (value.grad is not None or getattr(value, "__dict__", None)):
                what = "a gradient" if value.grad is not None else f"the attribute {next(iter(vars(value)))!r}"
                raise _NotSeparableError(f"it keeps {what} on its state {name!r}, which would not move with it")


# Values of a scratch optimizer ---------------------------------------------------------------------------------------


def _state_leaves(scratch: Scratch) -> Iterator[tuple[int, str, list[Tensor]]]:
    """The tensors of the state: of which parameter, under which name."""
    for number, param in enumerate(scratch.flat):
        for name, value in scratch.states.get(param, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                yield number, name, leaves_of(value)


def _bits_of(scratch: Scratch) -> list[Any]:
    """Take each parameter's bits and those of its state, to be compared."""
    return [
        (
            _bits([param.detach()]),
            [(name, _comparable(value)) for name, value in scratch.states.get(param, {}).items()],
        )
        for param in scratch.flat
    ]


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _bits(leaves_of(value))
    if isinstance(value, list | tuple):
        return [_comparable(one) for one in value]
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items() if not isinstance(key, Tensor)}
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value if isinstance(value, bool | int | float | str) else None


def _bits(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, bytes]]:
    dense = [one if one.layout == torch.strided else one.to_dense() for one in tensors]
    return [
        (one.shape, one.dtype, one.resolve_conj().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        for one in dense
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return _bits([one.detach()]) == _bits([other.detach()])


def _address(tensor: Tensor) -> int:
    """Return where a tensor's elements begin; parts of one allocation may each have a home."""
    return tensor.data_ptr() if tensor.layout == torch.strided and tensor.numel() else 0


_Place = tuple[str, Any, Any]


def _numbers_in(scratch: Scratch) -> dict[_Place, float]:
    """Whole numbers that a step may count in: of parameters, groups and the optimizer."""
    holders: dict[tuple[str, Any], Mapping[str, Any]] = {("object", 0): vars(scratch.values)}
    holders.update({("group", number): group for number, group in enumerate(scratch.values.param_groups)})
    holders.update({("state", number): scratch.states.get(p, {}) for number, p in enumerate(scratch.flat)})
    return {
        (*place, name): float(value)
        for place, holder in holders.items()
        for name, value in holder.items()
        if _is_number(value)
    }


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _advance(scratch: Scratch, counters: Sequence[_Place], to: int) -> None:
    for kind, number, name in counters:
        holder: Any = vars(scratch.values)
        if kind == "group":
            holder = scratch.values.param_groups[number]
        elif kind == "state":
            holder = scratch.states[scratch.flat[number]]
        value = holder[name]
        holder[name] = torch.full_like(value, to) if isinstance(value, Tensor) else type(value)(to)


def _difference_of(one: Scratch, other: Scratch) -> str:
    """Find where attributes or groups of two scratch optimizers are not equal; empty if they are."""
    seen: set[int] = set()
    for number, (a, b) in enumerate(zip(one.values.param_groups, other.values.param_groups, strict=True)):
        place = _difference_in(a, b, f"param_groups[{number}]", seen)
        if place:
            return place
    attributes, others = (instance_attributes_of(scratch.values) for scratch in (one, other))
    for name in attributes.keys() | others.keys():
        place = _difference_in(attributes.get(name), others.get(name), f"optimizer.{name}", seen)
        if place:
            return place
    return ""


def _difference_in(one: Any, other: Any, place: str, seen: set[int]) -> str:
    """Numbers, texts, tensors and generators are compared, however deep; other objects by their attributes."""
    if one is other or id(one) in seen:
        return ""
    if isinstance(one, dict) and isinstance(other, dict):
        seen.add(id(one))
        if any(isinstance(key, Tensor) for key in one):  # by parameter: each has scratch parameters of its own
            pairs: Any = zip(one.values(), other.values(), strict=False)
            found = (_difference_in(a, b, f"{place}[a parameter]", seen) for a, b in pairs)
            return place if len(one) != len(other) else next(filter(None, found), "")
        if one.keys() != other.keys():
            return place
        return next(filter(None, (_difference_in(one[k], other[k], f"{place}[{k!r}]", seen) for k in one)), "")
    if isinstance(one, list | tuple | set | frozenset) or type(one).__name__ == "deque":
        seen.add(id(one))
        if len(one) != len(other):
            return place
        if isinstance(one, set | frozenset):
            return ""
        return next(filter(None, (_difference_in(a, b, place, seen) for a, b in zip(one, other, strict=True))), "")
    if is_counter(one) and not isinstance(one, Tensor) and type(one) is type(other):
        seen.add(id(one))
        return _difference_in(vars(one), vars(other), f"{place} ({type(one).__name__})", seen)
    return "" if _same(one, other) else place


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; objects that hold no numbers of their own are if they are of one type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return len(leaves_of(one)) == len(leaves_of(other)) and _bits(leaves_of(one)) == _bits(leaves_of(other))
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, random.Random):
        return bool(one.getstate() == other.getstate())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, np.random.Generator):
        return _same(one.bit_generator.state, other.bit_generator.state)
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return not isinstance(one, bool | int | str | bytes | tuple) or bool(one == other)
