"""Whether an optimizer that no table knows updates each parameter independently of the others.

Nothing that its step writes for one parameter may depend on another's values; nor on how many parameters a step has,
or how often it is called. That is tried on scratch parameters (:mod:`scratch`):

1. operators that mix elements (:mod:`mixing_calls`) have to be called with the same shapes whole and in buckets of one
   parameter each: a batch of several parameters may give the same bits here, and others for other shapes or devices;
2. one parameter's gradient is changed by orders of magnitude, to infinity and to NaN, which no other may notice;
3. the same steps, whole and in buckets, have to leave the same bits, the same attributes and the same generators of
   random numbers.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..state.layout import leaves_of
from ..torch_compat.dtensor import compute_device
from .comparison import bits, difference, plain
from .mixing_calls import Call, MixingCalls
from .scratch import (
    Scratch,
    constructed_like,
    instance_attributes_of,
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

_LinAlgError: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

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
        dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
        self._narrow = torch.float16 in dtypes

    def verdict(self) -> Verdict:
        self._find_a_start()
        draws = self._look()
        self._compare_calls()
        self._compare_divided()
        self._perturb()
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

    # Whole ------------------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Refuse what can be seen on whole steps alone; return whether they draw random numbers."""
        scratch = self._start()
        layouts: dict[tuple[int, str], Any] = {}
        before = plain(scratch.flat)
        for step in self._steps_of(scratch, _STEPS):
            self._give_gradients(scratch, step)
            try:
                scratch.step_whole()
            except Exception:  # noqa: BLE001  # counters have jumped, or plain training would fail as well
                break
            _check_layouts(scratch, layouts)
        now = plain([random_states(self._device), scratch.generators])
        if plain(scratch.flat) == before and not any(scratch.states.values()):
            raise _NotSeparableError(
                "its step has changed none of the scratch parameters, so what it does to yours cannot be seen"
            )
        _check_bare(scratch)
        self._check_aliases(scratch)
        return bool(now != plain([self._random, self._start().generators]))

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
        before = {(number, name): bits(leaves) for number, name, leaves in _state_leaves(scratch)}
        self._give_gradients(scratch, 1)
        try:
            scratch.step_whole()
        except Exception:  # noqa: BLE001  # counters have jumped
            return
        for number, name, leaves in _state_leaves(scratch):
            if (number, name) in shared and before.get((number, name)) != bits(leaves):
                whose, what = shared[number, name]
                raise _NotSeparableError(
                    f"its state {name!r} shares memory with {what}{'' if whose == number else ' of another one'}"
                )

    # In buckets ------------------------------------------------------------------------------------------------------

    def _compare_calls(self) -> None:
        """Refuse operators that get several parameters at once, by the shapes that they get in no bucket."""
        whole = self._calls(Scratch.step_whole)
        left: list[str] = []
        for all_groups in (False, True):
            divided = self._calls(partial(Scratch.step_divided, all_groups=all_groups))
            steps = zip(whole, divided, strict=False)
            left = [line for one, other in steps for call, line in one.items() if call not in other]
            if not left:
                return
        raise _NotSeparableError(f"what it writes to a parameter depends on other parameters: {left[0]}")

    def _calls(self, make_step: Callable[[Scratch], object]) -> list[dict[Call, str]]:
        scratch, of_steps = self._start(), list[dict[Call, str]]()
        for step in self._steps_of(scratch, 3):
            self._give_gradients(scratch, step)
            try:
                with MixingCalls() as calls:
                    make_step(scratch)
            except Exception:  # noqa: BLE001  # some do not run in a mode
                break
            of_steps.append(calls.seen)
        return of_steps

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
            seen.append((_bits_of(whole), plain(random_states(self._device))))
        divided = self._start()
        for number, step in enumerate(self._steps_of(divided, steps) if jump else range(steps)):
            if number == len(seen):
                break
            self._give_gradients(divided, step, scale)
            try:
                divided.step_divided(all_groups=self._all_groups)
            except Exception as error:  # noqa: BLE001  # likewise
                return f"its step fails when parameters are updated one at a time ({type(error).__name__}: {error})"
            expected, random_after = seen[number]
            for library, state in plain(random_states(self._device)).items():
                if state != random_after.get(library):
                    return f"its step draws numbers from {library} for each call, and not for each parameter"
            if _bits_of(divided) != expected:
                return "updating its parameters one at a time gives another result than updating them together"
        place = _difference_of(whole, divided)
        return f"its step counts in place, in {place}, how often it is called" if place else ""

    def _without_gradients(self) -> None:
        """A parameter without a gradient is in no bucket: nothing may happen to it, now or later. Nor to its group."""
        plans = [_every_second, _every_second, _last_group, _nobody, _nobody]
        whole = self._start()
        seen: list[Any] = []
        for step, without in enumerate(plans):
            self._give_gradients(whole, step, without=without)
            try:
                whole.step_whole()
            except Exception:  # noqa: BLE001  # it wants gradients for all: its user has them
                return
            seen.append(plain(whole.flat))
        divided = self._start()
        for step, (without, expected) in enumerate(zip(plans, seen, strict=True)):
            self._give_gradients(divided, step, without=without)
            try:
                divided.step_divided(all_groups=self._all_groups)
            except Exception as error:  # likewise
                message = f"its step fails where a group has no gradient ({type(error).__name__}: {error})"
                raise _NotSeparableError(message) from error
            if plain(divided.flat) != expected:
                raise _NotSeparableError("its step also changes parameters that have no gradient, or their state")
        place = _difference_of(whole, divided)
        if place:
            raise _NotSeparableError(f"{place} ends elsewhere where a group has no gradient")

    def _perturb(self) -> None:
        """Change an element of some parameters' gradients, and see whether what is written for the others changes.

        NaN goes through all sums and products, so it also shows what is rounded away, and is tried in all steps.
        """
        changes = [_Change(factor) for factor in (1e3 if self._narrow else 1e12, 0.0, math.inf)]
        changes.append(_Change(1.0, scale=1e-30))  # what is below a threshold with tiny gradients
        for change in (*changes, _Change(math.nan, in_all_steps=True)):
            expected = list(self._bits_with(change, ()))
            for numbers in _separating_sets(len(self._start().flat)):
                for one, other in zip(expected, self._bits_with(change, numbers), strict=False):
                    if isinstance(one, Exception):
                        break
                    if isinstance(other, Exception):
                        if not isinstance(other, _LinAlgError):  # of its own matrix, whoever else steps
                            self._check_failure(change, numbers, other)
                        break
                    pairs = enumerate(zip(one, other, strict=True))
                    if any(a != b for number, (a, b) in pairs if number not in numbers):
                        raise _NotSeparableError("one parameter's gradient changes what it does to other parameters")
        problem = self._difference(math.nan, steps=2, jump=False)
        if problem:
            raise _NotSeparableError(problem)

    def _changed(self, change: "_Change", numbers: Collection[int]) -> Iterator[Scratch]:
        """A scratch optimizer, each time that it has the gradients of another step."""
        scratch = self._start()
        for step in self._steps_of(scratch, _STEPS) if change.in_all_steps else range(2):
            self._give_gradients(scratch, step, change.scale)
            for param in (scratch.flat[number] for number in numbers if step == 0 or change.in_all_steps):
                if takes_fractions(param):
                    param.grad.view(-1)[:1].fill_(change.factor)  # type: ignore[union-attr]
            yield scratch

    def _bits_with(self, change: "_Change", numbers: Collection[int]) -> Iterator[Any]:
        """The bits after each step, or how it fails: some look for numbers that are not finite."""
        for scratch in self._changed(change, numbers):
            try:
                scratch.step_whole()
            except Exception as error:  # noqa: BLE001
                yield error
                return
            yield _bits_of(scratch)

    def _check_failure(self, change: "_Change", numbers: Collection[int], error: Exception) -> None:
        """A step that fails must not have written more, or less, in buckets: its user may go on from there."""
        left: list[Any] = []
        for make_step in (Scratch.step_whole, partial(Scratch.step_divided, all_groups=self._all_groups)):
            left.append(None)
            for scratch in self._changed(change, numbers):
                try:
                    make_step(scratch)
                except Exception:  # noqa: BLE001
                    left[-1] = plain(scratch.flat)
                    break
        if left[0] != left[1]:
            raise _NotSeparableError(
                f"its step fails with some gradients ({type(error).__name__}: {error}), and has not written the same "
                "by then when parameters are updated one at a time"
            )

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


