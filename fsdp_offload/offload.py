"""What the user holds: :func:`offload_optimizer`, :func:`remove_offload` and :class:`OffloadedOptimizer`."""

import functools
import inspect
import logging
import types
import warnings
import weakref
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .attachment import (
    Attachment,
    attachment_of,
    redirect_captured_step,
    unwrap,
    wrappers_around,
)
from .chain import offload_each
from .checks import (
    check_attachable,
    check_gradients_are_read,
    check_lists,
    check_params,
    check_traits,
    check_types,
    names_by_place,
    names_of_parameters,
    refuse_capture,
)
from .choices import Loop, auto_policy
from .engine import Engine, find_offloaded, inside
from .fsdp import is_called_compiled, largest_local_numel, run_hooked, sharding_groups
from .load import check_loadable
from .optimizers import Traits, traits_for
from .overlap import group_numbers, make_overlap
from .parking import ParkedParameters
from .policy import OffloadPolicy
from .reload_before import tell_if_never_reloaded
from .report import OffloadReport
from .reporting import notes_of, report_of
from .state import OffloadedState, UnwaitedStates
from .update import ENGINE_ATTRIBUTE, UserState
from .wrapped import is_wrapped, optimizers_in
from .wrong_order import (
    check_at_first_forward,
    line_to_write,
    note_if_unsharded,
    refuse_exchanged,
    refuse_foreign,
    warn_if_another_steps,
)

logger = logging.getLogger(__name__)


_Optimizer = TypeVar("_Optimizer", bound=Optimizer)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def offload_optimizer(
    optimizer: _Optimizer,
    *,
    model: nn.Module | None = None,
    policy: OffloadPolicy | Literal["auto"] | None = None,
    loop: Loop = "any",
    exist_ok: bool = False,
) -> _Optimizer:
    """Keep the state of ``optimizer`` in host memory from now on, and stream it through the device in each step.

    In place, like ``fully_shard``: the optimizer stays the same object, an instance of its own class as before and of
    :class:`OffloadedOptimizer`. Results stay the same bit for bit. Call it once the model is sharded and the optimizer
    built, before or after the first step, before or after making LR schedulers. Takes the host memory for all state at
    once. No collective of its own; a class without a table entry is tried on scratch tensors, with whatever its step
    does.

    The tensors in ``optimizer.state`` become tensors over host memory: DTensors with the mesh and placements of theirs
    for sharded parameters. Reading them through ``optimizer.state`` waits until they are up to date; a tensor fetched
    earlier is valid until the next ``step()``.

    Args:
        optimizer: any ``torch.optim`` optimizer except LBFGS and SparseAdam, or another that updates its parameters
            independently of each other. The wrappers of accelerate, Lightning and Fabric are seen through, and so are
            Megatron's optimizers and chains of them: each of torch's in there is offloaded, or none.
        model: the model whose parameters it has. Gives the order of the buckets, names for messages, and more checks.
        policy: sizes of staging, buckets and what stays on the device. ``"auto"`` hides as much as ``loop`` allows,
            measures the first iterations, and keeps on the device what cannot be hidden; the report says what it chose.
        loop: what your training loop promises to ``policy="auto"``. ``"any"``: nothing. ``"synchronizes"``: it calls
            ``synchronize()`` before it touches parameters or gradients between ``step()`` and the next forward.
            ``"no_clipping"``: that, and it neither clips by a global norm nor touches gradients after the backward.
        exist_ok: do nothing where it is offloaded already, for the same model and with the same policy: for code that
            runs once for each fit. Without ``policy``, whatever that is.

    Returns:
        ``optimizer``.

    Raises:
        ValueError: it cannot be offloaded exactly; says why.
        RuntimeError: it is offloaded already, or a CUDA graph is being captured.
        MemoryError: host memory does not suffice.
    """
    if is_wrapped(optimizer):
        each = functools.partial(offload_optimizer, loop=loop, exist_ok=exist_ok)
        offload_each(optimizer, each, remove_offload, model, policy)
        return optimizer
    given = policy
    if policy is None or policy == "auto":
        policy = OffloadPolicy()
    check_types(model, policy)
    *wrappers, target = wrappers_around(optimizer)
    if exist_ok and attachment_of(target) is not None:
        _check_same(target, model, given)
        return optimizer
    check_attachable(target)
    params = [param for group in target.param_groups for param in group["params"]]
    names = names_of_parameters(target, model)
    traits = traits_for(target)
    check_traits(target, traits, policy, names)
    check_lists(target)
    device = check_params(traits, params, names)
    chosen = ""
    if given == "auto":
        policy, chosen = _chosen(traits, params, model, loop)
    elif loop != "any":
        raise ValueError(f"offload_optimizer: loop={loop!r} is a promise to policy='auto'; got policy={given!r}")
    if policy.pin_memory and device.type == "cpu":
        raise ValueError(
            "offload_optimizer: pin_memory=True needs an accelerator, and the parameters are on the CPU. Leave it "
            "None, which pins where that is of use."
        )
    together = group_numbers(model, policy)
    engine = Engine(type(target), traits, policy, device, names, together)
    engine.tuning_of_policy = chosen
    states = OffloadedState(engine, target.state)
    # A frozen parameter gets room when it first has a gradient: reserving it would pin memory that nothing uses.
    eager = traits.habits.state_without_gradient
    planned = {param for param in params if eager or param.requires_grad or target.state.get(param)}
    # Optimizers that draw random numbers do it parameter by parameter: only the group's order repeats theirs.
    order = params
    if traits.elementwise:
        # As a forward needs them.
        order = list(dict.fromkeys([*(param for param in together if param in names), *names]))
    engine.add(target, [param for param in order if param in planned], states.unwaited)
    plain_step = type(target).step
    _attach(target, engine, states, model)
    attachment = attachment_of(target)
    assert attachment is not None
    try:
        if wrappers:
            attachment.undo_step += redirect_captured_step(target, plain_step, type(target).step, wrappers)
        attachment.overlap = make_overlap(model, target, engine, _unwaited_states)
        _watch_until_first_step(target, attachment, model)
    except BaseException:
        remove_offload(target)
        raise
    engine.take_staging()
    for note in filter(None, (*notes_of(engine), note_if_unsharded(params, model))):
        warnings.warn(f"offload_optimizer: {note}", stacklevel=2)
    return optimizer


