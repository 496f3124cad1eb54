"""FSDP2's modules: their parameters and gradients, and hooks around their gathers and reductions."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from .dtensor import is_unreduced, version_of, versions_of
from .gradients import bare, is_spent, let_read, zeroed_lifted
from .homed import ShardedParameter


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Iterate over the modules to which ``fully_shard`` was applied, in registration order."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Map the model's parameters, sharded ones included, to their FQNs, in registration order."""
    for module in fsdp_modules(model):
        # The root keeps its parameters gathered after a forward without backward; the optimizer has the shards.
        module.reshard()
    for group in _param_groups(model):
        # Adopt parameters that transformers has put into modules since fully_shard, as the first forward would do.
        if not getattr(group, "_reset_sharded_params", True) and group.is_sharded:
            for one in group.fsdp_params:
                if getattr(one._module_info.module, one._module_info.param_name) is not one.sharded_param:
                    one.reset_sharded_param()
    return {param: name for name, param in model.named_parameters()}


def parameters_of(model: nn.Module) -> dict[Tensor, str]:
    """Map as :func:`parameter_names`, from any thread: list the shards of gathered parameters, and reshard nothing."""
    named = list(model.named_parameters())  # first: another thread may gather them
    records = [one for group in _param_groups(model) for one in group.fsdp_params]
    of_forward = ("_unsharded_param", "_sharded_post_forward_param")
    shards = {getattr(one, name, None): one.sharded_param for one in records for name in of_forward}
    return {shards.get(param, param): name for name, param in named}


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Do what ``module.to_empty(device=device, recurse=False)`` does, but only for meta tensors."""
    module._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one, recurse=False)


def dtypes_in_use(model: nn.Module) -> dict[Tensor, torch.dtype]:
    """Map floating-point parameters to the dtype that they have in forwards, if ``MixedPrecisionPolicy`` sets one."""
    return {
        one.sharded_param: dtype
        for group in _param_groups(model)
        if (dtype := group.mp_policy.param_dtype) is not None
        for one in group.fsdp_params
        if one.sharded_param.is_floating_point()
    }


def uses_cpu_offload_policy(model: nn.Module) -> bool:
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _param_groups(model))


def _param_groups(model: nn.Module) -> list[Any]:
    """List the param groups that ``fully_shard`` gathers and reduces together, in registration order."""
    found: dict[int, Any] = {}  # several modules may share one
    for module in fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        several = hasattr(state, "_fsdp_param_groups")  # since 2.12
        groups = state._fsdp_param_groups if several else filter(None, [state._fsdp_param_group])
        found.update((id(group), group) for group in groups)
    return list(found.values())


def sharded_data(model: nn.Module) -> list[Tensor]:
    """List the flat tensors that ``fully_shard`` reads in gathers: other objects over the parameters' memory."""
    return [param._sharded_param_data for group in _param_groups(model) for param in group.fsdp_params]


def gathered_gradients(model: nn.Module) -> list[Tensor]:
    """List gradients that ``fully_shard`` has accumulated and not yet reduced over all ranks."""
    return [grad for holder, name in _gradient_holders(model) if isinstance(grad := getattr(holder, name), Tensor)]


def drop_gathered_gradients(model: nn.Module) -> None:
    for group in _param_groups(model):
        for param in (one.sharded_param for one in group.fsdp_params):
            if is_unreduced(param.grad):
                param.grad = param.grad.reduced
    for holder, name in _gradient_holders(model):
        shown = getattr(type(holder), name, None)
        if getattr(shown, "fset", setattr) is not None:  # above 2.14 one is a read-only property over another
            setattr(holder, name, None)


def _gradient_holders(model: nn.Module) -> Iterator[tuple[object, str]]:
    for group in _param_groups(model):
        yield group, "_partial_reduce_output"
        yield from _gradient_holders_of(group)


def _gradient_holders_of(group: Any) -> Iterator[tuple[object, str]]:
    """Yield objects and attributes that hold gradients to reduce now or in a later backward."""
    for param in group.fsdp_params:
        yield param, "unsharded_accumulated_grad"
        if hasattr(param, "_partial_grad"):  # above 2.14, of HSDP
            yield param, "_partial_grad"
        if hasattr(param, "_unsharded_param"):  # since the first gather
            yield param._unsharded_param, "grad"


