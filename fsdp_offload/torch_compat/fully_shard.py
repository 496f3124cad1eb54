"""FSDP2's modules: their parameters, the points of an iteration at which they can be waited for, their gradients."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from .dtensor import version_of
from .sharded_parameter import ShardedParameter
from .watched_gradient import bare


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules to which ``fully_shard`` was applied, in registration order."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """FQNs of the model's parameters, sharded ones included, in registration order."""
    for module in fsdp_modules(model):
        # The root keeps its parameters gathered after a forward without backward; the optimizer has the shards.
        module.reshard()
    for group in _param_groups(model):
        _follow_modules(group)
    return {param: name for name, param in model.named_parameters()}


def _follow_modules(group: Any) -> None:
    """Take up parameters that modules got since ``fully_shard``, as the first forward does, which may be yet to come.

    transformers' ``from_pretrained(distributed_config=...)`` puts others there.
    """
    if not getattr(group, "_reset_sharded_params", True) and group.is_sharded:
        for one in group.fsdp_params:
            info = one._module_info
            if getattr(info.module, info.param_name) is not one.sharded_param:
                one.reset_sharded_param()


def parameters_of(model: nn.Module) -> set[Tensor]:
    """The model's parameters, and the shards of those that are gathered now. They stay gathered."""
    shards = {param.sharded_param for group in _param_groups(model) for param in group.fsdp_params}
    return shards.union(model.parameters())


def uses_cpu_offload_policy(model: nn.Module) -> bool:
    """Return whether any module was sharded with ``offload_policy=CPUOffloadPolicy()``."""
    return any(isinstance(policy, CPUOffloadPolicy) for policy in _offload_policies(model))


def _offload_policies(model: nn.Module) -> Iterable[object]:
    return (getattr(group, "offload_policy", None) for group in _param_groups(model))


def _param_groups(model: nn.Module) -> list[Any]:
    """List the param groups that ``fully_shard`` gathers and reduces together, in registration order."""
    found: dict[int, Any] = {}  # several modules may share one
    for module in fsdp_modules(model):
        get_state = getattr(module, "_get_fsdp_state", None)
        state = get_state() if get_state is not None else None
        groups = getattr(state, "_fsdp_param_groups", None)  # since 2.12
        if groups is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        found.update((id(group), group) for group in groups)
    return list(found.values())


def sharded_data(model: nn.Module) -> list[Tensor]:
    """The flat tensors that ``fully_shard`` reads when it gathers: other objects over the memory of the parameters."""
    data = (
        getattr(param, "_sharded_param_data", None) for group in _param_groups(model) for param in group.fsdp_params
    )
    return [tensor for tensor in data if isinstance(tensor, Tensor)]


def gathered_gradients(model: nn.Module) -> list[Tensor]:
    """Gradients that ``fully_shard`` accumulates without having reduced them, over all ranks or some of them."""
    return [grad for holder, name in _gradient_holders(model) if isinstance(grad := getattr(holder, name), Tensor)]


def drop_gathered_gradients(model: nn.Module) -> None:
    """Set all of :func:`gathered_gradients` to ``None``."""
    for holder, name in _gradient_holders(model):
        setattr(holder, name, None)


def abandon_backward(model: nn.Module) -> None:
    """Leave nothing of a backward that an exception is about to end.

    Torch would add its gradients to those of the next backward, and would not finish that one.
    """
    drop_gathered_gradients(model)
    for module in fsdp_modules(model):
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        if not getattr(state, "_is_root", False):
            continue
        if hasattr(module, "reset_iter_state"):  # since 2.13: also waits for gathers, and shards all parameters again
            module.reset_iter_state()
        elif hasattr(state, "_state_ctx"):
            state._state_ctx.post_backward_final_callback_queued = False