def is_offloaded(optimizer: Optimizer) -> bool:
    """Whether :func:`offload_optimizer` was called for ``optimizer``, or for the one inside a framework's wrapper."""
    return find_offloaded(optimizer) is not None


def offload_report(optimizer: Optimizer) -> OffloadReport:
    """As :meth:`OffloadedOptimizer.offload_report`, through any framework's wrapper.

    Raises:
        RuntimeError: it is not offloaded.
    """
    return _offloaded(optimizer, "offload_report").offload_report()


def synchronize(optimizer: Optimizer) -> None:
    """As :meth:`OffloadedOptimizer.synchronize`, through any framework's wrapper.

    Raises:
        RuntimeError: it is not offloaded.
    """
    _offloaded(optimizer, "synchronize").synchronize()


def remove_offload(optimizer: _Optimizer) -> _Optimizer:
    """The inverse of :func:`offload_optimizer`: a plain optimizer again, all state on the device, host memory freed.

    Schedulers and hooks go on working, whenever they were made. Needs device memory for the whole state.

    Raises:
        RuntimeError: it is not offloaded, or an exception has left its state half updated.
    """
    if is_wrapped(optimizer):
        for inner in optimizers_in(optimizer):
            remove_offload(inner)
        return optimizer
    target = unwrap(optimizer)
    attachment = attachment_of(target)
    if attachment is None:
        raise RuntimeError(f"remove_offload: this {type(target).__name__} is not offloaded.")
    engine = attachment.engine
    engine.steps.check_usable("remove_offload()")
    if attachment.parked is not None:
        attachment.parked.bring_back()
    if engine.policy.master_weights != "none":
        warnings.warn(
            "remove_offload: the masters of low-precision parameters go, and their state is rounded to the parameters' "
            f"dtype; a plain {engine.cls.__name__} knows no masters.",
            stacklevel=2,
        )
    states = _states_of(target, engine)
    engine.return_to_device(states.unwaited)
    _detach(target, attachment)
    target.state = defaultdict(dict, states)
    engine.clear()
    return optimizer


