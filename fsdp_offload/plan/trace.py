"""One forward and backward of a model on the meta device: what it allocates, and what its kernels do.

::

    module on "meta" ──forward, backward──▶ segments (bytes by fully_shard group) and work (operations by kind)

Nothing is computed and nothing of the model's size is allocated, so a model of any size takes seconds. The order of
allocations and frees is that of autograd on any device: the bytes are those that a caching allocator counts.
"""

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

Checkpointing = Literal["none", "full"]
Phase = Literal["forward", "backward"]
Kind = Literal["matmul", "attention", "attention_backward", "pointwise", "uneven"]
"""Kinds of kernels: "pointwise" ones read and write memory in order and once; "uneven" ones reduce or rearrange."""

_ALLOCATION_BYTES = 512
"""CUDA's caching allocator hands out multiples of this."""


class Work(NamedTuple):
    """Work of one kernel; kernels of the same work are counted together."""

    kind: Kind
    flops: int
    nbytes: int  # read and written


@dataclass(frozen=True)
class Segment:
    """A part of an iteration: from one group's turn to the next one's.

    Attributes:
        phase: forward or backward.
        group: number of the ``fully_shard`` group whose turn it is.
        peak_bytes_by_label: what activations and gradients that are not reduced yet take when together they take
            most: "logits" are tensors as wide as the vocabulary, "attention scores" those with a value for each pair of
            tokens, "activations" all others.
        work: how often each kernel runs in it.
    """

    phase: Phase
    group: int
    peak_bytes_by_label: Mapping[str, int]
    work: Mapping[Work, int]

    @property
    def peak_bytes(self) -> int:
        """All of them."""
        return sum(self.peak_bytes_by_label.values())


@dataclass(frozen=True)
class Trace:
    """A forward and a backward of one micro-batch, segment by segment.

    Attributes:
        segments: in order.
        reduced: the groups in the order in which their gradients are final.
    """

    segments: tuple[Segment, ...]
    reduced: tuple[int, ...]

    def flops(self, phase: Phase) -> int:
        """Operations of matrix products and attention."""
        kernels = (item for one in self.segments if one.phase == phase for item in one.work.items())
        return sum(work.flops * count for work, count in kernels)