def _gradient_holders(model: nn.Module) -> Iterator[tuple[object, str]]:
    for group in _param_groups(model):
        holders = [(group, "_partial_reduce_output")]
        for param in group.fsdp_params:
            holders += [(param, "unsharded_accumulated_grad"), (getattr(param, "_unsharded_param", None), "grad")]
        yield from ((holder, name) for holder, name in holders if hasattr(holder, name))


def wait_for_updates(model: nn.Module) -> None:
    """Let the current stream wait for updates that still run; nobody holds the gradients for them any more."""
    for group in _param_groups(model):
        for points in tuple(group.__dict__.get(_POINTS, ())):
            points.before_gather(None)


class _Points(NamedTuple):
    """Functions to call at the points of an iteration; see :meth:`ShardingGroup.hook`."""

    before_gather: Callable[[torch.Stream | None], None]
    before_use: Callable[[bool], None]
    before_reduce: Callable[[], None]
    reduced: Callable[[object], None]
    before_read: Callable[[torch.Stream | None, bool], None]
    after_read: Callable[[torch.Stream | None], None]
    in_forward: Callable[[], None]


class ShardingGroup:
    """Parameters that ``fully_shard`` gathers and reduces together, and the points at which it does so.

    The methods of FSDP's own group are shadowed by attributes of the instance; every path (own forward, explicit and
    implicit prefetch, ``module.unshard()``, backward) calls them through the instance.
    """

    def __init__(self, group: Any) -> None:
        missing = [name for name in (*_HOOKED, *_READ) if not hasattr(group, name)]
        if missing:
            raise NotImplementedError(
                f"this torch's fully_shard has no {missing}, by which updates and loads are hidden behind forward and "
                "backward; use OffloadPolicy(overlap='step')"
            )
        self._group = group

    @property
    def params(self) -> list[Tensor]:
        """The sharded parameters: those that an optimizer has."""
        return [param.sharded_param for param in self._group.fsdp_params]

    def sharded(self) -> list[ShardedParameter]:
        """Return the sharded parameters as ``fully_shard`` knows them.

        Raises:
            NotImplementedError: this torch's ``fully_shard`` keeps shards in another way.
        """
        return [ShardedParameter(param) for param in self._group.fsdp_params]

    def hook(
        self,
        before_gather: Callable[[torch.Stream | None], None],
        before_use: Callable[[bool], None],
        before_reduce: Callable[[], None],
        reduced: Callable[[object], None],
        before_read: Callable[[torch.Stream | None, bool], None] = lambda stream, in_backward: None,
        after_read: Callable[[torch.Stream | None], None] = lambda stream: None,
        in_forward: Callable[[], None] = lambda: None,
    ) -> Callable[[], None]:
        """Call these from now on; returns what ends it.

        Args:
            before_gather: the parameters are about to be read on this stream (``None``: the current one).
            before_use: the current stream is about to use them gathered; told whether in a backward.
            before_reduce: gradients are about to be reduced, if there are any.
            reduced: gradients have been reduced, once this event (of torch, or ``None`` on the CPU) has passed.
            before_read: the shards are about to be read on this stream; told whether for a backward.
            after_read: the reads have been issued there.
            in_forward: a forward is about to use them, whether gathered for it or still since an earlier use.
        """
        points = _Points(before_gather, before_use, before_reduce, reduced, before_read, after_read, in_forward)
        hooked: list[Any] = self._group.__dict__.setdefault(_POINTS, [])
        if not hooked:
            self._shadow(hooked)
        hooked.append(points)

        def unhook() -> None:
            hooked.remove(points)
            if not hooked:
                for name in (*_HOOKED, _POINTS):
                    self._group.__dict__.pop(name, None)

        return unhook

    def _shadow(self, hooked: Sequence[Any]) -> None:
        """Methods on the instance that call all ``hooked``, of any number of optimizers, and then FSDP's own."""
        group = self._group
        unshard, wait_for_unshard, post_backward = (getattr(group, name) for name in _HOOKED)

        @functools.wraps(unshard)
        def gathering(async_op: bool = False) -> Any:
            if not group.is_unsharded and group._all_gather_result is None:
                stream = self._copy_in_stream(async_op)
                for points in tuple(hooked):
                    points.before_gather(stream)
                if not self._is_alone and not group.is_sharded_post_forward:
                    return self._reading(hooked, stream, lambda: unshard(async_op))
            return unshard(async_op)

        @functools.wraps(wait_for_unshard)
        def waiting() -> Any:
            if not self._in_backward:
                for points in tuple(hooked):
                    points.in_forward()
            if group._all_gather_result is not None:
                # One rank alone reads the shards here, and not in unshard.
                for points in tuple(hooked):
                    points.before_use(self._in_backward)
                if self._is_alone:
                    return self._reading(hooked, None, wait_for_unshard)
            return wait_for_unshard()

        group.unshard, group.wait_for_unshard = gathering, waiting
        group.post_backward = self._reducing(hooked, post_backward)

    def _reducing(self, hooked: Sequence[Any], post_backward: Callable[..., Any]) -> Callable[..., Any]:
        group = self._group

        @functools.wraps(post_backward)
        def reducing(*args: Any) -> Any:
            if self._has_gradients():
                for points in tuple(hooked):
                    points.before_reduce()
            before = self._gradient_versions()
            with bare(grad for param in self.params if (grad := param.grad) is not None):
                result = post_backward(*args)  # which adds to gradients of earlier micro-batches, past their class
            # Also called where there was nothing to reduce; and partial sums of HSDP are still to be reduced further.
            if self._gradient_versions() != before:
                for points in tuple(hooked):
                    points.reduced(group._post_reduce_event)
            return result

        return reducing

    def _reading(self, hooked: Sequence[Any], stream: torch.Stream | None, read: Callable[[], Any]) -> Any:
        points = tuple(hooked)
        for one in points:
            one.before_read(stream, self._in_backward)
        try:
            return read()
        finally:
            for one in points:
                one.after_read(stream)

    @property
    def _in_backward(self) -> bool:
        return bool(self._group._training_state.name == "PRE_BACKWARD")

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank has a part, so that shards are read without a collective."""
        return getattr(self._group.mesh_info, "shard_mesh_size", 1) == 1

    def _has_gradients(self) -> bool:
        """Return whether the backward left any to reduce or keep: it ends for groups that it did not reach, too."""
        for param in self._group.fsdp_params:
            unsharded = getattr(param, "_unsharded_param", None)
            kept = getattr(param, "unsharded_accumulated_grad", None)
            if kept is not None or (unsharded is not None and unsharded.grad is not None):
                return True
        return False

    def _gradient_versions(self) -> list[object]:
        grads = [param.grad for param in self.params]
        return [None if grad is None else (id(grad), version_of(grad)) for grad in grads]

    def _copy_in_stream(self, async_op: bool) -> torch.Stream | None:
        context = self._group.comm_ctx
        if not hasattr(context, "all_gather_copy_in_stream"):  # before the first forward
            return None
        stream: torch.Stream = context.get_all_gather_streams(async_op, self._group._training_state)[0]
        return stream


_POINTS = "_fsdp_offload_points"
_HOOKED = ("unshard", "wait_for_unshard", "post_backward")
_READ = (
    *("fsdp_params", "comm_ctx", "is_unsharded", "is_sharded_post_forward", "mesh_info", "_training_state"),
    *("_all_gather_result", "_post_reduce_event"),
)


def sharding_groups(model: nn.Module) -> list[ShardingGroup]:
    """All of them in the order in which a forward first needs them: the root's, then by registration.

    Raises:
        NotImplementedError: this torch's ``fully_shard`` has other hook points.
    """
    return [ShardingGroup(group) for group in _param_groups(model)]


def runs_in_backward() -> bool:
    """Return whether autograd is at work in this thread: what is computed now is computed again."""
    graph_task = getattr(torch._C, "_current_graph_task_id", None)  # torch 2.11 to 2.13
    return graph_task is not None and graph_task() != -1