def _of_the_real_optimizer(
    method: Callable[Concatenate["OffloadedOptimizer", _Args], _Result],
) -> Callable[Concatenate["OffloadedOptimizer", _Args], _Result]:
    """Call ``method`` on the optimizer inside of a wrapper that is a subclass of its class, as Lightning's is."""

    @functools.wraps(method)
    def of_the_real_optimizer(self: "OffloadedOptimizer", /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        inner = None if attachment_of(self) is not None else inside(self)
        if inner is not None:
            result: _Result = getattr(inner, method.__name__)(*args, **kwargs)
            return result
        return method(self, *args, **kwargs)

    return of_the_real_optimizer


class OffloadedOptimizer(Optimizer, metaclass=ABCMeta):
    """Mixed into the class of an optimizer by :func:`offload_optimizer`; never instantiated by itself."""

    _plain_class: type[Optimizer]  # the optimizer's own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"{type(self).__name__} is made by offload_optimizer() out of an existing optimizer; build one of the "
            f"class {self._plain_class.__name__} and attach it."
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own ``step``; see :func:`offload_optimizer` for what is different underneath.

        Returns when everything is issued. Parameters are new in the order of the current stream; stores may still run.

        Raises:
            RuntimeError: an earlier step stopped half way, a gradient is sparse or has other placements than its
                parameter, or the optimizer turns out not to be separable by bucket.
        """
        attachment = attachment_of(self)
        if attachment is None:
            inner = inside(self)
            if inner is not None:
                return inner.step(*args, **kwargs)
            # A scheduler made while this optimizer was offloaded holds this function; it is plain again now.
            return type(self).step(self, *args, **kwargs)
        if not attachment.has_updated and is_called_compiled():
            logger.warning(
                "step() is called by compiled code: an offloaded step waits for copies and cannot be compiled, so it "
                "runs as it is. Compile the model's forward and backward only."
            )
        attachment.stepping = True
        try:
            return run_hooked(self, self._plain_class.__name__, _logical_step, args, kwargs)
        finally:
            attachment.stepping = False

    step.hooked = True  # type: ignore[attr-defined]  # torch is not to wrap it: _logical_step fires the hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As ``torch.optim.Optimizer``. Before the first step, an error if all parameters have been exchanged."""
        optimizer = find_offloaded(self) or self
        groups: list[dict[str, Any]] = vars(optimizer)["param_groups"]
        attachment = attachment_of(optimizer)
        if attachment is not None and attachment.until_first_step:
            refuse_exchanged(attachment.engine.names, groups)
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(find_offloaded(self) or self)["param_groups"] = groups

    @_of_the_real_optimizer
    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer``; the tensors are those of ``optimizer.state``, over host memory.

        Raises:
            RuntimeError: an exception has left the state half updated.
        """
        engine = _engine_of(self)
        engine.steps.check_usable("state_dict()")
        if engine.habits.keeps_raw_state:
            return self._plain_class.state_dict(self)
        # Not that of the class, which converts what is on the device.
        saved = Optimizer.state_dict(self)
        params = [param for group in self.param_groups for param in group["params"]]
        saved["state"] = {
            key: engine.as_saved(self, params[key], state) if isinstance(key, int) else state
            for key, state in saved["state"].items()
        }
        return saved

    @_of_the_real_optimizer
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``, straight into host memory; the tensors of ``state_dict`` are copied.

        Raises:
            ValueError: state is missing, extra, or of another shape, dtype or sharding. Nothing has changed then.
        """
        engine = _engine_of(self)
        _unguard(self)  # whatever it looks at, it waits for
        states = _states_of(self, engine)
        groups, before_load = self.param_groups, dict(states.items())
        loaded: dict[Tensor, UserState] = {}
        installed: list[bool] = []

        def check(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            loaded.update(check_loadable(engine, self, saved))
            return {**saved, "state": {}}

        def install(_: Optimizer) -> None:
            self.state = states
            states.clear()
            installed.append(True)
            try:
                engine.install(self, states.unwaited, loaded)
            except BaseException:  # more state than host memory
                self.param_groups = groups
                states.clear()
                states.update(before_load)
                raise
            type(self).__setstate__(self, {})  # lets the class convert what old checkpoints hold

        # Behind the user's hooks, which may rewrite what is loaded, and before those that look at the result.
        last = self.register_load_state_dict_pre_hook(check)
        first = self.register_load_state_dict_post_hook(install, prepend=True)
        try:
            if engine.habits.keeps_raw_state:
                self._plain_class.load_state_dict(self, state_dict)
            else:
                Optimizer.load_state_dict(self, state_dict)
            if not installed:  # the class loads in a way of its own, without hooks
                loaded = {param: dict(state) for param, state in self.state.items()}
                install(self)
        finally:
            last.remove()
            first.remove()
        _forget_reductions(self)

    @_of_the_real_optimizer
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``; room for the new parameters' state is taken at once."""
        self._plain_class.add_param_group(self, param_group)
        engine = _engine_of(self)
        params = self.param_groups[-1]["params"]
        known = dict(engine.names)
        try:
            for param, name in names_by_place(self).items():
                engine.names.setdefault(param, name)
            check_params(engine.layouts.traits, params, engine.names, engine.device)
            states = _states_of(self, engine)
            eager = engine.habits.state_without_gradient
            new = [param for param in params if param not in engine.plan.shards]  # others come from another group
            engine.add(self, [param for param in new if eager or param.requires_grad], states.unwaited)
        except Exception:
            del self.param_groups[-1]  # as if it had not been called
            engine.names = known
            raise
        attachment = attachment_of(self)
        if attachment is not None:
            attachment.model = None  # the optimizer has parameters of its own now; nothing to hold them against

    @_of_the_real_optimizer
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As ``torch.optim.Optimizer``. What an update still reads is kept until then, and waited for if zeroed."""
        begun = _engine_of(self).steps.begun
        if begun is not None and begun.done:
            logger.warning(
                "zero_grad() before step(), with OffloadPolicy(update='backward'): a step cannot be skipped any more. "
                "%d of its %d buckets have been updated in the backward; step() will refuse to go on.",
                len(begun.done),
                len(begun.steps),
            )
        if False in (*args, *kwargs.values()):
            _engine_of(self).steps.wait_for_all()
            _unguard(self)
        self._plain_class.zero_grad(self, *args, **kwargs)
        _forget_reductions(self)

    @_of_the_real_optimizer
    def synchronize(self) -> None:
        """Block the host until transfers and updates are done, parameters are new and all state is at home."""
        _engine_of(self).synchronize()
        _unguard(self)
        parked = _parked_by(self)
        if parked is not None:
            parked.settle()

    @_of_the_real_optimizer
    def offload_states(self) -> None:
        """Start returning everything to the host: resident state, and the staging memory. Asynchronous.

        State that is not resident is at home already, or on its way since the step. Harmless when there is nothing to
        do. Everything may be done while the state is away: ``step()`` reloads by itself.

        Raises:
            MemoryError: resident state needs host memory when it first leaves, and there is not enough.
        """
        engine = _engine_of(self)
        engine.phases.offload(_states_of(self, engine).unwaited)
        parked = _parked_by(self)
        if parked is not None:
            engine.steps.wait_for_all()  # updates on other streams write them
            parked.offload()

    @_of_the_real_optimizer
    def release_states(self) -> None:
        """Free the device memory of what :meth:`offload_states` has sent away: in the order of the current stream.

        The memory goes to torch's allocator. Staging is shared by the offloaded optimizers of a device, and goes when
        all of them have released it.
        """
        _engine_of(self).phases.release()
        parked = _parked_by(self)
        if parked is not None:
            parked.release()

    @_of_the_real_optimizer
    def reload_states(self, *, free_host_memory: bool = False) -> None:
        """Start loading what the policy allows: resident state, and the first buckets of the next step. Asynchronous.

        For the time when the last gradients are being reduced; see :func:`reload_before`. Harmless when all is there.
        Before the first two steps it is not known what a step will need, and only resident state is loaded.

        Args:
            free_host_memory: give back the pinned memory that resident state was kept in, instead of keeping it for
                the next :meth:`offload_states`. The host waits for the copies then.
        """
        engine, attachment = _engine_of(self), attachment_of(self)
        if attachment is not None and attachment.overlap is not None:
            attachment.overlap.before_reload()
        parked = _parked_by(self)
        if parked is not None:
            parked.reload()
        engine.reload(self, _states_of(self, engine).unwaited)
        if free_host_memory:
            engine.phases.free_host_memory()
            if parked is not None:
                parked.free_host_memory()

    @_of_the_real_optimizer
    def offload_report(self) -> OffloadReport:
        """Bytes by place, rates, and times of the last step; waits for that step. ``str()`` of it is a table."""
        engine, parked = _engine_of(self), _parked_by(self)
        report = report_of(engine, _states_of(self, engine).unwaited)
        return report if parked is None else replace(report, host_bytes=report.host_bytes + parked.host_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(_NO_COPY.format(name=type(self).__name__))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(_NO_COPY.format(name=type(self).__name__))


_NO_COPY = (
    "{name} cannot be copied or pickled: its state lives in host memory that belongs to this optimizer. Use "
    "state_dict(), or call remove_offload() first."
)


def _logical_step(self: OffloadedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    """One step as the user counts them: the closure runs once."""
    engine = _engine_of(self)
    engine.steps.check_usable("step()", mid_step=True)
    refuse_capture(engine.device)
    parked = _parked_by(self)
    if parked is not None:
        parked.bring_back()
    loss = None
    if closure is not None:
        if not engine.layouts.traits.known:
            raise RuntimeError(
                f"{engine.cls.__name__} may evaluate the closure anywhere in its step, and a step in buckets cannot "
                "repeat that. Call the closure yourself, then step() without it. Nothing has been changed."
            )
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad():
        attachment = attachment_of(self)
        assert attachment is not None
        if attachment.until_first_step:
            _check_still_of_model(self)
            _unwatch(attachment)
        states = _states_of(self, engine).unwaited
        if attachment.overlap is not None:
            attachment.overlap.before_step()
        if engine.habits.reads_param_grad:
            check_gradients_are_read(self, engine.names)
        if engine.step(self, states, kwargs):
            attachment.has_updated = True
        else:
            _explain_no_gradient(self)
        if attachment.overlap is not None:
            attachment.overlap.after_step(states)
        tell_if_never_reloaded(attachment)
    return loss


def _watch_until_first_step(optimizer: Optimizer, attachment: Attachment, model: nn.Module | None) -> None:
    """A framework may still exchange the parameters or the optimizer."""
    attachment.until_first_step.append(warn_if_another_steps(optimizer))
    check = None if model is None else check_at_first_forward(model, optimizer)
    if check is not None:
        attachment.until_first_step.append(check)


def _unwatch(attachment: Attachment) -> None:
    for handle in attachment.until_first_step:
        handle.remove()
    attachment.until_first_step.clear()


def _check_still_of_model(optimizer: Optimizer) -> None:
    """The optimizer may have been left with parameters that the model no longer uses, and that get no gradient."""
    attachment = attachment_of(optimizer)
    model = None if attachment is None or attachment.model is None else attachment.model()
    if model is not None:
        refuse_foreign(model, optimizer)


def _explain_no_gradient(optimizer: Optimizer) -> None:
    """A step without any gradient is legal, but often a mistake; the first ones of all, more often."""
    _check_still_of_model(optimizer)
    attachment = attachment_of(optimizer)
    assert attachment is not None
    if attachment.told_no_gradient:
        return
    attachment.told_no_gradient = True
    if attachment.has_updated:
        logger.warning("step() found no gradient in any parameter; nothing was updated or moved")
    else:
        warnings.warn(
            "step() found no gradient in any parameter, and has never found one; nothing was updated or moved. If the "
            "model was sharded after offload_optimizer(), it no longer uses the optimizer's parameters: "
            f"{line_to_write()}.",
            stacklevel=2,
        )


# Attaching -----------------------------------------------------------------------------------------------------------


_offloaded_classes: dict[type[Optimizer], type[Optimizer]] = {}


def _offloaded_class(cls: type[Optimizer]) -> type[Optimizer]:
    """``Offloaded<Name>``: the mixin in front of the user's class; the same class every time."""
    if cls not in _offloaded_classes:
        _offloaded_classes[cls] = _mix_in(cls)
    return _offloaded_classes[cls]


def _mix_in(cls: type[Optimizer]) -> type[Optimizer]:
    # torch.compile(optimizer.step) must not trace into streams and events; it runs the step as it is.
    step = torch.compiler.disable(OffloadedOptimizer.step)

    def zero_grad(self: OffloadedOptimizer, *args: Any, **kwargs: Any) -> None:
        OffloadedOptimizer.zero_grad(self, *args, **kwargs)

    # GradScaler asks what step() takes, accelerate and Megatron-FSDP what zero_grad() does.
    step.__signature__ = inspect.signature(cls.step)
    zero_grad.__signature__ = inspect.signature(cls.zero_grad)  # type: ignore[attr-defined]
    name = f"Offloaded{cls.__name__}"
    own = {"__module__": cls.__module__, "_plain_class": cls, "step": step, "zero_grad": zero_grad}
    mixed: type[Optimizer] = types.new_class(name, (OffloadedOptimizer, cls), {}, lambda body: body.update(own))
    if _can_become(cls, mixed):
        return mixed
    # Python takes the layout from the first base. Where that of cls is another one (ABC, Generic[T] and other bases
    # with empty __slots__), only cls itself may come first, and our methods go before it in the class itself.
    methods = {key: value for key, value in vars(OffloadedOptimizer).items() if key not in _OF_EVERY_CLASS}
    mixed = types.new_class(name, (cls,), {}, lambda body: body.update(methods | own))
    if not _can_become(cls, mixed):
        raise ValueError(
            f"offload_optimizer: an instance of {cls.__name__} cannot become one of a subclass: its memory layout is "
            "fixed (__slots__, or a base written in C). Remove them, or move its step to a plain class."
        )
    OffloadedOptimizer.register(mixed)
    return mixed


_OF_EVERY_CLASS = frozenset(vars(ABCMeta("Empty", (Optimizer,), {})))


def _can_become(cls: type[Optimizer], other: type[Optimizer]) -> bool:
    """Whether Python lets an instance of ``cls`` change its class to ``other``."""
    probe = object.__new__(cls)
    try:
        probe.__class__ = other
    except TypeError:
        return False
    return True


def _attach(optimizer: Optimizer, engine: Engine, states: OffloadedState, model: nn.Module | None) -> None:
    plain_step = type(optimizer).step
    optimizer.__class__ = _offloaded_class(type(optimizer))
    optimizer.state = states
    optimizer.__dict__[ENGINE_ATTRIBUTE] = Attachment(
        engine,
        None if model is None else weakref.ref(model),
        redirect_captured_step(optimizer, plain_step, type(optimizer).step),
        optimizer.register_step_pre_hook(_refuse_bypass),
    )


def _chosen(traits: Traits, params: Sequence[Tensor], model: nn.Module | None, loop: Loop) -> tuple[OffloadPolicy, str]:
    """What ``policy="auto"`` means here; the same on every rank."""
    hides = "" if model is not None else "without model=... there is nothing to hide behind"
    if model is not None and not any(group.params for group in sharding_groups(model)):
        hides = "the model is not sharded by fully_shard, into which overlap hooks"
    state_bytes = sum(2 * param.element_size() * largest_local_numel(param) for param in params)
    policy, chosen = auto_policy(
        loop,
        hides=hides,
        elementwise=traits.elementwise,
        updates_early=traits.habits.reads_param_grad,
        state_bytes=state_bytes,
    )
    logger.info(chosen)
    return policy, chosen


def _check_same(optimizer: Optimizer, model: nn.Module | None, policy: OffloadPolicy | Literal["auto"] | None) -> None:
    """Refuse to leave an offload as it is where the second call asks for another one."""
    attachment = attachment_of(optimizer)
    assert attachment is not None
    other = []
    is_same = attachment.engine.tuning_of_policy if policy == "auto" else policy == attachment.engine.policy
    if policy is not None and not is_same:
        other.append(f"with {attachment.engine.policy}")
    if model is not None and (attachment.model is None or attachment.model() is not model):
        other.append("without a model" if attachment.model is None else "for another model")
    if other:
        raise RuntimeError(
            f"offload_optimizer: this optimizer is offloaded already, {' and '.join(other)}. Call remove_offload() "
            "first."
        )


def _offloaded(optimizer: Optimizer, function: str) -> OffloadedOptimizer:
    target = find_offloaded(optimizer)
    if target is None:
        raise RuntimeError(
            f"{function}: this {type(unwrap(optimizer)).__name__} is not offloaded. Call offload_optimizer() first; of "
            "a container of several optimizers, give each of them."
        )
    assert isinstance(target, OffloadedOptimizer)
    return target


def _detach(optimizer: Optimizer, attachment: Attachment) -> None:
    _unwatch(attachment)
    if attachment.overlap is not None:
        attachment.overlap.remove()
    attachment.bypass_guard.remove()
    for undo in attachment.undo_step:
        undo()
    del optimizer.__dict__[ENGINE_ATTRIBUTE]
    optimizer.__class__ = attachment.engine.cls


def _refuse_bypass(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Step pre-hook: the class's own step must not run on an offloaded optimizer."""
    attachment = attachment_of(optimizer)
    if attachment is not None and not attachment.stepping:
        raise RuntimeError(
            f"{attachment.engine.cls.__name__}.step was called past the offload: something captured it before "
            "offload_optimizer(). Attach first and wrap optimizer.step afterwards. Nothing has been changed."
        )


def _unguard(optimizer: Optimizer) -> None:
    attachment = attachment_of(optimizer)
    if attachment is not None and attachment.overlap is not None:
        attachment.overlap.unguard()


def _forget_reductions(optimizer: Optimizer) -> None:
    attachment = attachment_of(optimizer)
    if attachment is not None and attachment.overlap is not None:
        attachment.overlap.forget_reductions()


def _engine_of(optimizer: Optimizer) -> Engine:
    attachment = attachment_of(optimizer)
    assert attachment is not None, "an OffloadedOptimizer always has an engine"
    return attachment.engine


def _parked_by(optimizer: Optimizer) -> ParkedParameters | None:
    attachment = attachment_of(optimizer)
    return None if attachment is None else attachment.parked


def _unwaited_states(optimizer: Optimizer) -> UnwaitedStates:
    return _states_of(optimizer, _engine_of(optimizer)).unwaited


def _states_of(optimizer: Optimizer, engine: Engine) -> OffloadedState:
    """``optimizer.state``; another mapping that somebody put there is taken over."""
    if not isinstance(optimizer.state, OffloadedState):
        optimizer.state = OffloadedState(engine, optimizer.state)
    return optimizer.state
