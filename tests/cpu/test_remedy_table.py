"""The table of remedies: each refusal is provoked, what its message says is done, and training goes on."""

import ast
import copy
import functools
import pickle
import re
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import fsdp_offload
from fsdp_offload import add_masters, is_offloaded, offload_optimizer, remove_offload
from fsdp_offload import checkpoint as ours
from fsdp_offload.checkpoint import arena_stager
from fsdp_offload.listeners import weight_deltas, weights  # noqa: F401  # the first in rows
from tests.remedies import Script, Whole, integration, seen_of  # noqa: F401  # of a class, in rows

IGNORED = (
    "offload_optimizer. The parameters are on the CPU",
    "offload_optimizer. NOTHING IS OFFLOADED. all of the state fits",
    "DTensor random operators may not have complete support",
)
pytestmark = [
    pytest.mark.usefixtures("mesh"),
    pytest.mark.filterwarnings(
        *(f"ignore:{one}" for one in (*IGNORED, "offload_optimizer. Whole is not in the table"))
    ),
]

PACKAGE = Path(fsdp_offload.__file__).parent
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Story = Callable[[Path], Generator[Callable[[], object], Any, Any]]
TABLE: dict[str, Story] = {}
"""By what the message says to do: yields what is refused, does what is said, and returns the script, which trains."""


def remedy(words: str) -> Callable[[Story], Story]:
    def add(story: Story) -> Story:
        assert words not in TABLE
        TABLE[words] = story
        return story

    return add


# Attaching ------------------------------------------------------------------------------------------------------------


@remedy("Train with one of them: call remove_offload() on the other")
def two_that_step(_: Path) -> Any:
    script = Script()
    script.attach(overlap="iteration")
    script.train(4)
    other = SGD(script.model.parameters())
    for param in script.model.parameters():
        param.grad = torch.ones_like(param)
    yield other.step
    script.optimizer.zero_grad()
    remove_offload(script.optimizer)
    script.optimizer = offload_optimizer(other, model=script.model)
    return script


def megatron(script: Script, **flags: Any) -> Any:
    config = SimpleNamespace(**flags)
    return SimpleNamespace(optimizer=script.optimizer, config=config, zero_grad=script.optimizer.zero_grad)


@remedy("Leave both off; offload_states(), release_states() and reload_before() do the same")
def megatrons_own(_: Path) -> Any:
    script = Script(shard=False)
    yield lambda: offload_optimizer(megatron(script, offload_optimizer_states=True))
    holder = megatron(script)
    offload_optimizer(holder)
    script.train()
    fsdp_offload.offload_states(holder)
    fsdp_offload.release_states(holder)
    script.backward()
    fsdp_offload.reload_before(None, holder)()
    return script


class Around(Optimizer):
    def __init__(self, params: Any) -> None:
        self.fast = torch.optim.NAdam(params)
        super().__init__(self.fast.param_groups, {})


def twice(params: Any) -> Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SGD([*(listed := list(params)), listed[0]])


@remedy("Leave out model= and overlap=; to load while gradients are reduced, wrap Megatron's hook by reload_before()")
def masters_of_a_framework(_: Path) -> Any:
    script = Script(shard=False)
    copies = [param.detach().clone().requires_grad_() for param in script.model.parameters()]
    script.optimizer = SGD(copies)
    yield lambda: script.attach(overlap="forward")
    offload_optimizer(script.optimizer)
    hook = fsdp_offload.reload_before(None, script.optimizer)
    for _step in range(4):
        for one in copies:
            one.grad = torch.ones_like(one)
        hook()
        script.optimizer.step()
    return None


@remedy(
    "Materialize the model (to_empty; for OffloadPolicy(parameters=True), materialize_on_host) before the optimizer"
)
def on_meta(_: Path) -> Any:
    with torch.device("meta"):
        script = Script()
    yield script.attach
    script.model.to_empty(device="cpu")
    for module in (script.model[0], script.model[2]):
        module.reset_parameters()
    script.optimizer = SGD(script.model.parameters())
    return script.attach()


# Warnings at attach ---------------------------------------------------------------------------------------------------


@remedy("NOTHING IS OFFLOADED. Attach to the one that steps: call fully_shard(model), build the optimizer, then")
def another_that_steps(_: Path) -> Any:
    script = Script(attach=True)
    attached, script.optimizer = script.optimizer, SGD(script.model.parameters())
    yield lambda: script.train(1)
    del attached
    return script.attach()


# Masters --------------------------------------------------------------------------------------------------------------


