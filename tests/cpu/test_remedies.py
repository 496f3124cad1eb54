"""Remedies: each refusal is provoked, what its message says is done, and training goes on.

A message with a line to write is obeyed to the letter: the line is executed, with the names of its reader's script.
"""

import copy
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim.lr_scheduler import LambdaLR

import checkpoint_tools
import fsdp_offload
from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer
from fsdp_offload import checkpoint as ours
from fsdp_offload.engine.engine import engine_of
from fsdp_offload.integrations.plain_values import metrics_of, metrics_of_each, model_of, offload, policy_from
from fsdp_offload.plan import Model, Plan, Training, candidates, machine_of, plan
from fsdp_offload.plan import model_of as model_of_plan
from tests.fused_adam_reference import FusedAdam
from tests.remedies import Script, Whole, integration

pytestmark = [
    pytest.mark.usefixtures("mesh"),
    pytest.mark.filterwarnings("ignore:offload_optimizer", "ignore:add_masters has no effect"),
]


def line_in(error: BaseException) -> str:
    """The line that a message says to write: from "Write" to the end of the sentence."""
    found = re.search(r"Write ((?:[\w, ]+ = )?[\w.]*\(.*?\))(?:[.;:,]| or |$)", str(error), re.DOTALL)
    assert found is not None, f"no line to write in: {error}"
    return found[1]


def write(error: BaseException, script: Script, **names: Any) -> None:
    """Do what the message says, with the public names and those of the script; then training goes on."""
    known = {**vars(fsdp_offload), **{name: getattr(ours, name) for name in ours.__all__}, **vars(script), **names}
    exec(line_in(error), known)
    script.model, script.optimizer = known["model"], known["optimizer"]
    assert is_offloaded(script.optimizer)
    script.train()


# Habits from torch ----------------------------------------------------------------------------------------------------


HABITS: dict[str, tuple[bool, Callable[[Script], object]]] = {
    "clip a model's parameters": (True, lambda s: fsdp_offload.clip_grad_norm_(s.model.parameters(), 1.0)),
    "clip a list of parameters": (True, lambda s: fsdp_offload.clip_grad_norm_(list(s.model.parameters()), 1.0)),
    "overlap by name": (False, lambda s: offload_optimizer(s.optimizer, model=s.model, overlap="iteration")),
    "sizes by name": (False, lambda s: offload_optimizer(s.optimizer, overlap="forward", bucket_bytes="1MiB")),
    "a model by place": (False, lambda s: offload_optimizer(s.optimizer, s.model)),
    "a model first": (False, lambda s: offload_optimizer(s.model)),
    "a model and an optimizer": (False, lambda s: offload_optimizer(s.model, s.optimizer)),
    "an overlap for a policy": (False, lambda s: offload_optimizer(s.optimizer, model=s.model, policy="iteration")),
    "a getter, swapped": (True, lambda s: ours.get_optimizer_state_dict(s.optimizer, s.model)),
    "a setter, swapped": (True, lambda s: ours.set_optimizer_state_dict(s.optimizer, s.model, {})),
    "a list of models sleeps": (True, lambda s: fsdp_offload.offload_model([s.model])),
    "a list of models wakes": (True, lambda s: fsdp_offload.reload_model([s.model])),
    "a hook behind the optimizer": (True, lambda s: fsdp_offload.reload_before(s.optimizer, None)),
    "options for a getter": (
        True,
        lambda s: ours.get_optimizer_state_dict(s.model, s.optimizer, options=StateDictOptions(cpu_offload=True)),  # type: ignore[call-arg]
    ),
    "options for a setter": (
        True,
        lambda s: ours.set_optimizer_state_dict(s.model, s.optimizer, {}, options=StateDictOptions()),  # type: ignore[call-arg]
    ),
    "a choice by place": (True, lambda s: ours.get_optimizer_state_dict(s.model, s.optimizer, True)),  # type: ignore[misc]
    "state of nothing": (True, lambda s: ours.get_optimizer_state_dict(s.model, None)),
}


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_of_torch_gets_the_line_to_write(habit: str) -> None:
    attach, call = HABITS[habit]
    script = Script(attach=attach)
    script.train(int(attach))
    with pytest.raises(TypeError) as error:
        call(script)
    policy = re.search(r"OffloadPolicy\(.*\)", line_in(error.value))
    names = {"max_norm": 1.0, "state_dict": script.get()} if attach else {}
    if line_in(error.value).startswith("OffloadPolicy"):  # a value for the argument that was wrong
        offload_optimizer(script.optimizer, model=script.model, policy=eval(policy[0]))  # type: ignore[index]
        script.train()
    elif "offload_model" in line_in(error.value):
        fsdp_offload.offload_model(script.model)
        fsdp_offload.reload_model(script.model)
        script.train()
    else:
        write(error.value, script, callback=None, **names)
    if policy is not None and "overlap" in policy[0]:
        assert engine_of(script.optimizer).policy.overlap != "step"


def test_prepare_without_its_accelerator() -> None:
    pytest.importorskip("accelerate")
    from fsdp_offload.integrations.accelerate import prepare

    script = Script()
    accelerator = SimpleNamespace(prepare=lambda *objects: objects, clip_grad_norm_=lambda *_: None)
    for given in ((script.model, script.optimizer), (script.optimizer, script.model)):
        with pytest.raises(TypeError, match="accelerator") as error:
            prepare(*given)
    write(error.value, script, accelerator=accelerator, prepare=prepare)