def abandon_backward(model: nn.Module | None) -> None:
    """Reset FSDP if an exception is about to end a backward, so that nothing of it is left for the next one."""
    if model is None or not runs_in_backward():
        return
    drop_gathered_gradients(model)
    for module in fsdp_modules(model):
        state: Any = module._get_fsdp_state()
        if not state._is_root:
            continue
        if hasattr(module, "reset_iter_state"):  # since 2.13
            module.reset_iter_state()
            continue
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        for group in _param_groups(model):  # else the next forward uses what is gathered now
            if (gather := group._all_gather_result) is not None:
                if gather.all_gather_event is not None:
                    torch.accelerator.current_stream().wait_event(gather.all_gather_event)
                if gather.all_gather_work is not None:
                    gather.all_gather_work.wait()
            group._all_gather_result = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()


def runs_in_backward() -> bool:
    """Return whether autograd runs in this thread; a forward inside it recomputes a checkpointed block."""
    return bool(torch._C._current_graph_task_id() != -1)


def wait_for_updates(model: nn.Module) -> None:
    """Make the current stream wait for running updates; drop references to their gradients."""
    for group in _param_groups(model):
        _reach(group, "before_gather", None)


class Points(NamedTuple):
    """Callbacks at points of an iteration. A stream of ``None`` is the current one."""

    before_gather: Callable[[torch.Stream | None], None]  # the parameters are about to be read on this stream
    before_use: Callable[[bool], None]  # the current stream is about to use gathered parameters; True in a backward
    before_reduce: Callable[[], None]  # gradients are about to be reduced; not called without gradients
    reduced: Callable[[object], None]  # gradients are reduced once this torch event has passed (``None`` on the CPU)
    before_read: Callable[[torch.Stream | None, bool], None]  # shards are about to be read; True in a backward
    after_read: Callable[[torch.Stream | None], None]  # reads of shards have been issued on this stream


class ShardingGroup:
    """Parameters that ``fully_shard`` gathers and reduces together, and the points at which it does so.

    Hooks are attributes of FSDP's own group that shadow its methods: every path calls these through the instance.
    """

    def __init__(self, group: Any) -> None:
        missing = [name for name in (*_HOOKED, *_READ) if not hasattr(group, name)]
        params = getattr(group, "fsdp_params", ())
        missing += [name for name in _READ_OF_PARAMS if not all(hasattr(one, name) for one in params)]
        if missing:
            raise NotImplementedError(
                f"fully_shard of torch {torch.__version__} has no {missing}, by which updates and loads are hidden "
                "behind forward and backward; use OffloadPolicy(overlap='step')"
            )
        self._group = group

    @property
    def params(self) -> list[Tensor]:
        """Return the sharded parameters, as an optimizer has them."""
        return [param.sharded_param for param in self._group.fsdp_params]

    def sharded(self) -> list[ShardedParameter]:
        """Return FSDP's records of the parameters; raise NotImplementedError on an unsupported torch."""
        return [ShardedParameter(param) for param in self._group.fsdp_params]

    def hook(self, points: Points) -> Callable[[], None]:
        """Call ``points`` from now on; return a function that ends this."""
        hooked: list[Points] = vars(self._group).setdefault(_POINTS, [])
        if not hooked:
            self._shadow()
        hooked.append(points)

        def unhook() -> None:
            hooked.remove(points)
            if not hooked:
                for name in (*_HOOKED, _POINTS):
                    vars(self._group).pop(name, None)

        return unhook

    def _shadow(self) -> None:
        group = self._group
        unshard, wait_for_unshard, post_backward = (getattr(group, name) for name in _HOOKED)

        @functools.wraps(unshard)
        def gathering(async_op: bool = False) -> Any:
            if not group.is_unsharded and group._all_gather_result is None:
                stream: torch.Stream | None = None
                if hasattr(group.comm_ctx, "all_gather_copy_in_stream"):  # not before the first forward
                    stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]
                _reach(group, "before_gather", stream)
                if not self._is_alone and not group.is_sharded_post_forward:
                    return self._reading(stream, functools.partial(unshard, async_op))
            return unshard(async_op)

        @functools.wraps(wait_for_unshard)
        def waiting() -> Any:
            if group._all_gather_result is not None:
                _reach(group, "before_use", self._in_backward)
                if self._is_alone:  # FSDP reads the shards here, and not in unshard
                    return self._reading(None, wait_for_unshard)
            return let_read(wait_for_unshard)

        @functools.wraps(post_backward)
        def reducing(*args: Any) -> Any:
            # FSDP also calls this for groups that the backward did not reach.
            if [name for holder, name in _gradient_holders_of(group) if getattr(holder, name) is not None]:
                _reach(group, "before_reduce")
            params = self.params
            with zeroed_lifted(params), bare([grad for param in params if (grad := param.grad) is not None]):
                before = _gradient_versions(params)
                result = post_backward(*args)  # adds to gradients of earlier micro-batches, whose class must not watch
                is_reduced = not _gradient_versions(params).items() <= before.items()
            # FSDP also calls this without gradients to reduce, and for partial sums of HSDP, which are not final.
            if is_reduced:
                _reach(group, "reduced", group._post_reduce_event)
            return result

        group.unshard, group.wait_for_unshard, group.post_backward = gathering, waiting, reducing

    def _reading(self, stream: torch.Stream | None, read: Callable[[], Any]) -> Any:
        _reach(self._group, "before_read", stream, self._in_backward)
        try:
            return let_read(read)
        finally:
            _reach(self._group, "after_read", stream)

    @property
    def _in_backward(self) -> bool:
        return bool(self._group._training_state.name == "PRE_BACKWARD")

    @functools.cached_property
    def _is_alone(self) -> bool:
        """Return whether no other rank has a part, so that FSDP reads the shards without a collective."""
        return getattr(self._group.mesh_info, "shard_mesh_size", 1) == 1