def in_bf16(make: Any = torch.optim.AdamW, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Script:
    script = Script(shard=False)
    script.model.to(dtype)
    script.dtype = dtype
    fully_shard(script.model)
    script.optimizer = make(script.model.parameters(), **options)
    return script


@remedy("After training has begun, call remove_offload(optimizer) before these lines")
def masters_after_attaching(_: Path) -> Any:
    script = in_bf16()
    script.attach()
    script.train()
    with pytest.raises(RuntimeError) as error:
        add_masters(script.optimizer, "fp32")
    yield lambda: add_masters(script.optimizer, "fp32")
    remove_offload(script.optimizer)
    for line in str(error.value).splitlines()[1:-1]:
        exec(line.strip(), {**vars(fsdp_offload), **vars(script)})
    return script


# The optimizer --------------------------------------------------------------------------------------------------------


@remedy("Use state_dict(), or call remove_offload() first")
def copies(_: Path) -> Any:
    script = Script(attach=True)
    script.train()
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(script.optimizer)
    yield lambda: copy.deepcopy(script.optimizer)
    assert copy.deepcopy(script.optimizer.state_dict())["state"]
    remove_offload(script.optimizer)
    copy.deepcopy(script.optimizer)
    return script.attach()


@remedy("After a load (of the model as well), go on with zero_grad() and another backward")
def a_load_between(_: Path) -> Any:
    script = Script()
    script.attach(overlap="iteration")
    script.train(5)
    saved = copy.deepcopy(script.optimizer.state_dict())
    script.backward()
    script.optimizer.load_state_dict(saved)
    weights = script.weights()
    yield script.optimizer.step
    assert all(map(torch.equal, weights, script.weights()))
    script.optimizer.zero_grad()
    return script


# Checkpoints ----------------------------------------------------------------------------------------------------------


def saved_script(path: Path, make: Any = torch.optim.AdamW, **options: Any) -> Script:
    """A fresh script, and in ``path`` what another like it has saved after training."""
    script = Script(make, attach=True, **options)
    script.train()
    if not path.exists() or not any(path.iterdir()):
        ours.save({"o": script.get()}, checkpoint_id=path)
    return Script(make, attach=True, **options)


def resumed(
    script: Script, path: Path, load: Callable[..., object] = ours.load, beside: Any = (), **options: Any
) -> Script:
    load(state := {"o": script.template(), **dict(beside)}, checkpoint_id=path, **options)
    script.set(state["o"])
    return script


def trained_script() -> tuple[Script, dict[str, Any]]:
    """An offloaded one, and what it saves."""
    script = Script(attach=True)
    script.train()
    return script, {"o": script.get()}


@remedy("use AsyncCheckpointerType.THREAD, or DefaultStager")
def a_staged_dict_for_another_process(path: Path) -> Any:
    script, state = trained_script()
    stager = ours.ArenaStager(script.optimizer)
    staged = [stager.stage(state)]
    yield lambda: pickle.dumps(staged[0])
    staged.clear()
    kind = dcp.state_dict_saver.AsyncCheckpointerType.THREAD
    dcp.async_save(state, checkpoint_id=path, async_stager=stager, async_checkpointer_type=kind).result()
    stager.close()
    return script


@remedy("Let go of the future of an async_save that failed, and of what ArenaStager.stage() has returned")
def staged_and_never_written(path: Path) -> Any:
    script, state = trained_script()
    stager = ours.ArenaStager(script.optimizer)
    staged = [stager.stage(state)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_stager, "_BEGIN_SECONDS", 0.02)
        yield lambda: stager.stage(state)
    staged.clear()
    dcp.async_save(state, checkpoint_id=path, async_stager=stager).result()
    stager.close()
    return script


@remedy("optimizer.load_state_dict(), or replace them by the names of the optimizer's parameters, in their order")
def numbers_for_names(_: Path) -> Any:
    script = Script(attach=True)
    script.train()
    saved = copy.deepcopy(script.optimizer.state_dict())
    yield lambda: script.set(saved)
    script.optimizer.load_state_dict(saved)
    for state in saved["state"].values():  # a full one, as of one GPU
        state |= {name: value.full_tensor() for name, value in state.items() if value.dim()}
    with pytest.raises(ValueError, match="pass a full one, by names, to fsdp_offload"):
        script.optimizer.load_state_dict(saved)
    names = [name for name, _ in script.model.named_parameters()]
    state = {names[number]: values for number, values in saved["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    script.set({"state": state, "param_groups": groups})
    return script


@remedy("Write dcp.save(state_dict, checkpoint_id=path, planner=SavePlanner())")
def saved_by_a_load_planner(path: Path) -> Any:
    script = Script(attach=True)
    state_dict = {"m": script.model.state_dict()}

    def save() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a planner without storage_meta
            dcp.save(state_dict, checkpoint_id=path, planner=ours.LoadPlanner())

    yield save
    dcp.save(state_dict, checkpoint_id=path, planner=ours.SavePlanner())
    return script


@remedy("Write ArenaStager(optimizer), with all whose state is saved")
def a_stager_of_another(path: Path) -> Any:
    script, state = trained_script()
    for given in ((), (Script(attach=True).optimizer,)):
        with pytest.raises(ValueError, match="that the stager was not given"):
            ours.ArenaStager(*given).stage(state)
    yield lambda: ours.ArenaStager().stage(state)
    for number, given in enumerate((script.optimizer, [script.optimizer])):
        stager = ours.ArenaStager(given)
        dcp.async_save(state, checkpoint_id=path / str(number), async_stager=stager).result()
        stager.close()
    return script


@remedy("Load it into optimizer.state_dict() after a step, which makes it; then save what get_optimizer_state_dict")
def saved_by_number(path: Path) -> Any:
    script = Script(attach=True)
    script.train()
    numbered = {"m": script.model.state_dict(), "o": script.optimizer.state_dict()}
    ours.save(numbered, checkpoint_id=path / "by number")
    resumed = Script(attach=True)
    by_name = {"m": resumed.model.state_dict(), "o": resumed.template()}
    yield lambda: ours.load(by_name, checkpoint_id=path / "by number")
    resumed.train(1)
    state = {"m": resumed.model.state_dict(), "o": resumed.optimizer.state_dict()}
    ours.load(state, checkpoint_id=path / "by number")
    resumed.optimizer.load_state_dict(state["o"])
    script.train()
    resumed.train()
    assert all(map(torch.equal, script.weights(), resumed.weights()))
    ours.save({"o": resumed.get()}, checkpoint_id=path / "by name")
    return resumed


@remedy("Was it copied in part? Copy it again")
def copied_in_part(path: Path) -> Any:
    script = saved_script(path)
    (file,) = path.glob("*.distcp")
    content = file.read_bytes()
    file.unlink()
    yield lambda: ours.load({"o": script.template()}, checkpoint_id=path)
    file.write_bytes(content)
    return resumed(script, path)


@remedy("Leave out enable_consolidation, or save with FileSystemWriter")
def consolidated(path: Path) -> Any:
    pytest.importorskip("safetensors")
    script = Script(attach=True)
    script.train()
    state = script.get(flatten_optimizer_state_dict=True)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    writer = functools.partial(dcp.HuggingFaceStorageWriter, str(path / "h"))
    yield lambda: ours.save(tensors, storage_writer=writer(enable_consolidation=True))
    ours.save(tensors, storage_writer=writer())
    ours.save(state, storage_writer=dcp.FileSystemWriter(path / "f"))
    return script


# State dicts ----------------------------------------------------------------------------------------------------------


@remedy("Load all of it, or take 0.bias out of the state dict")
def loaded_in_part(path: Path) -> Any:
    script = saved_script(path)
    template = script.template()
    template["state"]["0.bias"]["exp_avg"].zero_()
    planner = ours.LoadPlanner(allow_extra=True)
    part = {"o": {"state": {n: s for n, s in template["state"].items() if n != "0.bias"}}}
    ours.load(part, checkpoint_id=path, planner=planner)
    yield lambda: script.set(template)
    del template["state"]["0.bias"]
    script.set(template)
    return script


@remedy("Build groups that do not mix them")
def groups_that_mix(_: Path) -> Any:
    def two(params: Any) -> Optimizer:
        first, *others = params
        return SGD([{"params": [first], "lr": 0.3}, {"params": others}])

    script = Script(two, attach=True)
    script.train()
    state = script.get(flatten_optimizer_state_dict=True, cpu_offload=True)
    mixed = Script(SGD, attach=True)
    yield lambda: mixed.set(state)
    script = Script(two, attach=True)
    script.set(state)
    return script


# Integrations ---------------------------------------------------------------------------------------------------------

ACCELERATOR: Any = SimpleNamespace(prepare=lambda *objects: objects, clip_grad_norm_=lambda *_: None)


@remedy("Write model, optimizer = prepare(accelerator, model, AdamW(model.parameters())). Parameters of a loss go into")
def prepared_with_anothers(_: Path) -> Any:
    prepare = integration("accelerate").prepare
    accelerator: Any = SimpleNamespace(**vars(ACCELERATOR), is_fsdp2=True)
    script, other = Script(), Script()
    with pytest.raises(
        ValueError, match=r"prepare: 3 of the 3 .* the first is param_groups\[0\].params\[0\], of shape \(9, 7\)"
    ):
        prepare(accelerator, script.model, script.optimizer, other.optimizer)
    loss = torch.nn.Parameter(torch.ones(2))
    yield lambda: prepare(accelerator, script.model, torch.optim.AdamW([*script.model.parameters(), loss]))
    part = torch.optim.AdamW([next(script.model.parameters())])
    whole = torch.optim.AdamW(script.model.parameters())
    _, script.optimizer, _ = prepare(accelerator, script.model, whole, part)
    return script


@remedy("As it is, nothing trains the model")
def prepared_and_idle(_: Path) -> Any:
    prepare = integration("accelerate").prepare
    script, other, loss = Script(), Script(), SGD([torch.nn.Parameter(torch.ones(2))])
    yield lambda: prepare(ACCELERATOR, script.model, other.optimizer)
    script, other = Script(), Script()
    prepare(ACCELERATOR, other.model, script.model, script.optimizer, SGD(other.model.parameters()), loss)
    frozen = Script().model.requires_grad_(requires_grad=False)
    prepare(ACCELERATOR, frozen, SGD([torch.nn.Parameter(torch.ones(2))]))
    return script


@remedy("Write optimizer = setup_optimizers(fabric, model, optimizer)")
def set_up_without_a_fabric(_: Path) -> Any:
    setup_optimizers = integration("lightning").setup_optimizers
    script, strategy = Script(), SimpleNamespace(clip_gradients_norm=lambda *_: None)
    fabric: Any = SimpleNamespace(setup_optimizers=lambda *given: given[0], strategy=strategy)
    for given in ((fabric, script.optimizer), (script.model, script.optimizer)):
        with pytest.raises(TypeError, match="setup_optimizers"):
            setup_optimizers(*given)
    yield lambda: setup_optimizers(script.model, script.optimizer, fabric)
    script.optimizer = setup_optimizers(fabric, script.model, script.optimizer)
    return script


@remedy("call offload_container(self, policy) at the end of that container's __init__")
def a_container_of_a_users(_: Path) -> Any:
    torchtitan = integration("torchtitan")
    theirs: Any = torchtitan.OptimizersContainer

    class Own(theirs):
        def __init__(self, script: Script, policy: Any) -> None:
            self.optimizers, self.model_parts = [script.optimizer], [script.model]
            Optimizer.__init__(self, list(script.model.parameters()), {})
            torchtitan.offload_container(self, policy)

    script = Script()
    yield lambda: torchtitan.offloaded(SimpleNamespace())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchtitan.titan, "clip_grad_norm_", torchtitan.titan.clip_grad_norm_)
        Own(script, {"overlap": "forward"})
    return script


# Listeners ------------------------------------------------------------------------------------------------------------


@remedy("Loop behind the step() of the last one; if it makes none this time, call its zero_grad() first")
def weights_between_two_steps(_: Path) -> Any:
    script = Script(lambda params: torch.optim.AdamW([*params][:1])).attach(parameters=True)
    other = torch.optim.AdamW([*script.model.parameters()][1:])
    offload_optimizer(other, model=script.model, policy={"parameters": True})
    script.backward()
    other.step()
    yield lambda: [*weights(script.model)]
    script.optimizer.zero_grad()
    assert len([name for name, _ in weights(script.model)]) == 3
    return script


# In short: a script, what is refused of it, and what is done as it is said --------------------------------------------


def built(script: Script, make: Callable[..., Optimizer], **policy: Any) -> Script:
    """Attach another optimizer of its model."""
    script.optimizer = offload_optimizer(make(script.model.parameters()), model=script.model, policy=policy)
    return script


def mastered(script: Script, *kind: Any) -> Script:
    add_masters(script.optimizer, *kind)
    return script.attach()


def sharded_behind(**options: Any) -> Script:
    script = Script(shard=False)
    fully_shard(script.model, **options)
    return script


def materialized(make: Callable[..., Optimizer]) -> Script:
    with torch.device("meta"):
        script = Script()
    fsdp_offload.materialize_on_host(script.model)
    script.optimizer = make(script.model.parameters())
    return script


def again(script: Script, **options: Any) -> None:
    offload_optimizer(script.optimizer, model=script.model, policy={"overlap": "forward"}, **options)


def of_more(script: Script) -> dict[str, Any]:
    return {**script.get(flatten_optimizer_state_dict=True), "param_groups.head.weight.lr": 0.1}


def of_fewer(script: Script) -> dict[str, Any]:
    state = script.get(flatten_optimizer_state_dict=True)
    return {key: value for key, value in state.items() if "2.weight" not in key}


def beside(path: Path, saved: dict[str, Any]) -> Script:
    """A script, and a checkpoint of something else."""
    dcp.save(saved, checkpoint_id=path)
    return Script(attach=True)


def into(state: dict[str, Any], path: Path, **allowed: Any) -> dict[str, Any]:
    ours.load(state, checkpoint_id=path, planner=ours.LoadPlanner(**allowed))
    return state


def over_mesh(script: Script, placement: tensor.Placement) -> tensor.DTensor:
    return tensor.DTensor.from_local(torch.ones(4), next(script.model.parameters()).device_mesh, [placement])


def same(found: object, expected: object) -> None:
    assert found == expected


FLAT, MEGATRON = "flatten_optimizer_state_dict", "fsdp_dtensor"
IN_SHORT = """
Attach afterwards: call fully_shard(model), build the optimizer, then offload_optimizer(optimizer, model=model)
    Script(shard=False).attach() | fully_shard(s.model), s.train() | built(sharded_behind(), SGD)
give one at a time, as in chained_optimizers
    Script(attach=True) | fsdp_offload.offload_report([s.optimizer, Script().optimizer])
    | [same("host" in str(fsdp_offload.offload_report(x.optimizer)), True) for x in (s, Script(attach=True))]
Call remove_offload() on that one first
    Script(attach=True) | built(s, SGD, overlap="iteration")
    | remove_offload(s.optimizer), built(s, SGD, overlap="iteration")
param_groups[0] lists a parameter more than once. List each parameter once
    Script(twice) | s.attach() | s.optimizer.param_groups[0].update(params=[*s.model.parameters()]), s.attach()
param_groups lists a parameter more than once. List each parameter once
    (x := Script(attach=True), (p := x.optimizer.param_groups[0]["params"]).append(p[0]))[0] | s.train(1)
    | s.optimizer.param_groups[0]["params"].pop(), s.train(1)
optimizer.state has the key 'seen', which is not a parameter: no bucket has it. Keep it in an attribute of the optimizer
    (x := Script(SGD), x.optimizer.state.update(seen=4))[0] | s.attach()
    | setattr(s.optimizer, "seen", s.optimizer.state.pop("seen")), s.attach()
After a forward without a backward, call model.reshard() before that
    sharded_behind() | s.model(torch.ones(1, 7)), built(s, SGD) | s.model.reshard(), built(s, SGD)
Shard without offload_policy: fully_shard(module)
    sharded_behind(offload_policy=torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)) | built(s, SGD)
    | Script().attach(parameters=True)
Call reload_model(model) first
    Script() | fsdp_offload.offload_model(s.model), s.attach(parameters=True)
    | fsdp_offload.reload_model(s.model), s.attach(parameters=True)
needs a model whose parameters fully_shard has sharded. Shard it, then build the optimizer, then attach
    Script(shard=False) | s.attach(parameters=True) | fully_shard(s.model), built(s, SGD, parameters=True)
Apply fully_shard to each block, then to the model
    sharded_behind() | built(s, SGD, overlap="forward") | Script().attach(overlap="forward")
has no effect: no state fits into it. Give more, or 0
    Script() | s.attach(snapshot_bytes=3) | Script().attach(snapshot_bytes="1MiB"), Script().attach(snapshot_bytes=0)
as that share of the state. Give more, smaller bucket_bytes, or 0
    Script() | s.attach(host_fraction=1e-5) | Script().attach(host_fraction=0.9), Script().attach(host_fraction=0)
Ask for that kind, or build another optimizer
    in_bf16() | add_masters(s.optimizer, "fp32"), add_masters(s.optimizer, "remainder")
    | add_masters(s.optimizer, "fp32"), mastered(in_bf16(), "remainder")
Shard an fp32 model with MixedPrecisionPolicy(param_dtype=torch.bfloat16) instead
    in_bf16(Whole) | add_masters(s.optimizer)
    | built(sharded_behind(mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(torch.bfloat16)), Whole)
exist_ok=True accepts the same again
    Script(attach=True) | s.attach() | offload_optimizer(s.optimizer, model=s.model, exist_ok=True)
For another offload call remove_offload() first
    Script(attach=True) | again(s, exist_ok=True) | remove_offload(s.optimizer), again(s)
Call it between two steps
    Script(SGD, attach=True) | s.optimizer.step(lambda: remove_offload(s.optimizer))
    | remove_offload(s.optimizer), s.attach()
Leave it off: the device updates.
    Script(shard=False) | offload_optimizer(megatron(s, optimizer_cpu_offload=True))
    | offload_optimizer(megatron(s, optimizer_cpu_offload=False))
Around wraps another optimizer, its attribute 'fast'. Attach to the inner optimizer instead
    Script(Around) | s.attach() | built(s, lambda _: s.optimizer.fast)
param_groups[0] has differentiable=True: autograd follows its step, which needs all state. Set it to False
    Script(torch.optim.Adam, differentiable=True) | s.attach()
    | s.optimizer.param_groups[0].update(differentiable=False), s.attach()
Call fully_shard, which exchanges them, then build the optimizer, then attach
    sharded_behind() | s.attach() | built(s, SGD)
host_fraction=0.5 is for the elementwise optimizers of torch.optim, and Whole is not one of them. Leave it 0
    Script(Whole) | s.attach(host_fraction=0.5) | s.attach(host_fraction=0)
Write policy=OffloadPolicy(parameters=True)
    materialized(SGD) | s.attach() | s.attach(parameters=True)
moves as a whole, and OffloadPolicy(parameters=True) moves parameters in pieces. Use parameters=False
    Script(Whole) | s.attach(parameters=True) | s.attach(parameters=False)
Materialize the model on its device: this optimizer moves as a whole
    materialized(Whole) | s.attach() | Script(Whole).attach()
pin_memory=True needs an accelerator, and the parameters are on the CPU. Leave it None
    Script() | s.attach(pin_memory=True) | s.attach(pin_memory=None)
OffloadPolicy(trust_separable=True) moves it in pieces
    Script(Whole) | s.attach() | Script(Whole).attach(trust_separable=True)
add_masters: kind must be one of
    in_bf16() | add_masters(s.optimizer, "bf16") | mastered(s, "fp32")
Build it without differentiable=True
    in_bf16(differentiable=True) | add_masters(s.optimizer) | mastered(in_bf16())
Use 'fp32'
    in_bf16(dtype=torch.float16) | add_masters(s.optimizer, "remainder") | mastered(s, "fp32")
Leave it out, or call model.to(torch.bfloat16) before the optimizer is built
    Script() | add_masters(s.optimizer) | mastered(in_bf16())
build one of the class RMSprop and attach it
    Script(torch.optim.RMSprop, attach=True) | type(s.optimizer)(s.model.parameters())
    | remove_offload(s.optimizer), built(s, torch.optim.RMSprop)
Call the closure yourself, then step() without it. Nothing has been changed
    Script(Whole).attach(trust_separable=True) | s.optimizer.step(s.backward) | s.backward(), s.optimizer.step()
step() found no gradient in any parameter, and has never found one; nothing was updated or moved. If the model
    Script(attach=True) | s.optimizer.step() | s
give local.contiguous(), and load into that
    Script(attach=True) | ours.ShardTensor(torch.ones(3, 2).t(), ours.chunks_of((2, 3)))
    | ours.ShardTensor(torch.ones(3, 2).t().contiguous(), ours.chunks_of((2, 3)))
as get_optimizer_state_dict gives them
    trained_script()[0] | s.set({"model": {}}) | s.set(s.get())
Write Experts.of_rank(rank, count)
    Script(attach=True) | s.get(experts=4) | s.get(experts=ours.Experts.of_rank(0, 4))
are two layouts. Leave out one of them
    trained_script()[0] | s.get(**{FLAT: True, MEGATRON: True})
    | s.set(s.get(**{FLAT: True})), s.set(s.get(**{MEGATRON: True}))
Give the model that it was built for
    Script(attach=True) | ours.get_optimizer_state_dict(Script().model, s.optimizer) | s.get()
where state_dict is what get_optimizer_state_dict(for_load=True) gives
    saved_script(path) | s.set(path) | resumed(s, path)
Write load(state_dict, checkpoint_id=path)
    saved_script(path) | ours.load(path) | resumed(s, path)
Is the state dict nested as it was saved?
    saved_script(path) | ours.load({"state": {"optimizer": 1}}, checkpoint_id=path,
    planner=ours.LoadPlanner(allow_missing=True)) | resumed(s, path)
or with another flatten_optimizer_state_dict?
    saved_script(path) | ours.load({"o": s.template(**{FLAT: True})}, checkpoint_id=path) | resumed(s, path)
(get_optimizer_state_dict(..., for_load=True) requests state that does not exist yet)
    saved_script(path) | ours.load({"o": s.get()}, checkpoint_id=path) | resumed(s, path)
Are the keys those under which it was saved?
    saved_script(path) | s.set(s.template()) | resumed(s, path)
A checkpoint is loaded into what get_optimizer_state_dict(for_load=True) returns
    saved_script(path) | s.set(s.get()) | resumed(s, path)
this step makes new state. Call it after the load
    saved_script(path) | (state := s.template()), ours.load({"o": state}, checkpoint_id=path), s.train(1)
    | resumed(saved_script(path), path)
Call get_optimizer_state_dict(for_load=True) again, load into that, and set it
    saved_script(path) | (state := s.template()), s.train(1), into({"o": state}, path), s.set(state)
    | resumed(s, path)
leave out cpu_offload with for_load=True
    Script(attach=True) | s.template(cpu_offload=True)
    | same(len(s.template()["state"]), 3), s.optimizer.load_state_dict(s.optimizer.state_dict())
Is it of another model? strict=False ignores them
    trained_script()[0] | s.set(of_more(s)) | s.set(of_more(s), strict=False)
strict=False leaves them as they are
    trained_script()[0] | s.set(of_fewer(s)) | s.set(of_fewer(s), strict=False)
is a term of a sum. Redistribute it to Shard or Replicate
    Script(attach=True) | ours.chunks_of(over_mesh(s, tensor.Partial()))
    | ours.chunks_of(over_mesh(s, tensor.Partial()).redistribute(placements=[tensor.Replicate()])).chunks[0]
as DTensor.from_local makes it
    Script(attach=True) | ours.with_chunks(torch.ones(4)) | ours.with_chunks(over_mesh(s, tensor.Replicate()))
Write with_parameter_chunks(model, state_dict)
    Script(attach=True) | ours.with_parameter_chunks(s.model.state_dict(), s.model)
    | s.model.load_state_dict(ours.with_parameter_chunks(s.model, s.model.state_dict()))
dcp.load takes any other
    saved_script(path) | resumed(s, path, planner=dcp.DefaultLoadPlanner())
    | resumed(s, path, dcp.load, planner=dcp.DefaultLoadPlanner())
Write dcp.load(state_dict, checkpoint_id=path, planner=LoadPlanner())
    saved_script(path) | resumed(s, path, dcp.load, planner=ours.SavePlanner())
    | resumed(s, path, dcp.load, planner=ours.LoadPlanner())
expected a bool or a sequence of patterns such as ['model.head.*']
    saved_script(path) | ours.LoadPlanner(allow_missing="more.*")
    | resumed(s, path, beside={"more": {"a": 1}}, planner=ours.LoadPlanner(allow_missing=["more.*"]))
there is no .metadata. Give the folder that dcp.save() was given
    saved_script(path / "step-2") | resumed(s, path) | resumed(s, path / "step-2")
Save what get_optimizer_state_dict() gives without for_load
    Script(attach=True) | ours.save({"o": s.template()}, checkpoint_id=path)
    | ours.save({"o": s.get()}, checkpoint_id=path)
or leave them there: planner=LoadPlanner(allow_extra=[patterns])
    beside(path, {"m": {"body": torch.ones(3), "head": torch.ones(2)}}) | into({"m": {"body": torch.zeros(3)}}, path)
    | same(into({"m": {"body": torch.zeros(3)}}, path, allow_extra=["m.head"])["m"]["body"].tolist(), [1, 1, 1])
Put a value of that kind into the state dict
    beside(path, {"seen": torch.tensor(5)}) | into({"seen": 0}, path)
    | same(into({"seen": torch.tensor(0)}, path)["seen"], 5)
Cast them on purpose with allow_cast=[patterns]
    beside(path, {"m": {"w": torch.ones(3)}}) | into({"m": {"w": torch.zeros(3).half()}}, path)
    | same(into({"m": {"w": torch.zeros(3).half()}}, path, allow_cast=["m.*"])["m"]["w"].tolist(), [1, 1, 1])
prepare() takes the policy by its name. Write model, optimizer =
    Script() | integration("accelerate").prepare(ACCELERATOR, s.model, s.optimizer, {"overlap": "forward"})
    | integration("accelerate").prepare(ACCELERATOR, s.model, s.optimizer, policy={"overlap": "forward"})
for others there is accelerator.prepare()
    Script() | integration("accelerate").prepare(ACCELERATOR, s.model)
    | same(integration("accelerate").prepare(ACCELERATOR, s.model, s.optimizer), (s.model, s.optimizer))
clip_with: this AdamW is not offloaded; call offload_optimizer() first
    Script() | integration("accelerate").clip_with(ACCELERATOR, s.optimizer)
    | s.attach(), integration("accelerate").clip_with(copy.copy(ACCELERATOR), s.optimizer)
Bind the wrapper where the loop looks for it
    Script(attach=True) | (hook := fsdp_offload.reload_before(None, s.optimizer)), s.train(3) | s.backward(), hook()
Call weight_deltas(optimizer) again behind offload_optimizer(), and send all weights once
    Script(attach=True) | (deltas := weight_deltas(s.optimizer)), remove_offload(s.optimizer), list(deltas)
    | same([*weight_deltas(s.attach().optimizer)], [])
or attached anew, since weights(model) was called. Call it again
    Script().attach(parameters=True)
    | (loop := weights(s.model)), remove_offload(s.optimizer), s.attach(parameters=True), list(loop)
    | same(len([name for name, _ in weights(s.model)]), 3)
names and dtypes are those of the model, and it is not known. Call offload_optimizer(optimizer, model=model)
    (x := Script(), offload_optimizer(x.optimizer))[0] | weight_deltas(s.optimizer)
    | remove_offload(s.optimizer), same([*weight_deltas(s.attach().optimizer)], [])
the CPU updates a part of the weights. Use OffloadPolicy(host_fraction=0)
    Script().attach(host_fraction=1.0) | weight_deltas(s.optimizer)
    | remove_offload(s.optimizer), same([*weight_deltas(s.attach(host_fraction=0).optimizer)], [])
Give OffloadPolicy(parameters=True) to offload_optimizer(optimizer, model=model)
    Script(attach=True) | weights(s.model)
    | remove_offload(s.optimizer), same(len([name for name, _ in weights(s.attach(parameters=True).model)]), 3)
"""
"""By the words: the last expression is the script that trains on, if it is one."""


def in_short(row: str) -> Story:
    made, refused, as_said = row.split(" | ")

    def story(path: Path) -> Generator[Callable[[], object], Any, Script]:
        names = {**globals(), "path": path}
        names["s"] = script = eval(made, names)
        before = seen_of(script.optimizer)
        kind = yield lambda: eval(refused, names)
        assert kind is not ValueError or seen_of(script.optimizer) == before
        done = eval(as_said, names)
        last = done[-1] if isinstance(done, tuple) else done
        return last if isinstance(last, Script) else script  # type: ignore[return-value]

    return story


for _words, _row in re.findall(r"^(\S.*)\n((?: +.*\n)+)", IN_SHORT, re.MULTILINE):
    remedy(_words)(in_short(" ".join(_row.split())))

# The test -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", TABLE, ids=lambda words: " ".join(words.split()[:8]))
def test_training_goes_on_after_what_the_message_says(words: str, tmp_path: Path) -> None:
    story: Any = TABLE[words](tmp_path)
    refused = next(story)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in IGNORED:
            warnings.filterwarnings("ignore", one)
        with pytest.raises((ValueError, TypeError, RuntimeError, OSError, UserWarning, CheckpointException)) as error:
            refused()
    said, kind = str(error.value), error.type
    del error, refused  # the frames of an error hold what was given
    assert words in said
    with pytest.raises(StopIteration) as end:
        story.send(kind)
    script = end.value.value
    if script is not None:
        assert is_offloaded(script.optimizer)
        script.train()


ELSEWHERE = {
    "tests/cpu/test_remedies.py": (
        "by name model, policy, exist_ok",
        "must be True or False, got",
        "model must be a torch.nn.Module",
        "expected a torch.optim.Optimizer, got",
        "a list of them, or one of Megatron's",
        "expected a hook that can be called",
        "expected a torch.nn.Module first",
        "takes a closure or nothing",
        "Write save(state_dict, checkpoint_id=path)",
        "prepare() takes the accelerator first",
        "Trainer shards with its own flags",
        "must be a whole number, got",
        "a global shape of integers from 0 on",
        "in_global: expected the whole tensor",
        "in_local: expected this rank's buffer",
        "the state dict is empty. Write",
        "must be (begin, end) or a slice",
        "To clip nothing, leave it out",
        "the prefix needs {} for the number",
        "offload_policyoffload_metrics",
    ),
    "tests/cpu/test_weight_deltas.py": (
        "weights without a record are handed out whole",
        "optimizers; give one at a time",
        "moves as a whole, and its own step updates all weights at once",
        "from which forwards compute weights",
        "which its model did not have when",
        "which the model does not have",
        "is asleep. Call reload_model(model)",
        "listens to an optimizer of this process",
    ),
    "tests/cpu/test_recovery.py": (
        "call it in the thread that trains",
        "has to be called in the thread that trains",
        "between a backward and step",
        "other ranks may not have come to the last commit yet",
        "its optimizer is not offloaded any more",
        "has got state for other parameters or options since",
        "of a run that has ended",
        "twice the optimizer state and the parameters",
        "Start with recoverable(optimizer, folder)",
        "were written between commit() and the backward",
        "is of another training",
        "homes have to lie in memory",
        "belongs to another user",
        "another run trains in it",
        "no room for  bytes more",
        "of a run with more ranks than",
        "was not set as torchrun does",
        "a recovery would not find it",
        "were written between recover() and the backward",
        "this  holds  optimizers; give one.",
        "is not offloaded. Give model=model, and policy",
        "already. Call close() of that run first",
        "has left the homes to a recovery",
        "it is not what was written",
        "the model that was given is gone",
    ),
    "tests/cpu/test_weights_from_homes.py": (
        "was called for within a loop",
        "optimizers train this model, and another",
        "a parameter was written in place during the loop",
        "load_state_dict() is under way in this thread",
        "of the tensors are still held",
    ),
    "tests/cpu/test_faults.py": ("first and wrap optimizer.step afterwards",),
    "tests/core/test_unreduced_gradients.py": ("the newest version that fsdp_offload was tested",),
    "tests/distributed/test_megatron_fsdp_v2.py": ("its rows are not known",),
    "tests/cpu/test_whole_process.py": ("torchft's OptimizerWrapper leaves out step()",),
    "tests/distributed: test_megatron_experts.py, test_megatron_fsdp.py, test_meshes.py, test_sharded_refusals.py": (
        "and there are  ranks",
        "expected a Megatron-FSDP parameter",
        "it is sharded unevenly, and nothing says how",
        "says that it is the chunk at",
        "experts are on a mesh that is not all ranks",
        "nested groups list the names of this rank's experts",
        "has the size of this rank's part",
        "To reshard, load into what",
        "DCP would save  tensors as other parts",
        "silently drop the others",
        "ranks have different tensors under",
        "damaged, and what was read is of one rank",
    ),
    "rows whose words are in a constant of their own": (
        "they were exchanged when the model was sharded",
        "and moves as a whole: all of its state",
        "offload_optimizer: overlap= .",
        "this is not offloaded;",
    ),
    "tests of plain optimizers": ("Attach it with offload_optimizer(), or",),
    "tests of types of tensors": (
        "which is made of several tensors",
        "made of other tensors: add the first such group",
        "which says itself how it is gathered",
    ),
    "sentences without anything to do: numbers of the report, details of a problem": (
        "is not made of dense tensors",
        "One update needs  bytes",
        "tensors over their state or parameters were held",
        "keeps no state for these parameters",
        "no parameter is trained",
        "all of the state fits into device_bytes",
        "there is nothing to gain",
        "fsdp_offload was not tested on",
        "last step: updated",
        "last iteration",
        "held until step()",
        "at the host's pace",
        "with 1 GB more",
        "a tensor, saved as an object",
        "a number or object, saved as a tensor",
        "the metadata does not say where it is",
        "by the stored chunks at",
        "elements that this rank needs",
        "a staged dict is written once",
        "optimizer_offload_fraction",
    ),
    "arithmetic of chunks, for those who write layouts": (
        "a flat range",
        "expected a local tensor of",
        "but its chunks are those of a tensor of",
        "has no chunk at",
        "expected chunks of a tensor of shape",
        "a ShardTensor is being copied into a plain tensor",
        "must be  or more, got",
        "local experts are 0 to",
    ),
}
"""Sentences that no row provokes."""


def sentences() -> Iterator[tuple[str, str]]:
    """Yield where a sentence of these rooms is raised, yielded or warned of, and its text."""
    rooms = ("api", "checkpoint", "integrations", "listeners")
    for file in (file for room in rooms for file in (PACKAGE / room).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_warned = isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
            if is_warned or isinstance(node, ast.Raise | ast.Yield):
                pieces = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                text = "".join(one for one in pieces if isinstance(one, str))
                if len(text) > 25:
                    yield f"{file.name}:{node.lineno}", text


def test_every_sentence_has_a_row_or_a_reason() -> None:
    known = [*TABLE, *(words for others in ELSEWHERE.values() for words in others)]
    windows = {" ".join(words.split()[at : at + 4]) for words in known for at in range(max(1, len(words.split()) - 3))}
    lacking = [
        f"{where}: {text}"
        for where, text in sentences()
        if not any(one in " ".join(text.split()) for one in windows if len(one) > 8)
    ]
    assert not lacking, "\n".join(lacking)