def test_a_trainer_without_fsdp_is_told_its_own_flags(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import TrainingArguments

    from fsdp_offload.integrations.transformers import OffloadTrainer

    script = Script(shard=False)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = OffloadTrainer(
        script.model, arguments, optimizers=(script.optimizer, None), offload_policy={"overlap": "forward"}
    )
    with pytest.raises(ValueError, match="none of the optimizer's parameters is sharded") as error:
        trainer.create_scheduler(3)
    flags = eval(line_in(error.value).replace("TrainingArguments(", "dict(").replace("...", "output_dir='x'"))
    made = TrainingArguments(use_cpu=True, report_to=[], **flags)
    assert made.fsdp_plugin_args["fsdp_version"] == 2
    assert "leave overlap" in str(error.value)
    trainer = OffloadTrainer(script.model, arguments, optimizers=(script.optimizer, None))
    trainer.create_scheduler(3)
    assert is_offloaded(script.optimizer)
    script.train()


SIZES = {"8GB": 8 * 10**9, "640MiB": 640 << 20, "1.5 GiB": 3 << 29, "512kb": 512_000, "4096B": 4096, "2tib": 2 << 40}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_read_as_they_are_written(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("device_bytes", "bucket_bytes", "snapshot_bytes", "host_limit_bytes"):
        expected = OffloadPolicy(**{name: SIZES[text]})  # type: ignore[arg-type]
        assert OffloadPolicy(**{name: text}) == policy_from({name: text}) == expected  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setenv(f"FSDP_OFFLOAD_{name.upper()}", text)
            assert policy_from() == expected
    script = Script()
    script.attach(device_bytes=text)
    script.train()


def test_a_size_is_an_option_of_torchtitan() -> None:
    tyro = pytest.importorskip("tyro")
    for text, expected in (*SIZES.items(), ("auto", "auto"), ("4096", 4096)):
        assert tyro.cli(OffloadPolicy, args=["--device_bytes", text]).device_bytes == expected
    assert tyro.cli(OffloadPolicy, args=["--host_limit_bytes", "None"]).host_limit_bytes is None


def test_state_that_does_not_fit_is_deleted_with_the_rest_of_its_parameter() -> None:
    script = Script(torch.optim.RAdam, attach=True)
    script.train()
    param = next(script.model.parameters())
    script.optimizer.state[param]["exp_avg"] = torch.ones(3)
    script.backward()
    with pytest.raises(ValueError, match=r"there, or delete optimizer\.state\[param\] as a whole"):
        script.optimizer.step()
    del script.optimizer.state[param]
    script.train()
    assert script.optimizer.state[param]["step"] == 2


@pytest.mark.filterwarnings(r"ignore:step\(\) found no gradient")
@pytest.mark.parametrize("overlap", ["forward", "iteration"])
def test_an_optimizer_without_parameters_gets_some_later(overlap: str) -> None:
    def script_of() -> Script:
        return Script(lambda params: torch.optim.RAdam([{"params": [], "lr": 0.05}]))

    plain, script = script_of(), script_of()
    with pytest.warns(UserWarning, match="NOTHING IS OFFLOADED: no parameter is trained"):
        script.attach(overlap=overlap)
    for one in (plain, script):
        one.train(1)
        one.optimizer.add_param_group({"params": list(one.model.parameters())})
        one.train(5)
    assert all(map(torch.equal, plain.weights(), script.weights()))


# Loads ----------------------------------------------------------------------------------------------------------------


def test_a_refused_load_is_one_error_that_names_the_path(tmp_path: Path) -> None:
    script = Script(attach=True)
    script.train()
    saved = {"optimizer": script.get(), "seed": 5}
    ours.save(saved, checkpoint_id=tmp_path / "there")
    state = {"optimizer": script.template(), "epoch": 0}
    with pytest.raises(
        ValueError, match=r"^load: .*there: this checkpoint is not loaded.*\n- 1 requested.*epoch"
    ) as error:
        ours.load(state, checkpoint_id=tmp_path / "there")
    assert len(str(error.value).splitlines()) == 2
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    with pytest.raises(FileNotFoundError, match=r"^load: .*nowhere: there is no \.metadata\. Give the folder"):
        ours.load(state, checkpoint_id=tmp_path / "nowhere")
    (broken := tmp_path / "broken").mkdir()
    (broken / ".metadata").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"^load: .*broken: its \.metadata is damaged\. Copy it again"):
        ours.load(state, checkpoint_id=broken)
    with pytest.raises(TypeError, match=r"Write save\(state_dict, checkpoint_id=path\)"):
        ours.save(script.model, checkpoint_id=broken)
    # planner=LoadPlanner(allow_missing=[patterns]) leaves such keys as they are.
    ours.load(state, checkpoint_id=tmp_path / "there", planner=ours.LoadPlanner(allow_missing=["epoch"]))
    script.set(state["optimizer"])
    script.train()


@pytest.mark.parametrize("function", [ours.save, ours.load])
def test_arguments_of_others_get_the_line_to_write(function: Any, tmp_path: Path) -> None:
    state = {"seen": 5}
    for given in ({"options": StateDictOptions()}, {"strict": False}, {"planner": None, "strict": True}):
        with pytest.raises(TypeError, match=r"^(save|load): got an unexpected keyword argument '\w+'\.") as error:
            function(state, checkpoint_id=tmp_path, **given)
        assert line_in(error.value) == f"{function.__name__}(state_dict, checkpoint_id=path)"
    assert ("allow_missing" in str(error.value)) == (function is ours.load)
    with pytest.raises(TypeError, match=r"too many positional arguments\. Write") as error:
        function(state, tmp_path)
    ours.save(state, checkpoint_id=tmp_path)
    path = tmp_path if function is ours.load else tmp_path / "again"
    exec(line_in(error.value), {"save": ours.save, "load": ours.load, "state_dict": state, "path": path})
    assert inspect.signature(function).parameters.keys() > {"state_dict", "checkpoint_id", "no_dist"}


def test_a_refused_save_is_one_error_that_names_the_path(tmp_path: Path) -> None:
    script = Script(attach=True)
    template = script.template()
    with pytest.raises(ValueError, match=r"^save: .*there: nothing has been written: for_load=True made") as error:
        ours.save({"o": template}, checkpoint_id=tmp_path / "there")
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value.__cause__) in str(error.value)
    (tmp_path / "file").write_text("")
    with pytest.raises((NotADirectoryError, FileExistsError), match=r"^save: .*file"):
        ours.save({"seen": 5}, checkpoint_id=tmp_path / "file" / "below")

    class Full(dcp.FileSystemWriter):
        error: BaseException = OSError(28, "No space left on device")

        def write_data(self, *_: Any) -> Any:
            raise self.error

    writer = Full(tmp_path / "full")
    with pytest.raises(
        OSError, match=r"^save: .*full: .*No space left on device\. .*no checkpoint: save again\.$"
    ) as full:
        ours.save({"seen": 5}, storage_writer=writer)
    assert repr(full.value.__cause__) == repr(writer.error)
    writer.error = KeyboardInterrupt()
    with pytest.raises(CheckpointException, match="KeyboardInterrupt"):
        ours.save({"seen": 5}, storage_writer=writer)


