""":class:`OffloadedOptimizer`: the methods that an optimizer gets when it is offloaded."""

import functools
import inspect
import types
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..device.arena import normal_tensors
from ..device.lanes import refuse_capture
from ..engine.engine import inside, states_of
from ..engine.loading import check_loadable
from ..engine.whole import WholeEngine
from ..fsdp.gradients import is_spent, zero_spent, zeroed_lifted
from ..fsdp.optim import no_global_step_hooks, plain_step_of
from ..policy import check_choices, check_is
from ..state.layout import is_trained, params_of
from ..state.store import UserState
from .checks import RIGHT_ORDER, device_of, names_by_place, refuse_exchanged
from .report import OffloadReport, report_of
from .wrapped import HOOK_IS_CALLED, Attachment, attached, attachment_of


class OffloadedOptimizer(Optimizer, metaclass=ABCMeta):
    """Methods with which :func:`offload_optimizer` overrides those of an optimizer's class; never instantiated."""

    _plain_class: type[Optimizer]  # the optimizer's own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        plain = getattr(self, "_plain_class", torch.optim.AdamW)
        raise TypeError(
            f"{type(self).__name__} is made by offload_optimizer() out of an existing optimizer; build one of the "
            f"class {plain.__name__} and attach it."
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as the optimizer's own ``step`` does; see :func:`offload_optimizer` for what is different underneath.

        Returns when all is issued; stores may still run. With ``overlap="step"``, the current stream sees the update.

        Raises:
            RuntimeError: an earlier step stopped half way, a gradient is sparse or has other placements than its
                parameter, or the step is not divisible although ``trust_separable`` said so.
        """
        attachment = attached(self)
        attachment.engine.core.trained_here()
        attachment.stepping = True
        try:
            # Counters that are made here must not be inference tensors: updates in a backward write them.
            with normal_tensors() if torch.is_inference_mode_enabled() else nullcontext():
                return _logical_step(self, *args, **kwargs)
        finally:
            attachment.stepping = False

    step.hooked = True  # type: ignore[attr-defined]  # keeps torch from wrapping it: _logical_step fires the hooks

    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.optim.Optimizer`` returns; the tensors share the host memory of ``optimizer.state``.

        Only ``step()`` changes a tensor while you hold it: updates of its state do not run in the backward then.

        Raises:
            RuntimeError: an exception has left the state half updated.
        """
        engine = attached(self).engine
        engine.check_usable("state_dict()")
        # Not the class's own method if that converts state on the device.
        saved = (self._plain_class if engine.conventions.keeps_raw_state else Optimizer).state_dict(self)
        params = params_of(self)
        saved["state"] = {
            key: engine.plan.handed_out(params[key], engine.plan.as_saved(self, params[key], state))
            if isinstance(key, int)
            else state
            for key, state in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as ``torch.optim.Optimizer`` does, straight into host memory; the tensors of ``state_dict`` are copied.

        Raises:
            ValueError: state is missing, extra, or of another shape, dtype or sharding. Nothing has changed then.
        """
        says = "load_state_dict: expected what optimizer.state_dict() gives"
        check_is(state_dict, Mapping, says, "optimizer.load_state_dict(torch.load(path))")
        attachment = attached(self)
        engine, states = attachment.engine, states_of(self)
        attachment.parked.bring_back()
        attachment.has_loaded_inside_step |= bool(engine.core.done)
        groups, before_load = self.param_groups, dict(states.items())
        loaded: dict[Tensor, UserState] = {}
        installed = False

        def check(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            loaded.update(check_loadable(engine, self, saved))
            return {**saved, "state": {key: value for key, value in saved["state"].items() if isinstance(key, str)}}

        def install(_: Optimizer) -> None:
            nonlocal installed
            loaded_state: dict[Any, Any] = self.state
            entries_by_name = {key: value for key, value in loaded_state.items() if not isinstance(key, Tensor)}
            self.state = states
            with engine.core.lock:  # another thread has an entry before this, or finds none
                unheld = {one: dict.get(states, one, {}) for one in states if not states.is_entry_held(one, ours=1)}
                states.clear()
            installed = True
            try:
                engine.install(self, states.unwaited, loaded, unheld)
            except BaseException:  # more state than host memory
                self.param_groups = groups
                states.clear()
                states.update(before_load)
                raise
            states.update(entries_by_name)
            # Lets the class convert entries of old checkpoints.
            type(self).__setstate__(self, {"state": states, "param_groups": self.param_groups})

        with (
            self.register_load_state_dict_pre_hook(check),  # behind the user's, which may rewrite what is loaded
            self.register_load_state_dict_post_hook(install, prepend=True),  # before those that look at the result
        ):
            (self._plain_class if engine.conventions.keeps_raw_state else Optimizer).load_state_dict(self, state_dict)
            if not installed:  # the class has its own loading, without hooks
                others: dict[Any, Any] = self.state
                loaded = {key: dict(state) for key, state in others.items() if isinstance(key, Tensor)}
                install(self)
        engine.core.reductions.end(stepped=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim.Optimizer`` does; room for the new parameters' state is taken at once."""
        self._plain_class.add_param_group(self, param_group)
        attachment = attached(self)
        engine, params = attachment.engine, self.param_groups[-1]["params"]
        known = dict(engine.names)
        try:
            for param, name in names_by_place(self).items():
                engine.names.setdefault(param, name)
            device_of(params, engine.names, engine.layouts.capabilities, engine.policy, engine.device)
            eager = engine.conventions.state_without_gradient
            new = [param for param in params if param not in engine.plan.shards]  # others were in another group
            engine.add(self, [param for param in new if eager or is_trained(param)], states_of(self).unwaited)
        except BaseException:  # an interrupt, too
            del self.param_groups[-1]  # undo the call
            engine.names.clear()  # in place: the engine shares this dict
            engine.names.update(known)
            raise
        attachment.has_others = True

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients. Updates that still read them keep them alive; zeroing in place waits for these updates.

        Raises:
            RuntimeError: the backward has updated (``overlap="iteration"``), and ``step()`` was not called since.
        """
        attachment = attached(self)
        attachment.engine.skip_step()
        attachment.has_loaded_inside_step = False
        given = inspect.signature(self._plain_class.zero_grad).bind(self, *args, **kwargs)
        given.apply_defaults()
        clears = given.arguments.get("set_to_none")
        if clears is None:
            clears = attachment.engine.conventions.clears_gradients
        if not clears:
            attachment.engine.wait_updated()
        zeroed = [] if clears is None or clears else params_of(self)
        for param in filter(is_spent, zeroed):
            zero_spent(param)  # freed in the backward
        with zeroed_lifted(zeroed):
            self._plain_class.zero_grad(self, *args, **kwargs)
        attachment.engine.core.reductions.end(stepped=False)  # forget reductions of this backward

    def synchronize(self) -> None:
        """Block the host until transfers and updates are done, parameters are new and all state is at home."""
        attached(self).engine.synchronize()
        attached(self).parked.settle()

    def offload_states(self) -> None:
        """Start storing state that is kept on the device; the host does not wait. Other state is at home already.

        Harmless if there is nothing to do. The optimizer stays usable: ``step()`` reloads by itself.
        """
        attachment = attached(self)
        attachment.engine.offload(states_of(self).unwaited)
        if attachment.parked.params:
            attachment.engine.wait_updated()  # updates on other streams write them
            attachment.parked.offload()

    def release_states(self) -> None:
        """Free the device memory of the state that :meth:`offload_states` stores, in the current stream's order."""
        attached(self).engine.release()
        attached(self).parked.release()

    def reload_states(self, *, free_host_memory: bool = False) -> None:
        """Start loading the state that the next step uses first, as much as the policy allows. Asynchronous.

        Call it while the last gradients are being reduced; see :func:`reload_before`. Harmless if everything is
        loaded. Before the first step, it is not known which state a step uses first.

        Args:
            free_host_memory: free the pinned memory in which masters were parked, instead of keeping it for the next
                :meth:`offload_states`. The host then waits for the copies. Homes of state stay.
        """
        check_choices("reload_states", free_host_memory=free_host_memory)
        attachment = attached(self)
        attachment.parked.reload()
        attachment.engine.reload(states_of(self).unwaited)
        if free_host_memory:
            attachment.parked.free_host_memory()

    def offload_report(self) -> OffloadReport:
        """Report bytes by place, and copies and times of the last step; wait for that step. ``str()`` gives a table."""
        attachment = attached(self)
        engine = attachment.engine
        # No lock in a thread that writes a save: a step may hold the lock while it waits for that thread.
        with nullcontext() if engine.lending.is_read_here() else engine.core.lock:
            region = attachment.parked.region
            return report_of(engine, states_of(self).unwaited, 0 if region is None else region.nbytes)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: its state lives in host memory that belongs to this "
            "optimizer. Use state_dict(), or call remove_offload() first."
        )

    __deepcopy__ = __reduce_ex__


@Optimizer.profile_hook_step
def _logical_step(self: OffloadedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """Run one ``step()`` of the user, and the closure once; a class that moves as a whole calls the closure itself."""
    attachment = attached(self)
    engine = attachment.engine
    engine.check_usable("step()", mid_step=True)
    refuse_capture(engine.device)
    attachment.parked.bring_back()
    if attachment.is_new:
        refuse_exchanged(attachment, params_of(self))
        attachment.is_new = False
    states = states_of(self)
    if not states and states.has_offered and not states.is_all_untouched():
        warnings.warn(
            "a checkpoint was loaded into what get_optimizer_state_dict(for_load=True) gave, and "
            "set_optimizer_state_dict() has not taken it: this step makes new state. Call it after the load.",
            stacklevel=3,
        )
    if isinstance(engine, WholeEngine):
        with engine.step_whole(self, lambda: states_of(self).unwaited), no_global_step_hooks(self):
            result = plain_step_of(self._plain_class)(self, *args, **kwargs)
        updated = any(map(callable, (*args, *kwargs.values()))) or any(
            param.grad is not None for param in params_of(self)
        )
    else:
        if len(args) > 1:
            raise TypeError(f"{engine.cls.__name__}.step() takes a closure or nothing, got {len(args)} arguments.")
        (closure,) = args or (kwargs.pop("closure", None),)
        if not (closure is None or callable(closure)):
            raise TypeError(f"{engine.cls.__name__}.step() takes a closure or nothing, got {closure!r}.")
        if closure is not None and not engine.layouts.capabilities.known:
            raise RuntimeError(
                f"{engine.cls.__name__} may evaluate the closure anywhere in its step, and a step in buckets cannot "
                "repeat that. Call the closure yourself, then step() without it. Nothing has been changed."
            )
        with torch.enable_grad():
            result = None if closure is None else closure()
        with torch.no_grad():
            updated = engine.step(self, states_of(self).unwaited, kwargs)
    with torch.no_grad():
        _end_step(attachment, updated=updated)
    return result


def _end_step(attachment: Attachment, *, updated: bool) -> None:
    if attachment.hook_steps is not None and attachment.hook_steps < HOOK_IS_CALLED:
        attachment.hook_steps += 1
        if attachment.hook_steps == HOOK_IS_CALLED:
            warnings.warn(
                f"reload_before() has wrapped a hook that was not called in {HOOK_IS_CALLED} steps: the training loop "
                "does not use it, and loads begin in step() only. Bind the wrapper where the loop looks for it.",
                stacklevel=2,
            )
    has_loaded, attachment.has_loaded_inside_step = attachment.has_loaded_inside_step, False
    if updated:
        attachment.expects_gradients = False
        return
    # A step without any gradient is legal but often a mistake, most of all a first one.
    refuse_exchanged(attachment)
    if has_loaded:
        warnings.warn(
            "step() updates nothing: load_state_dict() came between the backward and step(), and with "
            "overlap='iteration' the backward had updated parameters with its gradients already. After a load (of the "
            "model as well), go on with zero_grad() and another backward.",
            stacklevel=2,
        )
    elif attachment.expects_gradients:
        attachment.expects_gradients = False
        warnings.warn(
            "step() found no gradient in any parameter, and has never found one; nothing was updated or moved. If the "
            "model was sharded after offload_optimizer(), it no longer uses the optimizer's parameters: "
            f"{RIGHT_ORDER}.",
            stacklevel=2,
        )


# The class ------------------------------------------------------------------------------------------------------------


@functools.cache
def offloaded_class(cls: type[Optimizer]) -> type[Optimizer]:
    """Return ``Offloaded<Name>``: a subclass with the methods above; the same class every time.

    The methods are copied, not mixed in: Python takes the layout of instances from the first base, so an instance of a
    class with bases such as ABC or Generic[T] could not change its class to one with a mixin in front.
    """
    ours = {key: value for key, value in vars(OffloadedOptimizer).items() if key not in _OF_EVERY_CLASS}
    ours |= {key: _seen_through(key) for key, value in ours.items() if inspect.isfunction(value) and key[0] != "_"}
    # torch.compile(optimizer.step) must not trace into streams and events; it runs the step uncompiled.
    ours |= {"__module__": cls.__module__, "_plain_class": cls, "step": torch.compiler.disable(ours["step"])}
    for name in ("step", "zero_grad"):  # GradScaler inspects step(), accelerate zero_grad()
        ours[name].__signature__ = inspect.signature(getattr(cls, name))
    made: type[Optimizer] = types.new_class(f"Offloaded{cls.__name__}", (cls,), {}, lambda body: body.update(ours))
    object.__new__(cls).__class__ = made  # raises a TypeError for a fixed layout (__slots__, a base in C)
    OffloadedOptimizer.register(made)
    return made


_OF_EVERY_CLASS = frozenset(vars(ABCMeta("Empty", (Optimizer,), {})))


def _seen_through(name: str) -> Callable[..., Any]:
    """Return a method that also works on wrappers derived from the class, such as Lightning's."""

    @functools.wraps(getattr(OffloadedOptimizer, name))
    def seen_through(self: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        if attachment_of(self) is not None:
            return getattr(OffloadedOptimizer, name)(self, *args, **kwargs)
        if (inner := inside(self)) is not None:
            return getattr(inner, name)(*args, **kwargs)
        # Plain again: a scheduler that was made during the offload still holds this function.
        return getattr(type(self), name)(self, *args, **kwargs)

    return seen_through
