"""All that touches DTensor and ``fully_shard``, and every private name of PyTorch that the package uses.

==========================  =====================  ================================================================
private name                seen in                without it
==========================  =====================  ================================================================
``DTensor._local_tensor``   2.11 to 2.13           required; ``to_local()`` would wrap it for autograd
``DTensor._spec``           2.11 to 2.13           required, to build a DTensor over host memory: ``from_local``
                                                   moves the data to the mesh's device
``TensorMeta``              2.11 to 2.13           required, for the same
``_get_fsdp_state``,        2.11 to 2.13           CPUOffloadPolicy is then only recognised by parameters that are on
``_fsdp_param_group(s)``                           the CPU while their mesh is not
``FSDPParamGroup`` with     2.11 to 2.13           overlap_forward, prefetch and update in the backward are refused
``unshard``, ``wait_for_``
``unshard``, ``post_``
``backward``, and the
attributes in ``_READ``
``_sharded_param_data``,    2.11 to 2.13           using a model that is asleep is not refused everywhere;
``_unsharded_param``,                              gradients that are not reduced yet stay on the device
``unsharded_accumulated_``
``grad``, ``_partial_``
``reduce_output``
``FSDPParam`` with          2.11 to 2.13           with ``update="backward"``, a second backward before ``step()``
``_unsharded_param``,                              is only noticed by ``step()``, from the gradients
``unsharded_``
``accumulated_grad``
``_current_graph_task_id``  2.11 to 2.13           with ``update="backward"``, a checkpointed block that is computed
                                                   again after its update is not refused
``_foreach_supported_``     2.11 to 2.13           assumed to be plain tensors, parameters and DTensors
``types``
``_global_optimizer_pre_``  2.11 to 2.13           global step hooks do not fire
``hooks``, ``…_post_hooks``
``_optimizer_step_pre_``    2.11 to 2.13           required; torch's own tables of an optimizer's hooks
``hooks``, ``…_post_hooks``
``_dynamo/eval_frame.py``   2.11 to 2.13           nobody is told that a compiled ``step`` runs eagerly
==========================  =====================  ================================================================
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

_SAYS_CHUNKS = {"__create_chunk_list__", "__create_write_items__"}
"""What a local tensor has beside its memory if it says itself which chunks of the global tensor it is."""


def is_dtensor(tensor: object) -> bool:
    """Whether ``tensor`` is sharded or replicated over a device mesh."""
    return isinstance(tensor, DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``: the local tensor of a DTensor itself (no copy), or ``tensor``."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def has_inner_tensors(tensor: Tensor) -> bool:
    """Whether the local shard of ``tensor`` is of a type that is made of other tensors."""
    return hasattr(type(local_shard(tensor)), "__tensor_flatten__")


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Changes with every write into ``tensor``: through a DTensor itself, or through its local tensor."""
    return tensor._version, local_shard(tensor)._version


def said_chunks(tensor: Tensor) -> Sequence[Any] | None:
    """The chunks that the local tensor of a DTensor names itself, for DCP; ``None`` where the placements say them."""
    say = getattr(local_shard(tensor), "__create_chunk_list__", None) if isinstance(tensor, DTensor) else None
    return None if say is None else say()