def test_a_state_dict_without_groups_is_no_optimizers() -> None:
    script = Script(attach=True)
    script.train(3)
    saved = copy.deepcopy(script.optimizer.state_dict())
    for given, has in (({}, "nothing"), ({"state": {}}, "'state'"), (script.model.state_dict(), "'0.weight'")):
        with pytest.raises(KeyError, match=rf"what optimizer\.state_dict\(\) gives, got a dict without .* {has}"):
            script.optimizer.load_state_dict(given)
    with pytest.raises(KeyError, match="Write optimizer") as error:
        script.optimizer.load_state_dict({"epoch": 3, "optim": saved})
    exec(re.search(r"Write (.*\]\));", str(error.value.args[0]))[1], {**vars(script), "state_dict": {"optim": saved}})  # type: ignore[index]
    script.train()


def test_an_optimizer_in_the_place_of_its_state_dict() -> None:
    from checkpoint_tools import merge_state_dict, preset, split_state_dict

    script = Script(shard=False, attach=True)
    layers = {"gate_up_proj": torch.nn.Linear(2, 4, bias=False), "down_proj": torch.nn.Linear(2, 2, bias=False)}
    script.model.add_module("mlp", torch.nn.ModuleDict(layers))
    for exchange in (split_state_dict, merge_state_dict):
        with pytest.raises(TypeError, match=r"expected the state dict of an optimizer, got \w*AdamW\.") as error:
            exchange(script.model.state_dict(), script.optimizer, preset("hf-gate-up"))
        line = f"{exchange.__name__}(model.state_dict(), get_optimizer_state_dict(model, optimizer), rules)"
        assert f"Write {line}." in str(error.value)
        known = {**vars(checkpoint_tools), **vars(ours), **vars(script), "rules": preset("hf-gate-up")}
        if exchange is split_state_dict:
            assert "mlp.up_proj.weight" in eval(line, known)[0]


@pytest.mark.parametrize("given", [("0", 4), (0, "4"), (0, 4.0), (None, 4)], ids=repr)
def test_experts_are_counted_in_whole_numbers(given: Any) -> None:
    for make, names in (
        (ours.Experts.of_rank, "expert_parallel_rank|num_local_experts"),
        (ours.Experts, "first|count"),
    ):
        with pytest.raises(TypeError, match=rf"Experts.*: ({names}) must be a whole number, got"):
            make(*given)
    assert ours.Experts.of_rank(int("1"), 4) == ours.Experts(4, 4)


def test_objects_beside_those_that_torchtitan_has() -> None:
    titan = integration("torchtitan")
    script = Script()
    trainer = SimpleNamespace(checkpointer=None, optimizers=None)
    for function, line in (
        (titan.save_from_arena, "save_from_arena(trainer.checkpointer)"),
        (titan.offload_container, "offload_container(trainer.optimizers)"),
        (titan.metrics_of_container, "metrics_of_container(trainer.optimizers)"),
    ):
        for given in (trainer, script.optimizer, None):
            with pytest.raises(TypeError, match=rf"takes an? \w+, got {type(given).__name__}\.") as error:
                function(given)
            assert line_in(error.value) == line
    assert not is_offloaded(script.optimizer)


def test_rules_and_state_dicts_of_a_model() -> None:
    from checkpoint_tools import merge_state_dict, preset, split_state_dict

    script, rules = Script(), preset("hf-gate-up")
    for exchange in (split_state_dict, merge_state_dict):
        for model_state, given in ((script.model.state_dict(), "hf-gate-up"), (script.model, rules)):
            with pytest.raises(
                TypeError, match=r"expected model\.state_dict\(\) and rules, such as preset\('hf-gate-up'"
            ):
                exchange(model_state, None, given)  # type: ignore[arg-type]
    state = {"0.mlp.gate_up_proj.weight": torch.ones(4, 2), "0.mlp.down_proj.weight": torch.ones(2, 2)}
    assert "0.mlp.up_proj.weight" in split_state_dict(state, None, rules)[0]


