"""Megatron-Bridge #4217: the three call sites in Bridge's loop, where the flag had been a silent no-op."""

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_offload import (
    OffloadPolicy,
    offload_optimizer,
    offload_states,
    release_states,
    reload_before,
    reload_states,
    remove_offload,
)
from tests.cpu.test_megatron_chain import (
    POLICY,
    STAYING,
    ChainedOptimizer,
    DistributedOptimizer,
    Loop,
    Stub,
    assert_same,
)
from tests.pages import blocks_of
from tests.seeds import bridge

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer")

PHASES = (offload_states, release_states, reload_states)


# Wrapped once --------------------------------------------------------------------------------------------------------


def test_model_chunks_that_share_a_config_are_wrapped_once_and_others_each(calls: list[object]) -> None:
    loop = Loop(True, nested=True)  # a chain in a chain, with a stub
    configs = [SimpleNamespace(finalize=lambda: calls.append("finalize")) for _ in range(2)]
    chunks = [configs[0], configs[1], configs[0]]
    for config in chunks:
        config.finalize = reload_before(config.finalize, loop.optimizer)
    for config in configs:
        config.finalize()
    assert calls == 2 * [loop.dense.optimizer, loop.experts.optimizer, "finalize"]


# What was bound stays ------------------------------------------------------------------------------------------------


def bound_in(calls: list[Any]) -> dict[str, Callable[..., str]]:
    """What Bridge binds: ``partial(finalize_model_grads, pg_collection=...)``, that of MIMO models, and plain ones."""

    def finalize(*args: object, **kwargs: object) -> str:
        calls.append((args, kwargs))
        return "result"

    return {
        "function": finalize,
        "process groups": functools.partial(finalize, pg_collection="groups"),
        "MIMO": functools.partial(functools.partial(finalize, infos="modules"), pg_collection="groups"),
    }


@pytest.mark.parametrize("kind", bound_in([]))
def test_the_partial_that_was_bound_is_called_with_its_arguments(kind: str) -> None:
    calls: list[Any] = []
    bound, loop = bound_in(calls)[kind], Loop(True)
    assert bound(["model"], 3, force_all_reduce=False) == "result"
    assert reload_before(bound, loop.optimizer)(["model"], 3, force_all_reduce=False) == "result"
    assert calls[0] == calls[1]
    assert ("pg_collection" in calls[0][1]) == (kind != "function")


def test_groups_that_are_bound_to_the_wrapper_later_do_not_hide_it(calls: list[object]) -> None:
    loop = Loop(True)
    wrapped = functools.partial(reload_before(bound_in(calls)["function"], loop.optimizer), pg_collection="groups")
    assert reload_before(wrapped, loop.optimizer) is wrapped
    assert wrapped(["model"]) == "result"
    assert calls == [loop.dense.optimizer, loop.experts.optimizer, ((["model"],), {"pg_collection": "groups"})]


# Never silently inert ------------------------------------------------------------------------------------------------


def chains() -> dict[str, Callable[[], Any]]:
    def half() -> Any:
        loop = Loop(False)
        offload_optimizer(loop.dense, policy=POLICY)
        return loop.optimizer

    def removed() -> Any:
        return remove_offload(Loop(True).optimizer)

    return {
        "none is offloaded": lambda: Loop(False).optimizer,
        "one of two is": half,
        "it was removed": removed,
        "stubs only": lambda: ChainedOptimizer([Stub(), Stub()]),
        "an empty chain": lambda: ChainedOptimizer([]),
    }


@pytest.mark.parametrize("chain", chains())
@pytest.mark.parametrize("what", ["hook", *PHASES], ids=lambda what: getattr(what, "__name__", what))
def test_a_chain_in_which_nothing_is_offloaded_is_an_error_at_each_call_site(what: Any, chain: str) -> None:
    optimizer = chains()[chain]()
    call = functools.partial(reload_before, lambda: None) if what == "hook" else what
    with pytest.raises(TypeError, match=r"is not offloaded; call offload_optimizer\(\) first|that holds some, got"):
        call(optimizer)


# Bridge's loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [POLICY, STAYING], ids=["streams", "stays"])
def test_a_step_that_is_run_again_or_skipped_calls_the_sites_again(policy: OffloadPolicy) -> None:
    """The loop body runs once more when the rerun machinery says so: every site twice, before one step.

    So it does behind an overflow: gradients are final and state is on its way back, and then there is no step.
    """
    on, off = Loop(True, policy), Loop(False)
    for number in range(5):
        for skipped in (True, False) if number % 2 else (False,):
            with pytest.MonkeyPatch.context() as patch:
                if skipped:
                    patch.setattr(DistributedOptimizer, "step", lambda self: None)
                for loop in (on, off):
                    loop.train_step(number)
            assert_same(on, off)


class BridgeLoop(Loop):
    """A loop whose phases are called by the callback of our page, or by nobody."""

    def __init__(self) -> None:
        super().__init__(flag=False)
        config = SimpleNamespace(finalize_model_grads_func=self.finalize)
        self.chunks = [SimpleNamespace(module=SimpleNamespace(config=config), config=config)]
        self.mains_bytes: list[int] = []

    def forward_step(self, state: Any, data_iterator: Iterator[int], model: Any) -> Tensor:
        assert state is not None
        assert model is self.chunks[0]
        self.mains_bytes.append(sum(main.untyped_storage().nbytes() for main in self.dense.mains))
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(next(data_iterator)))
        return self.model[1](self.model[0](x.bfloat16()).float()).square().mean()


def test_the_callback_of_the_page_trains_the_same_bits(monkeypatch: pytest.MonkeyPatch, calls: list[object]) -> None:
    for name in ("bridge", "bridge.training"):
        monkeypatch.setitem(sys.modules, f"megatron.{name}", ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.bridge.training.callbacks", bridge)
    utils = SimpleNamespace(get_model_config=lambda model: model.module.config)  # as it looks through wrappers
    monkeypatch.setitem(sys.modules, "megatron.core.utils", utils)
    (code,) = (block.code for block in blocks_of("docs/megatron.md") if "import Callback" in block.code)
    on, off = BridgeLoop(), BridgeLoop()
    exec(code, {"config": on, "forward_step_func": on.forward_step, "pretrain": bridge.pretrain})
    bridge.pretrain(off, off.forward_step)
    assert_same(on, off)
    assert on.mains_bytes == 8 * [0]
    assert all(off.mains_bytes)
    assert len(calls) == 4 * 2
    assert on.calls == off.calls