def trace(
    model: nn.Module,
    groups: Sequence[nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    *,
    compute_dtype: torch.dtype,
    checkpointing: Checkpointing = "none",
) -> Trace:
    """Run a forward and a backward on the meta device.

    Args:
        model: left as it is; a copy on the meta device is run.
        groups: what ``fully_shard`` is applied to; the last one is the root, which has the parameters that are left.
        loss_of: makes inputs on the meta device, calls the model and returns a scalar.
        compute_dtype: of gathered parameters, as ``MixedPrecisionPolicy.param_dtype``.
        checkpointing: ``"full"`` recomputes each group but the root in the backward.
    """
    names = {module: name for name, module in model.named_modules()}
    clone = _on_meta(model, compute_dtype).train()
    modules = dict(clone.named_modules())
    units = [modules[names[group]] for group in groups]
    if checkpointing == "full":
        for unit in units[:-1]:
            unit.forward = functools.partial(_recomputed, unit.forward)
    recorder = _Recorder(_widest(clone))
    with _hooked(units, recorder), _FusedKernels(), recorder:
        loss = loss_of(clone)
        recorder.phase = "backward"
        loss.backward()
    recorder.close()
    return Trace(tuple(recorder.segments), tuple(recorder.reduced))


def _widest(model: nn.Module) -> int:
    """The size of the vocabulary, if the model has one: the rows of its largest embedding."""
    return max((one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)), default=0)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _FusedKernels():  # the backward, in which this runs again, has taken it off
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _on_meta(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy the modules, with tensors that have no data."""
    memo: dict[int, Any] = {}
    for leaf in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(leaf, device="meta", dtype=dtype if leaf.is_floating_point() else None)
        memo[id(leaf)] = nn.Parameter(meta, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else meta
    return copy.deepcopy(model, memo)


@contextmanager
def _hooked(units: Sequence[nn.Module], recorder: "_Recorder") -> Iterator[None]:
    """Tell the recorder whose turn it is, and drop gradients where ``fully_shard`` reduces them."""
    owner: dict[nn.Parameter, int] = {}
    for number, unit in enumerate(units):
        for param in unit.parameters():
            owner.setdefault(param, number)
    handles = []
    for number, unit in enumerate(units):
        left: set[Tensor] = {param for param, group in owner.items() if group == number and param.requires_grad}

        def reduce(param: Tensor, number: int = number, waiting: set[Tensor] = left) -> None:
            waiting.discard(param)
            if not waiting:
                recorder.reduced.append(number)
                for other, group in owner.items():
                    if group == number:
                        other.grad = None

        handles += [param.register_post_accumulate_grad_hook(reduce) for param in left]
        handles.append(unit.register_forward_pre_hook(functools.partial(recorder.forward_turn, number)))
        handles.append(unit.register_forward_hook(functools.partial(recorder.watch_output, number)))
    yield
    for handle in handles:
        handle.remove()


class _Live:
    """Bytes of storages that exist, by label, and what they were when most existed."""

    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        """Begin a new peak at what is allocated now."""
        self.peak, self._peak_bytes = dict(self._now), self._now.total()

    def add(self, label: str, nbytes: int) -> None:
        """Add a storage that has come, or, with a negative size, gone."""
        self._now[label] += nbytes
        if nbytes > 0 and (now_bytes := self._now.total()) > self._peak_bytes:
            self.peak, self._peak_bytes = dict(self._now), now_bytes


@dataclass(eq=False)
class _Recorder(TorchDispatchMode):
    """Counts storages as they come and go, and the work of each operation."""

    vocabulary: int
    segments: list[Segment] = field(default_factory=list)
    reduced: list[int] = field(default_factory=list)
    phase: Phase = "forward"

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = _Live()
        self._seen = WeakIdKeyDictionary()
        self._turn: tuple[Phase, int] | None = None
        self._work: Counter[Work] = Counter()

    def forward_turn(self, number: int, module: nn.Module, args: object) -> None:
        """Begin a group's forward; in a backward, that is a recomputation."""
        if self.phase == "forward":
            self._begin(number)

    def watch_output(self, number: int, module: nn.Module, args: object, output: object) -> None:
        """Notice when the backward reaches what a group returned."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if self.phase == "forward" and tensors:
            tensors[0].register_hook(lambda grad: self._begin(number))

    def _begin(self, number: int) -> None:
        self.close()
        self._turn = (self.phase, number)

    def close(self) -> None:
        """Close the turn in progress."""
        if self._turn is not None:
            self.segments.append(Segment(*self._turn, self._live.peak, self._work))
            self._work = Counter()
        self._live.restart()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype is torch.bool  # a model looks at a value: conditions hold, and numbers are 0
        outputs = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        known = {leaf.untyped_storage()._cdata for leaf in read}
        fresh = [leaf for leaf in written if leaf.untyped_storage()._cdata not in known]
        for leaf in fresh:
            self._count(leaf)
        if (fresh or func._schema.is_mutable) and "empty" not in func._overloadpacket.__name__:
            self._work[_work(func, args, kwargs or {}, outputs, read, written)] += 1
        return outputs

    def _count(self, leaf: Tensor) -> None:
        storage = leaf.untyped_storage()
        if storage not in self._seen:
            nbytes = -(-storage.nbytes() // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
            label = self._label(leaf)
            self._live.add(label, nbytes)
            self._seen[storage] = weakref.finalize(storage, self._live.add, label, -nbytes)

    def _label(self, leaf: Tensor) -> str:
        if leaf.dim() > 1 and leaf.shape[-1] == self.vocabulary:
            return "logits"
        return "attention scores" if leaf.dim() > 3 and leaf.shape[-1] == leaf.shape[-2] else "activations"


_LOOKUPS = ("embedding", "index", "gather", "slice", "select")


def _work(
    func: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any, read: Sequence[Tensor], written: Sequence[Tensor]
) -> Work:
    name = func._overloadpacket.__name__
    nbytes = _read_bytes(name, read, written) + sum(map(_nbytes, written))
    if "flash_attention" in name:
        # Two products forward, five backward; grouped heads, which torch's own count does not know, change nothing.
        is_backward = "backward" in name
        query, key = args[1:3] if is_backward else args[:2]
        flops = (10 if is_backward else 4) * query.numel() * key.shape[2]
        causal = any(one is True for one in args)
        return Work("attention_backward" if is_backward else "attention", flops // 2 if causal else flops, nbytes)
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return Work("pointwise" if torch.Tag.pointwise in func.tags else "uneven", 0, nbytes)
    return Work("matmul", count(*args, **kwargs, out_val=outputs), nbytes)


def _read_bytes(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Estimate the bytes that a kernel reads of its inputs."""
    nbytes = sum(map(_nbytes, read))
    if "nll_loss" in name:
        return 0  # one logit of each row
    if any(word in name for word in _LOOKUPS):
        return min(nbytes, 2 * sum(map(_nbytes, written)))  # not all of the table
    return 2 * nbytes if name == "native_layer_norm_backward" else nbytes  # for the input's gradient, and the weight's


def _nbytes(leaf: Tensor) -> int:
    return leaf.numel() * leaf.element_size()


class _FusedKernels(TorchFunctionMode):
    """Lets attention and norms keep what fused kernels keep: on the meta device they would be taken apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = _FUSED.get(func, func)
        return fused(*args, **(kwargs or {}))


class _RMSNorm(torch.autograd.Function):
    """Reads, writes and keeps what the CUDA kernel does; the values mean nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, deviation = ctx.saved_tensors
        masks = [True, weight is not None, False]
        found = torch.ops.aten.native_layer_norm_backward(
            grads[0], x, x.shape[-1:], deviation, deviation, weight, None, masks
        )
        return found[:2]


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _RMSNorm.apply(x, weight)  # type: ignore[no-any-return,no-untyped-call]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    causal = is_causal or attn_mask is not None
    flash = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, causal, scale=scale)
    return flash[0]  # type: ignore[no-any-return]


_FUSED: dict[Any, Callable[..., Any]] = {
    nn.functional.scaled_dot_product_attention: _attention,
    nn.functional.rms_norm: _rms_norm,
}