FORMS: dict[str, dict[str, Any]] = {
    "nested": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "Megatron's": {"fsdp_dtensor": True},
}


@pytest.mark.parametrize("is_root", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_a_scheduler_has_added_to_the_groups_is_loaded(
    tmp_path: Path, form: dict[str, Any], is_root: bool
) -> None:
    """The scheduler comes after the load, with ``last_epoch``: it asks for ``initial_lr`` in the groups."""

    def factor(epoch: int) -> float:
        return 0.75**epoch

    def rates_of(script: Script, scheduler: LambdaLR, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            script.train(1)
            scheduler.step()
            found += scheduler.get_last_lr()
        return found

    script = Script(torch.optim.RMSprop, lr=0.02, momentum=0.5, attach=True)
    scheduler = LambdaLR(script.optimizer, factor)
    rates_of(script, scheduler, 4)
    saved = script.get(**form)
    ours.save(saved if is_root else {"optimizer": saved}, checkpoint_id=tmp_path)
    rates = rates_of(script, scheduler, 2)
    other = Script(torch.optim.RMSprop, lr=0.02, momentum=0.5, attach=True)
    template = other.template(**form)
    state = template if is_root else {"optimizer": template}
    loaded = ours.load(state, checkpoint_id=tmp_path)
    assert any(key.endswith("initial_lr") for key in loaded.filled)
    other.set(state if is_root else state["optimizer"])
    assert [group["initial_lr"] for group in other.optimizer.param_groups] == [0.02]
    assert rates_of(other, LambdaLR(other.optimizer, factor, last_epoch=3), 2) == rates


def test_a_refused_load_adds_nothing_to_the_groups(tmp_path: Path) -> None:
    script = Script(attach=True)
    script.train()
    script.optimizer.param_groups[0] |= {"initial_lr": 0.5, "warm": torch.tensor(0.25)}
    ours.save({"o": script.get(), "more": 1}, checkpoint_id=tmp_path)
    other = Script(attach=True)
    state = {"o": other.template(), "less": 1}
    with pytest.raises(ValueError, match="less"):
        ours.load(state, checkpoint_id=tmp_path)
    assert "initial_lr" not in state["o"]["param_groups"][0]
    state = {"o": other.template(), "more": 0}
    ours.load(state, checkpoint_id=tmp_path, planner=ours.LoadPlanner(allow_extra=["*.initial_lr"]))
    assert "initial_lr" not in state["o"]["param_groups"][0]
    ours.load(state, checkpoint_id=tmp_path)
    assert state["o"]["param_groups"][0]["initial_lr"] == 0.5
    assert state["o"]["param_groups"][0]["warm"].equal(torch.tensor(0.25))


def test_torch_makes_state_of_other_classes_where_it_would_without_offload() -> None:
    """A look at the state leaves an empty entry, after which torch makes no step."""
    for script in (Script(), Script(attach=True)):
        assert script.optimizer.state[next(script.model.parameters())] == {}
        torch_state_dict.get_optimizer_state_dict(script.model, script.optimizer)
        assert not any(script.optimizer.state.values())


def test_a_whole_class_without_state_gets_it_from_torchs_getter(tmp_path: Path) -> None:
    """Its ``train()`` leaves empty entries in the state, which torch takes for state."""
    schedulefree = pytest.importorskip("schedulefree")

    def script_of() -> Script:
        script = Script(schedulefree.RAdamScheduleFree, lr=0.01)
        script.optimizer.train()
        script.attach()
        script.optimizer.train()
        return script

    one = script_of()
    one.train(3)
    saved = {"m": one.model.state_dict(), "o": one.get()}
    ours.save(saved, checkpoint_id=tmp_path)
    one.train(2)
    other = script_of()
    with pytest.raises(
        ValueError, match=r"Call get_optimizer_state_dict of torch\.distributed\.checkpoint\.state_dict once"
    ):
        other.template()
    torch_state_dict.get_optimizer_state_dict(other.model, other.optimizer)
    state = {"m": other.model.state_dict(), "o": other.template()}
    ours.load(state, checkpoint_id=tmp_path)
    other.model.load_state_dict(state["m"])
    other.set(state["o"])
    other.train(2)
    assert all(map(torch.equal, one.weights(), other.weights()))


# Remedies that reach where they are needed ----------------------------------------------------------------------------


def test_trust_is_a_field_that_integrations_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(Whole)
    with pytest.warns(UserWarning, match=r"moves as a whole.*OffloadPolicy\(trust_separable=True\) moves it in pieces"):
        offload(script.optimizer, script.model, None)
    plain = Script(Whole)
    plain.train(3)
    for given in ({"trust_separable": True, "overlap": "forward"}, None):
        monkeypatch.setenv("FSDP_OFFLOAD_TRUST_SEPARABLE", "1" if given is None else "")
        script = Script(Whole)
        offload(script.optimizer, script.model, given)
        script.train(3)
        assert not any("as a whole" in note for note in script.optimizer.offload_report().notes)
        assert all(map(torch.equal, plain.weights(), script.weights()))


@pytest.mark.parametrize(("fraction", "share"), [(0.0, 1.0), (0.25, 0.25), (None, 1.0)])
def test_megatrons_fraction_is_a_share_that_works(fraction: float | None, share: float) -> None:
    """Its config has 0.0 where nobody says it, and its command line 1.0."""
    script = Script(torch.optim.Adam, shard=False)
    config = SimpleNamespace(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    if fraction is None:
        del config.optimizer_offload_fraction
    holder = SimpleNamespace(optimizer=script.optimizer, config=config, zero_grad=script.optimizer.zero_grad)
    with pytest.raises(ValueError, match=rf"OffloadPolicy\(host_fraction={share}\)"):
        offload_optimizer(holder)
    config.optimizer_cpu_offload = False
    offload_optimizer(holder, policy=OffloadPolicy(host_fraction=share))
    script.train()
    # With Transformer Engine's class, it is left off, and nothing else.
    script = Script(FusedAdam, shard=False)
    holder = SimpleNamespace(optimizer=script.optimizer, config=config, zero_grad=script.optimizer.zero_grad)
    offload_optimizer(holder)
    script.train()


DICT = {"state": {}, "param_groups": [{"params": ["0.weight"]}]}
RULES = checkpoint_tools.preset("hf-gate-up")
AUTO = "{} must be an integer number .* or '8GB', got"
WRONG: dict[str, tuple[str, Callable[[Script], object]]] = {
    "a step of a number": (r"AdamW\.step\(\) takes a closure or nothing, got 3", lambda s: s.optimizer.step(3)),
    "a step of two": (r"AdamW\.step\(\) takes a closure or nothing, got 2 arg", lambda s: s.optimizer.step(None, 4)),
    "auto for snapshots": (AUTO.format("snapshot_bytes"), lambda _: OffloadPolicy(snapshot_bytes="auto")),  # type: ignore[arg-type]
    "auto for a limit": (AUTO.format("host_limit_bytes"), lambda _: OffloadPolicy(host_limit_bytes="auto")),  # type: ignore[arg-type]
    "an overlap for a trainer's policy": (
        r"got str\. Write OffloadPolicy\(overlap='forward'\)",
        lambda _: integration("transformers").OffloadTrainer(None, offload_policy="forward"),
    ),
    "no largest norm": ("max_norm must be a number, got None", lambda s: clip(s.optimizer, None)),
    "a norm below zero": (r"0 or more, got -1\. To clip nothing, leave", lambda s: clip(s.optimizer, -1)),
    "no prefix": (r"must be text, got NoneType\. Write metrics_of\(", lambda s: metrics_of(s.optimizer, None)),  # type: ignore[arg-type]
    "one prefix": (r"\{\} .*got 'o/'\. Write metrics_of_each\(", lambda s: metrics_of_each([s.optimizer] * 2, "o/")),
    "a backend": (
        r"got str\. Write process_group=",
        lambda _: ours.save({"a": 1}, checkpoint_id="a", process_group="x"),
    ),  # type: ignore[arg-type]
    "no path to seal": ("expected the folder", lambda _: checkpoint_tools.seal(None)),  # type: ignore[arg-type]
    "no path to rules": ("None is no TOML", lambda _: checkpoint_tools.load_rules(None)),  # type: ignore[arg-type]
    "no state dict": ("gives, got NoneType", lambda s: s.optimizer.load_state_dict(None)),
    "a path": ("gives, got str", lambda s: s.optimizer.load_state_dict("a.pt")),
    "no groups": (
        "'param_groups', got NoneType",
        lambda s: s.optimizer.load_state_dict({**DICT, "param_groups": None}),
    ),
    "no states": ("'state', got NoneType", lambda s: s.optimizer.load_state_dict({**DICT, "state": None})),
    "groups of numbers": ("groups, got int", lambda s: s.optimizer.load_state_dict({**DICT, "param_groups": [1]})),
    "state of text": ("state of 0, got str", lambda s: s.optimizer.load_state_dict({**DICT, "state": {0: "x"}})),
    "named groups without names": (r"'params': \[name\]", lambda s: s.set({**DICT, "param_groups": [{"lr": 1}]})),
    "named groups of text": ("expected {'state'", lambda s: s.set({**DICT, "param_groups": ["0.weight"]})),
    "named state of text": ("expected {'state'", lambda s: s.set({**DICT, "state": {"0.weight": "x"}})),
    "a writer's path": ("StorageWriter, got str", lambda _: ours.save({}, storage_writer="here")),  # type: ignore[arg-type]
    "a reader's path": ("StorageReader, got str", lambda _: ours.load({}, storage_reader="here")),  # type: ignore[arg-type]
    "an empty save": (
        "nowhere: .*the state dict is empty. Write {'model': model.state_dict",
        lambda _: ours.save({"m": {}}, checkpoint_id="nowhere"),
    ),
    "a planner's class": (
        "got the class LoadPlanner",
        lambda _: ours.load({}, checkpoint_id="a", planner=ours.LoadPlanner),
    ),  # type: ignore[arg-type]
    "patterns of a number": ("allow_extra: expected .*, got 3", lambda _: ours.LoadPlanner(allow_extra=3)),  # type: ignore[arg-type]
    "staging a list": ("expected a dict, got list", lambda s: ours.ArenaStager(s.optimizer).stage([1])),  # type: ignore[arg-type]
    "chunks of text": ("shape of integers from 0 on, got 'x'", lambda _: ours.chunks_of("x")),
    "chunks of a negative size": (r"from 0 on, got \(4, -1\)", lambda _: ours.chunks_of((4, -1))),
    "a chunk in another tensor": (
        r"in_global: expected the whole tensor, at least \(4, 3\), got shape \(2, 3\)",
        lambda _: ours.chunks_of((4, 3)).chunks[0].in_global(torch.ones(2, 3)),
    ),
    "a chunk in no tensor": (r"got shape \(\)", lambda _: ours.chunks_of((4,)).chunks[0].in_global(None)),  # type: ignore[arg-type]
    "a chunk in a part of a buffer": (
        r"in_local: expected this rank's buffer, at least 12 elements, got 6",
        lambda _: ours.chunks_of((4, 3)).chunks[0].in_local(torch.ones(4, 3)[:2]),
    ),
    "chunks of nothing": ("shape of integers from 0 on, got None", lambda _: ours.chunks_of(None)),  # type: ignore[arg-type]
    "a range in text": (r"\(begin, end\) or a slice, got '0:3'", lambda _: ours.chunks_of((4,), "0:3")),  # type: ignore[arg-type]
    "a shard without chunks": ("chunks, got NoneType", lambda _: ours.ShardTensor(torch.ones(3), None)),  # type: ignore[arg-type]
    "chunks for no state dict": ("got NoneType", lambda s: ours.with_parameter_chunks(s.model, None)),  # type: ignore[arg-type]
    "an accelerator, swapped": (
        "clip_with takes the accelerator first",
        lambda s: integration("accelerate").clip_with(s.optimizer, SimpleNamespace()),
    ),
    "no optimizer to clip": (
        r"clip_with: .*, got NoneType\. Write clip_with\(accelerator, optimizer\)",
        lambda s: integration("accelerate").clip_with(SimpleNamespace(clip_grad_norm_=len), None),
    ),
    "a name of a number": (r"parameter's name, got int", lambda _: ours.Experts(0, 4).global_name(3)),  # type: ignore[arg-type]
    "a fabric's model behind": (
        r"setup_optimizers\(fabric, model, optimizer\)",
        lambda s: integration("lightning").setup_optimizers(SimpleNamespace(setup_optimizers=1), s.optimizer, s.model),
    ),
    "a size for a policy": (r"Write OffloadPolicy\(device_bytes='8GB'\)", lambda _: policy_from("8GB")),  # type: ignore[arg-type]
    "metrics of a model": ("metrics_of: expected", lambda s: metrics_of(s.model)),
    "metrics of one": (r"Write metrics_of_each\(\[optimizer\], ", lambda s: metrics_of_each(s.optimizer, "{}")),
    "a model to offload": (
        r"^offload: .*, got FSDPSequential. Write offload\(optimizer, model, policy\)",
        lambda s: offload(s.model, s.optimizer, None),
    ),
    "the model of a model": (
        r"Optimizer first, got FSDPSequential. Write model_of\(optimizer, \[model\]\)",
        lambda s: model_of(s.model, [s.optimizer]),
    ),
    "one of one model": ("a list of models, got FSDPSequential", lambda s: model_of(s.optimizer, s.model)),
    "a policy's name in a list": (
        "^policy must be .*, got str. Write OffloadPolicy\\(overlap='step'\\)",
        lambda _: plan("Qwen3-14B", tokens_per_step=1, policies=["step"]),
    ),
    "a forecast's name": (
        r"got str. Write \[plan.passed_over\(one, overlap\) for one in plan.forecasts\]",
        lambda _: Plan.passed_over(None, "step"),  # type: ignore[arg-type]
    ),
    "groups of another model": (
        r"\(\*module.layers, module\), loss",
        lambda s: Model("m", s.model, (*Script().model,), len),
    ),
    "groups without the root": ("whose last is the module itself", lambda s: Model("m", s.model, (*s.model,), len)),
    "groups that are one module": ("a tuple of modules", lambda s: Model("m", s.model, s.model, len)),
    "no loss": ("a loss that can be called", lambda s: Model("m", s.model, (s.model,), None)),
    "a class for a policy": (
        "got the class OffloadPolicy",
        lambda s: offload_optimizer(s.optimizer, policy=OffloadPolicy),
    ),  # type: ignore[arg-type]
    "a class for an optimizer": (
        "got the class AdamW. Write offload_op",
        lambda _: offload_optimizer(torch.optim.AdamW),
    ),  # type: ignore[type-var]
    "no tokens": (r"^plan\(\) missing .* 'tokens_per_step'", lambda s: plan(s.model)),  # type: ignore[call-arg]
    "a number for a machine": ("^machine must be .* got int", lambda _: machine_of(3)),  # type: ignore[arg-type]
    "checkpointing of no kind": (
        "checkpointing must be auto, none, full or a number of blocks; got 'some'",
        lambda s: plan(s.model, tokens_per_step=1, checkpointing="some"),  # type: ignore[arg-type]
    ),
    "fewer than no sequences": (
        "cannot be run .* for -1 ×",
        lambda s: model_of_plan(s.model).trace(-1, 8, torch.float32),
    ),
    "nowhere to save": ("checkpoint_id must be a path, got NoneType. Write save", lambda _: ours.save({"a": 1})),
    "no name to load": ("checkpoint_id must be a path, got NoneType", lambda _: ours.load({"a": 1}, checkpoint_id="")),
    "a path that is a number": ("must be a path, got int. Write load", lambda _: ours.load({"a": 1}, checkpoint_id=3)),  # type: ignore[arg-type]
    "the whole state": (r"got \['optimizer'\]. Give its entry 'optimizer'", lambda s: s.set({"optimizer": s.get()})),
    "state by number": ("numbers in the place of names", lambda s: s.set({**DICT, "state": {0: {}}})),
    "no folder": ("the folder of a checkpoint, or its fsspec URL, got ''", lambda _: checkpoint_tools.verify("")),
    "a folder of a number": ("the folder of a checkpoint, .* got 3", lambda _: checkpoint_tools.verify(3)),  # type: ignore[arg-type]
    "candidates for text": ("state_bytes must be 0 or more", lambda _: candidates("x")),  # type: ignore[arg-type]
    "other bytes below 0": ("0 or more bytes, got -1", lambda _: Training(tokens_per_step=1, other_device_bytes=-1)),
    "optimizers of a list": ("got \\['adamw'\\]", lambda _: Training(tokens_per_step=1, optimizer=["adamw"])),  # type: ignore[arg-type]
    "memory in text": ("finite, got '80'", lambda _: plan("Llama-3.1-8B", tokens_per_step=1, device_gb="80")),  # type: ignore[arg-type]
    "a text file for a model": (
        r"notes.txt is no JSON .*Give a config.json, its folder, or package.module:function",
        lambda _: (Path("notes.txt").write_text("the model"), plan("notes.txt", tokens_per_step=4096)),
    ),
    "a list for a config": (
        "model_type is None",
        lambda _: (Path("list.json").write_text("[1]"), plan("list.json", tokens_per_step=4096)),
    ),
    "a flag for a size": ("finite, got True", lambda _: plan("Qwen3-14B", tokens_per_step=1, device_gb=True)),
    "policies in text": ("OffloadPolicy, got str", lambda _: plan("Llama-3.1-8B", tokens_per_step=1, policies="step")),
    "no rules": (r"rules, such as .*, got dict and \[\]", lambda _: checkpoint_tools.split_state_dict({}, None, [])),
    "one rule": (
        "rules, such as .*, got dict and Rule",
        lambda _: checkpoint_tools.split_state_dict({}, None, RULES[0]),
    ),  # type: ignore[arg-type]
    "values in text": (
        r"values=\{'tp_size': 2\}",
        lambda _: checkpoint_tools.split_state_dict({}, None, RULES, values="tp"),  # type: ignore[arg-type]
    ),
    "exclude from a name": ("rules first, got 'hf'", lambda _: checkpoint_tools.excluding("hf", "a")),  # type: ignore[arg-type]
    "threads in text": ("threads must be .*, got '4'", lambda _: checkpoint_tools.seal("here", threads="4")),  # type: ignore[arg-type]
    "no threads": ("threads must be .*, got 0", lambda _: checkpoint_tools.verify("here", threads=0)),
}
"""By the use: what is said."""


def clip(*given: Any) -> object:
    return fsdp_offload.clip_grad_norm_(*given)


@pytest.mark.parametrize("use", WRONG)
def test_a_wrong_use_is_told_what_was_given_and_what_is_wanted(
    use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    script = Script(attach=True)
    says, call = WRONG[use]
    with pytest.raises((TypeError, ValueError), match=says):
        call(script)
    script.train()


MEANT: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a field": (r"Did you mean device_bytes\? Write OffloadPolicy\(", lambda _: OffloadPolicy(device_byte=1)),  # type: ignore[call-arg]
    "a field by place": (r"too many .* Write OffloadPolicy\(", lambda _: OffloadPolicy("forward")),  # type: ignore[misc]
    "a dict's field": (
        r"OffloadPolicy has no paramters\. Did you mean parameters\? It has parameters, ",
        lambda s: s.attach(paramters=1),
    ),
    "a dict's unknown field": (r"OffloadPolicy has no xyz\. It has parameters, ", lambda s: s.attach(xyz=True)),
    "a keyword": (r"OffloadPolicy\(device_bytes=1\)\)", lambda s: offload_optimizer(s.optimizer, device_byte=1)),
    "the policy": (r"model=model, policy=\{\}\)", lambda s: offload_optimizer(s.optimizer, offload_policy={})),
    "exist_ok": (r"model=model, exist_ok=True\)", lambda s: offload_optimizer(s.optimizer, exists_ok=True)),
    "masters": (r"add_masters\(optimizer, kind\) adds", lambda s: offload_optimizer(s.optimizer, masters="fp32")),
    "a norm": (r"norm_type\? Write clip_grad", lambda s: fsdp_offload.clip_grad_norm_(s.optimizer, 1, norm_typ=2)),
    "sleep": (r"gradients\? Write offload_model\(", lambda s: fsdp_offload.offload_model(s.model, gradient="drop")),
    "state": ("Did you mean free_host_memory", lambda s: fsdp_offload.reload_states(s.optimizer, free_host=True)),
    "initialize": ("Did you mean initialize", lambda s: fsdp_offload.materialize_on_host(s.model, initial=len)),
    "full state": ("torch's function gathers full ones", lambda _: ours.get_optimizer_state_dict(full_state_dict=True)),  # type: ignore[call-arg]
    "what may be missing": ("Did you mean allow_missing", lambda _: ours.LoadPlanner(allow_mising=True)),  # type: ignore[call-arg]
    "a stager's class": (r"async_stager=ArenaStager\(optimizer\)", lambda _: ours.ArenaStager.stage({"a": 1})),  # type: ignore[arg-type, call-arg]
    "ranks": (r"Did you mean ranks\? Write plan\(", lambda _: plan("Qwen3-14B", tokens_per_step=4096, rank=8)),
    "values": (r"values=\{'tp_size': 2\}\)", lambda _: checkpoint_tools.split_state_dict({}, {}, (), tp_size=2)),  # type: ignore[call-arg]
    "a trainer's": ("Did you mean offload_policy", lambda _: integration("transformers").OffloadTrainer(policy={})),
    "a callback's field": (r"Write OffloadCallback\(\{", lambda _: integration("lightning").OffloadCallback(overlap=1)),
    "Fabric's": (r"policy\? Write optimizer", lambda s: integration("lightning").setup_optimizers(s.model, polcy={})),
    "accelerate's": ("by its name. Write model, opt", lambda _: integration("accelerate").prepare(ACCEL, polcy={})),
    "torchtitan's field": (r"Write offloaded\(config", lambda _: integration("torchtitan").offloaded(None, overlap=1)),
}
"""What a message asks or says to write for a name that is like another one, or in another's place."""

ACCEL = SimpleNamespace(prepare=len)


@pytest.mark.parametrize("name", MEANT)
def test_a_name_that_is_like_another_gets_that(name: str) -> None:
    says, call = MEANT[name]
    script = Script()
    with pytest.raises((TypeError, ValueError), match=says):
        call(script)
    assert not is_offloaded(script.optimizer)
    script.attach().train()


@pytest.mark.parametrize("overlap", ["step", "iteration"])
@pytest.mark.parametrize("wrong", ["x", 3, torch.ones(3)], ids=repr)
def test_state_that_is_none_is_refused_before_any_update(wrong: object, overlap: str) -> None:
    """A counter of the parameter whose bucket is updated last: the class would have updated others before it fails."""
    script = Script(torch.optim.NAdam).attach(overlap=overlap, bucket_bytes=1024)
    script.train(3)
    for param in script.model.parameters():
        counters, weights = script.optimizer.state[param], script.weights()
        with pytest.raises(TypeError, match=r"a dict of .*, got \w+\. Write optimizer\.state\[param\]\['exp_avg'\] = "):
            script.optimizer.state[param] = wrong
        kept, counters["step"] = counters["step"], wrong
        with pytest.raises(ValueError, match=r"\['step'\] must be a tensor of one .*Nothing has been changed"):
            script.train(1)
        assert all(map(torch.equal, weights, script.weights()))
        counters["step"] = kept
        script.optimizer.zero_grad()


def test_what_was_made_to_load_into_is_not_saved_by_torchs_function_either(tmp_path: Path) -> None:
    for script in (Script(attach=True), Script()):
        made = script.template()
        with pytest.raises(CheckpointException, match="nothing has been written: for_load=True made this state dict"):
            dcp.save({"o": made}, checkpoint_id=tmp_path, planner=ours.SavePlanner())


def test_groups_without_their_hyperparameters_are_told_in_order_and_in_short() -> None:
    script = Script(attach=True)
    script.optimizer.param_groups = [{"params": list(script.model.parameters())}]
    with pytest.raises(ValueError, match=r"without 'amsgrad', .*without 'decoupled_weight_decay' and \d+ more: KeyE"):
        script.train()


def test_an_optimizer_in_the_place_of_parameters_gets_accelerates_own_line() -> None:
    accelerator, script = SimpleNamespace(clip_grad_norm_=len), Script(attach=True)
    integration("accelerate").clip_with(accelerator, script.optimizer)
    with pytest.raises(TypeError, match=r"got OffloadedAdamW\. Write accelerator\.clip_grad_norm_\(model\.parameters"):
        accelerator.clip_grad_norm_(script.optimizer, 1.0)


def state_dicts(function: Callable[..., object], *more: object) -> Callable[[Script, dict[str, Any]], object]:
    return lambda script, choice: function(script.model, script.optimizer, *more, **choice)


CHOICES: dict[str, Callable[[Script, dict[str, Any]], object]] = {
    "exist_ok": lambda s, choice: offload_optimizer(s.optimizer, model=s.model, **choice),
    "trust_separable": lambda s, choice: offload_optimizer(s.optimizer, model=s.model, **choice),
    "for_load": state_dicts(ours.get_optimizer_state_dict),
    "flatten_optimizer_state_dict": state_dicts(ours.get_optimizer_state_dict),
    "cpu_offload": state_dicts(ours.get_optimizer_state_dict),
    "fsdp_dtensor": state_dicts(ours.get_optimizer_state_dict),
    "strict": state_dicts(ours.set_optimizer_state_dict, {}),
    "no_dist": lambda _, choice: ours.save({"a": 1}, checkpoint_id="nowhere", **choice),
    "no_dist of a load": lambda _, choice: ours.load({"a": 1}, checkpoint_id="nowhere", **choice),
    "error_if_nonfinite": lambda s, choice: fsdp_offload.clip_grad_norm_(s.optimizer, 1.0, **choice),
    "foreach": lambda s, choice: fsdp_offload.clip_grad_norm_(s.optimizer, 1.0, **choice),
    "free_host_memory": lambda s, choice: fsdp_offload.reload_model(s.model, **choice),
    "free_host_memory of state": lambda s, choice: fsdp_offload.reload_states(s.attach().optimizer, **choice),
    "clip": lambda _, choice: Training(tokens_per_step=4096, **choice),
    "data": lambda _, choice: checkpoint_tools.verify("nowhere", **choice),
    "log_metrics": lambda _, choice: integration("lightning").OffloadCallback(**choice),
    "offload_metrics": lambda _, choice: integration("transformers").OffloadTrainer(None, **choice),
}


@pytest.mark.parametrize("name", CHOICES)
def test_text_is_no_choice(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    script, keyword = Script(), name.partition(" ")[0]
    with pytest.raises(TypeError, match=f"{keyword} must be True or False, got 'no'"):
        CHOICES[name](script, {keyword: "no"})
    assert is_offloaded(script.optimizer) == (name == "free_host_memory of state")
    assert not list(tmp_path.iterdir())