def _gradient_versions(params: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """Return version counters of reduced gradients, by ``id``."""
    grads = [grad for param in params if (grad := param.grad) is not None]
    try:
        return dict(zip(map(id, grads), versions_of(grads), strict=True))
    except AttributeError:  # some are unreduced: rare, so only then checked one by one
        return {id(grad): version_of(grad) for grad in grads if not is_unreduced(grad)}


def _reach(group: Any, point: str, *args: object) -> None:
    """Call callback ``point`` of every optimizer that has hooked ``group``."""
    for points in tuple(vars(group).get(_POINTS, ())):
        getattr(points, point)(*args)


_POINTS = "_fsdp_offload_points"
_HOOKED = ("unshard", "wait_for_unshard", "post_backward")
_READ = (
    *("fsdp_params", "comm_ctx", "is_unsharded", "is_sharded_post_forward", "mesh_info", "_training_state"),
    *("_all_gather_result", "_post_reduce_event"),
)
_READ_OF_PARAMS = ("unsharded_accumulated_grad",)


def sharding_groups(model: nn.Module) -> list[ShardingGroup]:
    """Return the sharding groups in forward order, root first; raise NotImplementedError on an unsupported torch."""
    return [ShardingGroup(group) for group in _param_groups(model)]


class LeftBehind:
    """Replaces the engine in a model's hooks once the optimizer has been dropped."""

    def __init__(self, model: "weakref.ref[nn.Module]", under_way: Mapping[int, Any]) -> None:
        """Keep the model and ``under_way``, the marks of updates on the CPU that may still write parameters."""
        self._model, self._under_way = model, under_way
        self.is_half_updated = False  # a backward had updated parameters, without a step()

    def call(self, method: str, *args: Any) -> None:
        """Answer hook ``method``; raise if the model is used or saved half updated."""
        model, refuses = self._model(), self.is_half_updated and method in _USES
        if method == "_before_load":
            self.is_half_updated = False
        if method == "_before_reduce" and model is not None:
            refuses = refuses or any(map(is_spent, sharding_groups(model)[args[0]].params))
        if refuses:
            abandon_backward(model)
            raise RuntimeError(_DROPPED)
        for mark in self._under_way.values():
            mark.synchronize()


_USES = ("_before_gather", "_before_use", "_before_reduce", "_before_state_dict")
_DROPPED = (
    "the optimizer was dropped (garbage collected) behind a backward that had updated parameters "
    "(OffloadPolicy(overlap='iteration')), before step() or before zero_grad(): gradients are gone, or parameters half "
    "updated. To go on with this model, call model.load_state_dict() and model.zero_grad()."
)
