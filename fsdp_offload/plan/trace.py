"""Trace one forward and backward of a model on the meta device: its allocations, and the work of its kernels.

The trace computes nothing and allocates nothing of the model's size. Autograd allocates and frees in the same order on
every device; the bytes are those that a caching allocator counts.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

Phase = Literal["forward", "backward"]
Kind = Literal["matmul", "attention", "attention_backward", "pointwise", "uneven", "exchange"]
"""Kinds of kernels: "pointwise" ones read and write in order and once; "uneven" ones do not; "exchange": all-to-all."""

_ALLOCATION_BYTES = 512  # unit of CUDA's caching allocator


class Work(NamedTuple):
    """Kernels of one kind in a segment: their number, operations, and bytes read and written."""

    kernels: int = 0
    flops: int = 0
    nbytes: int = 0
    heads: int = 0  # of attention: sequences × heads


class Segment(NamedTuple):
    """Turn of one ``fully_shard`` group, until the next group's turn begins."""

    phase: Phase
    group: int
    peak_bytes: int  # of activations, and of gradients that are not reduced yet
    added_bytes: int  # live bytes at the end of the turn, less those at its beginning
    work: dict[Kind, Work]


Trace = tuple[Segment, ...]
"""A forward and a backward of one micro-batch."""


def trace(
    model: nn.Module,
    groups: Sequence[nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    compute_dtype: torch.dtype,
    recomputes: bool = False,
) -> Trace:
    """Run a forward and a backward of a copy of the model on the meta device; ``loss_of`` makes the inputs there.

    The last of ``groups`` is the root, with the parameters of no other group; ``recomputes``: checkpoint the others.
    """
    memo: dict[int, Any] = {}  # copies of tensors on the meta device
    for leaf in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(leaf, device="meta", dtype=compute_dtype if leaf.is_floating_point() else None)
        memo[id(leaf)] = nn.Parameter(meta, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else meta
    clone = copy.deepcopy(model, memo).train()
    units = [memo[id(group)] for group in groups]
    for unit in units[:-1] if recomputes else ():
        unit.forward = functools.partial(_recomputed, unit.forward)
    recorder = _Recorder(units)
    with _FusedKernels(), recorder:
        loss = loss_of(clone)
        recorder.phase = "backward"
        loss.backward()
    recorder.turn_to(None)
    return tuple(recorder.segments)


def blocks_of(trace: Trace, recomputed: Trace) -> list[int]:
    """List the groups whose activations shrink if they are recomputed, in forward order."""
    pairs = [pair for pair in zip(trace, recomputed, strict=True) if pair[0].phase == "forward"]
    return [one.group for one, other in pairs if other.added_bytes < one.added_bytes]


def joined(trace: Trace, recomputed: Trace, groups: Collection[int]) -> Trace:
    """Combine traces without and with full recomputation into the trace of a model that recomputes ``groups``."""
    made, live_bytes, alone_bytes = [], 0, [0, 0]
    for pair in zip(trace, recomputed, strict=True):
        at = int(pair[0].group in groups)
        made.append(pair[at]._replace(peak_bytes=pair[at].peak_bytes - alone_bytes[at] + live_bytes))
        live_bytes += pair[at].added_bytes
        alone_bytes = [nbytes + one.added_bytes for nbytes, one in zip(alone_bytes, pair, strict=True)]
    return tuple(made)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _FusedKernels():  # not active in the backward, which runs this again
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _Recorder(TorchDispatchMode):
    """Counts the storages that are alive, and the work of operations, in each turn of a group."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: list[Segment] = []
        self.phase: Phase = "forward"
        self._live_bytes = self._peak_bytes = self._begin_bytes = 0
        self._seen = WeakIdKeyDictionary()
        self._turn: tuple[Phase, int] | None = None
        self._work: dict[Kind, Work] = {}
        self._calls: dict[Any, Any] = {}  # by operation and arguments: the new tensor, and the work
        owned: set[nn.Parameter] = set()
        for number, unit in enumerate(units):
            own = {param for param in unit.parameters() if param not in owned and param.requires_grad}
            owned |= own
            drop = functools.partial(_drop_together, own, set(own))
            for param in own:
                param.register_post_accumulate_grad_hook(drop)
            unit.register_forward_pre_hook(functools.partial(self._forward_begins, number))
            unit.register_forward_hook(functools.partial(self._forward_ends, number))

    def _forward_begins(self, number: int, module: nn.Module, args: object) -> None:
        if self.phase == "forward":  # else the group's backward recomputes it
            self.turn_to(number)

    def _forward_ends(self, number: int, module: nn.Module, args: object, output: object) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if self.phase == "forward" and tensors:
            tensors[0].register_hook(lambda grad: self.turn_to(number))  # the group's backward begins

    def turn_to(self, number: int | None) -> None:
        """End the current turn, and begin that of group ``number``."""
        if self._turn is not None:
            added_bytes = self._live_bytes - self._begin_bytes
            self.segments.append(Segment(*self._turn, self._peak_bytes, added_bytes, self._work))
            self._work = {}
        self._turn = None if number is None else (self.phase, number)
        self._peak_bytes = self._begin_bytes = self._live_bytes

    def _add(self, nbytes: int) -> None:
        self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype is torch.bool  # the model reads a value: let conditions hold, and numbers be 0
        call = (func, _key_of(args), _key_of(kwargs)) if _makes_new(func) else None
        if call in self._calls:  # blocks repeat calls, and torch is slow to infer in Python what a call makes
            how, dtype, *done = self._calls[call]
            outputs = torch.empty_strided(*how, dtype=dtype, device="meta")
            self._allocate([outputs])
            self._count(*done)
            return outputs
        outputs = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        held = {leaf.untyped_storage()._cdata for leaf in read}
        fresh = [leaf for leaf in written if leaf.untyped_storage()._cdata not in held]
        self._allocate(fresh)
        if (fresh or func._schema.is_mutable) and "empty" not in func._overloadpacket.__name__:
            done = _work_of(func, args, kwargs or {}, outputs, read, written)
            self._count(*done)
            if call is not None and outputs.is_meta and outputs.untyped_storage().nbytes() == outputs.nbytes:
                self._calls[call] = (outputs.shape, outputs.stride()), outputs.dtype, *done
        return outputs

    def _allocate(self, tensors: Sequence[Tensor]) -> None:
        for storage in (one.untyped_storage() for one in tensors):
            if storage not in self._seen:
                allocated = -(-storage.nbytes() // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
                self._add(allocated)
                self._seen[storage] = weakref.finalize(storage, self._add, -allocated)

    def _count(self, kind: Kind, work: Work) -> None:
        self._work[kind] = Work(*map(sum, zip(work, self._work.get(kind, Work()), strict=True)))


@functools.cache
def _makes_new(func: Any) -> bool:
    """Return whether ``func`` only makes one new tensor."""
    returns, is_mutable = func._schema.returns, func._schema.is_mutable
    return not is_mutable and [(one.type.kind(), one.alias_info) for one in returns] == [("TensorType", None)]


def _key_of(value: Any) -> Any:
    """Return what the outputs of an operation on the meta device depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, dict):
        return tuple([(name, _key_of(one)) for name, one in value.items()])
    return tuple(map(_key_of, value)) if isinstance(value, list | tuple) else (type(value), value)


def _drop_together(params: set[nn.Parameter], left: set[nn.Parameter], param: nn.Parameter) -> None:
    """Drop a group's gradients when the last one ``left`` arrives, where ``fully_shard`` would reduce them."""
    left.discard(param)
    for one in () if left else params:
        one.grad = None


def _work_of(
    func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any, read: Sequence[Tensor], written: Sequence[Tensor]
) -> tuple[Kind, Work]:
    """Return the kind of a kernel, and estimate its operations and the bytes that it reads and writes."""
    name = func._overloadpacket.__name__
    read_bytes, written_bytes = (sum(leaf.numel() * leaf.element_size() for leaf in one) for one in (read, written))
    if "nll_loss" in name:
        read_bytes = 0  # one logit of each row
    elif any(word in name for word in ("embedding", "index", "gather", "slice", "select")):
        read_bytes = min(read_bytes, 2 * written_bytes)  # not all of the table
    elif name == "native_layer_norm_backward":
        read_bytes *= 2  # once for the input's gradient, once for the weight's
    kind: Kind = "pointwise" if torch.Tag.pointwise in func.tags else "exchange" if name == "roll" else "uneven"
    flops = heads = 0
    if "flash_attention" in name:
        # Two products forward, five backward. torch's own count does not know grouped heads; they change nothing here.
        kind = "attention_backward" if "backward" in name else "attention"
        query, key = args[1:3] if kind == "attention_backward" else args[:2]
        flops = (10 if kind == "attention_backward" else 4) * query.numel() * key.shape[2]
        flops //= 2 if any(one is True for one in args) else 1  # causal
        heads = query.shape[0] * query.shape[1]
    elif count := flop_registry.get(func._overloadpacket):
        kind, flops = "matmul", count(*args, **kwargs, out_val=outputs)
    return kind, Work(1, flops, read_bytes + written_bytes, heads)


class _FusedKernels(TorchFunctionMode):
    """Makes attention and norms keep what fused kernels keep; the meta device would decompose them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    causal, scale = options.get("is_causal", False) or attn_mask is not None, options.get("scale")
    flash = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, causal, scale=scale)
    return flash[0][..., : value.shape[-1]]  # type: ignore[no-any-return]


_FUSED: dict[Any, Callable[..., Any]] = {
    nn.functional.scaled_dot_product_attention: _attention,
    # A layer norm's kernel keeps 4 bytes more of each row, its mean.
    nn.functional.rms_norm: lambda x, shape, weight=None, eps=None: nn.functional.layer_norm(x, shape, weight),
}