class _Change(NamedTuple):
    """Of the first element of a gradient."""

    factor: float
    scale: float = 1.0  # of all gradients
    in_all_steps: bool = False


def _separating_sets(count: int) -> list[set[int]]:
    """Sets of the numbers below ``count``, few of them; of any two numbers, each is in one without the other."""
    size = next(size for size in itertools.count() if math.comb(size, size // 2) >= count)
    codes = itertools.islice(itertools.combinations(range(size), size // 2), count)
    places = [set(code) for code in codes]
    sets = [{number for number, code in enumerate(places) if place in code} for place in range(size)]
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
    return [plain([param, scratch.states.get(param, {})]) for param in scratch.flat]


def _address(tensor: Tensor) -> int:
    """Return where a tensor's elements begin; parts of one allocation may each have a home."""
    return tensor.data_ptr() if tensor.layout == torch.strided and tensor.numel() else 0


_Place = tuple[str, Any]


def _holders(scratch: Scratch) -> dict[str, Any]:
    """What a step may count in: the optimizer, its groups, the state of parameters."""
    return {
        "object": vars(scratch.values),
        **{f"group {number}": group for number, group in enumerate(scratch.values.param_groups)},
        **{f"state {number}": scratch.states.get(param, {}) for number, param in enumerate(scratch.flat)},
    }


def _numbers_in(scratch: Scratch) -> dict[_Place, float]:
    return {
        (place, name): float(value)
        for place, holder in _holders(scratch).items()
        for name, value in holder.items()
        if _is_number(value)
    }


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _advance(scratch: Scratch, counters: Sequence[_Place], to: int) -> None:
    holders = _holders(scratch)
    for place, name in counters:
        value = holders[place][name]
        holders[place][name] = torch.full_like(value, to) if isinstance(value, Tensor) else type(value)(to)


def _difference_of(one: Scratch, other: Scratch) -> str:
    """Find where attributes or groups of two scratch optimizers are not equal; empty if they are."""
    return difference(_held_by(one), _held_by(other))


def _held_by(scratch: Scratch) -> dict[str, Any]:
    held = {f"param_groups[{number}]": group for number, group in enumerate(scratch.values.param_groups)}
    held.update((f"optimizer.{name}", value) for name, value in instance_attributes_of(scratch.values).items())
    return {place: plain(value) for place, value in held.items()}