def over_local(like: Tensor, local: Tensor) -> Tensor:
    """``local`` as a DTensor with the mesh, placements and global shape of ``like``; ``local`` if that is plain.

    The local tensor may live on another device than the mesh (host memory under a CUDA mesh) and may have another
    dtype than ``like``. Nothing is copied or moved. What the local tensor of ``like`` says of its chunks (Megatron's
    uneven DTensors, whose placements are nominal), one of the same shape says as well.
    """
    if not isinstance(like, DTensor):
        return local
    said = vars(like._local_tensor)
    if said and local.shape == like._local_tensor.shape and not local.is_meta:
        for name in _SAYS_CHUNKS & said.keys():
            if not hasattr(local, name):
                setattr(local, name, said[name])
    meta = like._spec.tensor_meta
    assert meta is not None, "a DTensor always knows its global shape"
    if meta.dtype == local.dtype:
        return DTensor(local, like._spec, requires_grad=False)  # specs are never written; making one takes longer
    spec = dataclasses.replace(like._spec, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def over_part(like: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``local`` as a DTensor of another global ``shape`` on the mesh of ``like``. Its placements say nothing then."""
    assert isinstance(like, DTensor), "only a DTensor has a mesh"
    stride = torch.empty(shape, device="meta").stride()
    spec = dataclasses.replace(like._spec, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def without_data(value: Tensor) -> Tensor:
    """A DTensor that only knows mesh, placements and global shape: something to pass to :func:`over_local`."""
    return over_local(value, torch.empty(0, dtype=value.dtype, device="meta"))


def placements_of(tensor: Tensor) -> object:
    """Mesh and placements, to be compared and shown; ``None`` for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def mesh_size(tensor: Tensor) -> int:
    """Ranks of the mesh of a DTensor; none for a plain tensor."""
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 0


def may_be_another_ranks(tensor: Tensor) -> bool:
    """Whether there are ranks outside of the mesh of ``tensor``, which may call another tensor by its name."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    return mesh_size(tensor) != dist.get_world_size()


def has_replicas(param: Tensor) -> bool:
    """Whether another rank may hold the same elements, and has to update them alike."""
    if not isinstance(param, DTensor):
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(ranks > 1 and not placement.is_shard() for placement, ranks in sizes)


def largest_local_numel(tensor: Tensor) -> int:
    """Elements of the largest local part over all ranks: the same figure on each of them."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if not placement.is_replicate():
            sizes[placement.dim] = -(-sizes[placement.dim] // ranks)  # type: ignore[attr-defined]
    return math.prod(sizes)


def is_host_offloaded(param: Tensor) -> bool:
    """Whether ``fully_shard`` itself keeps ``param`` on the host, under a mesh of another device."""
    return isinstance(param, DTensor) and param._local_tensor.device.type != param.device_mesh.device_type


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules to which ``fully_shard`` was applied, in registration order."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """FQNs of the model's parameters, sharded ones included, in registration order."""
    for module in fsdp_modules(model):
        # The root keeps its parameters gathered after a forward without backward; the optimizer has the shards.
        module.reshard()
    return {param: name for name, param in model.named_parameters()}


def parameters_of(model: nn.Module) -> set[Tensor]:
    """The model's parameters, and the shards of those that are gathered now. They stay gathered."""
    shards = {param.sharded_param for group in _param_groups(model) for param in group.fsdp_params}
    return shards.union(model.parameters())


def uses_cpu_offload_policy(model: nn.Module) -> bool:
    """Whether any module was sharded with ``offload_policy=CPUOffloadPolicy()``."""
    return any(isinstance(policy, CPUOffloadPolicy) for policy in _offload_policies(model))


def _offload_policies(model: nn.Module) -> Iterable[object]:
    return (getattr(group, "offload_policy", None) for group in _param_groups(model))


def _param_groups(model: nn.Module) -> list[Any]:
    """What ``fully_shard`` gathers and reduces together, in registration order."""
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


def _gradient_holders(model: nn.Module) -> Iterator[tuple[object, str]]:
    for group in _param_groups(model):
        holders = [(group, "_partial_reduce_output")]
        for param in group.fsdp_params:
            holders += [(param, "unsharded_accumulated_grad"), (getattr(param, "_unsharded_param", None), "grad")]
        yield from ((holder, name) for holder, name in holders if hasattr(holder, name))


def wait_for_updates(model: nn.Module) -> None:
    """Let the current stream wait for updates that still run; nobody holds the gradients for them any more."""
    for group in _param_groups(model):
        for before_gather, *_ in tuple(group.__dict__.get(_POINTS, ())):
            before_gather(None)


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
                "backward; use OffloadPolicy(prefetch='step', update='step', overlap_forward=False)"
            )
        self._group = group

    @property
    def params(self) -> list[Tensor]:
        """The sharded parameters: those that an optimizer has."""
        return [param.sharded_param for param in self._group.fsdp_params]

    def hook(
        self,
        before_gather: Callable[[torch.Stream | None], None],
        before_use: Callable[[bool], None],
        before_reduce: Callable[[], None],
        reduced: Callable[[object], None],
    ) -> Callable[[], None]:
        """Call these from now on; returns what ends it.

        Args:
            before_gather: the parameters are about to be read on this stream (``None``: the current one).
            before_use: the current stream is about to use them gathered; told whether in a backward.
            before_reduce: gradients are about to be reduced, if there are any.
            reduced: gradients have been reduced, once this event (of torch, or ``None`` on the CPU) has passed.
        """
        points = (before_gather, before_use, before_reduce, reduced)
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
                for before_gather, *_ in tuple(hooked):
                    before_gather(self._copy_in_stream(async_op))
            return unshard(async_op)

        @functools.wraps(wait_for_unshard)
        def waiting() -> Any:
            if group._all_gather_result is not None:
                # One rank alone reads the shards here, and not in unshard.
                in_backward = group._training_state.name == "PRE_BACKWARD"
                for _, before_use, *_ in tuple(hooked):
                    before_use(in_backward)
            return wait_for_unshard()

        @functools.wraps(post_backward)
        def reducing(*args: Any) -> Any:
            if self._has_gradients():
                for *_, before_reduce, _ in tuple(hooked):
                    before_reduce()
            before = self._gradient_versions()
            result = post_backward(*args)
            # Also called where there was nothing to reduce; and partial sums of HSDP are still to be reduced further.
            if self._gradient_versions() != before:
                for *_, reduced in tuple(hooked):
                    reduced(group._post_reduce_event)
            return result

        group.unshard, group.wait_for_unshard, group.post_backward = gathering, waiting, reducing

    def _has_gradients(self) -> bool:
        """Whether the backward has left any to be reduced or kept: it ends for groups that it did not reach, too."""
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
    *("fsdp_params", "comm_ctx", "is_unsharded", "_training_state"),
    *("_all_gather_result", "_post_reduce_event"),
)


def sharding_groups(model: nn.Module) -> list[ShardingGroup]:
    """All of them in the order in which a forward first needs them: the root's, then by registration.

    Raises:
        NotImplementedError: this torch's ``fully_shard`` has other hook points.
    """
    return [ShardingGroup(group) for group in _param_groups(model)]


def runs_in_backward() -> bool:
    """Whether autograd is at work in this thread: what is computed now is computed again."""
    graph_task = getattr(torch._C, "_current_graph_task_id", None)  # torch 2.11 to 2.13
    return graph_task is not None and graph_task() != -1


def unsupported_gradient(param: Tensor, grad: Tensor) -> str | None:
    """Why ``grad`` cannot be used shard by shard, or ``None``."""
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad._spec is param._spec:
        return None  # as fully_shard makes them; comparing placements costs more than the rest of the step's checks
    if local_shard(grad).layout != torch.strided:
        return f"its gradient is {local_shard(grad).layout}; only dense gradients can be streamed"
    if isinstance(param, DTensor) and (not isinstance(grad, DTensor) or grad.placements != param.placements):
        has = grad.placements if isinstance(grad, DTensor) else "no placements"
        return (
            f"its gradient has {has} where the parameter has {param.placements}; redistribute the gradient to the "
            "parameter's placements before step()"
        )
    return None


def foreach_supports(params: Iterable[Tensor]) -> bool:
    """Whether ``torch.optim`` would, of itself, run its foreach implementation on parameters of these types."""
    supported = getattr(sys.modules[torch.optim.Optimizer.__module__], "_foreach_supported_types", None)
    types = (Tensor, nn.Parameter, DTensor) if supported is None else supported
    return all(type(param) in types for param in params)


@contextmanager
def no_global_step_hooks() -> Iterator[None]:
    """Within it, hooks registered for all optimizers do not fire: a logical step has fired them already."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    tables = [getattr(module, name, {}) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")]
    kept = [dict(table) for table in tables]
    if not any(kept):
        yield
        return
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def run_hooked(
    optimizer: torch.optim.Optimizer, name: str, step: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run ``step`` as torch runs that of an optimizer: in a profiler's range, with the hooks around it.

    ``torch.optim.Optimizer.profile_hook_step`` would name the range after the offloaded class, which nobody looks for.

    Raises:
        RuntimeError: a pre-hook returned something else than ``None`` or new arguments.
    """
    module = sys.modules[torch.optim.Optimizer.__module__]
    with torch.autograd.profiler.record_function(f"Optimizer.step#{name}.step"):
        everyone = getattr(module, "_global_optimizer_pre_hooks", {})
        for hook in (*everyone.values(), *optimizer._optimizer_step_pre_hooks.values()):
            given = hook(optimizer, (optimizer, *args), kwargs)
            if given is None:
                continue
            if not isinstance(given, tuple) or len(given) != 2:
                raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {given}.")
            (_, *args), kwargs = given
        result = step(optimizer, *args, **kwargs)
        everyone = getattr(module, "_global_optimizer_post_hooks", {})
        for hook in (*optimizer._optimizer_step_post_hooks.values(), *everyone.values()):
            hook(optimizer, (optimizer, *args), kwargs)
        return result


def is_called_compiled() -> bool:
    """Whether the caller, a function that ``torch.compiler.disable`` has wrapped, was called by compiled code."""
    frame, wrappers = sys._getframe(1), 0
    for _ in range(12):
        wrappers += frame.f_code.co_filename.replace("\\", "/").endswith("torch/_dynamo/eval_frame.py")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return wrappers > 1  # one is that of disable()
