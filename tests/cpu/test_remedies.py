"""Remedies: each refusal is provoked, what its message says is done, and training goes on.

A message with a line to write is obeyed to the letter: the line is executed, with the names of its reader's script.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fsdp_offload
from fsdp_offload import OffloadPolicy, is_offloaded, offload_optimizer
from fsdp_offload import checkpoint as ours
from fsdp_offload.integrations.plain_values import policy_from
from tests.fused_adam_reference import FusedAdam
from tests.remedies import Script

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
    names = (
        {"max_norm": 1.0, "state_dict": ours.get_optimizer_state_dict(script.model, script.optimizer)} if attach else {}
    )
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
        assert attached_policy(script).overlap != "step"


def attached_policy(script: Script) -> OffloadPolicy:
    from fsdp_offload.engine.engine import engine_of

    engine = engine_of(script.optimizer)
    assert engine is not None
    return engine.policy


def test_an_overlap_in_the_place_of_a_trainers_policy() -> None:
    pytest.importorskip("transformers")
    from fsdp_offload.integrations.transformers import OffloadTrainer

    with pytest.raises(TypeError, match=r"got 'forward'\. Write OffloadPolicy\(overlap='forward'\)"):
        OffloadTrainer(None, offload_policy="forward")


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


@pytest.mark.parametrize("name", ["snapshot_bytes", "host_limit_bytes"])
def test_sizes_without_auto_say_so(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be an integer number .* or '8GB', got"):
        OffloadPolicy(**{name: "auto"})


def test_a_size_is_an_option_of_torchtitan() -> None:
    tyro = pytest.importorskip("tyro")
    for text, expected in (*SIZES.items(), ("auto", "auto"), ("4096", 4096)):
        assert tyro.cli(OffloadPolicy, args=["--device_bytes", text]).device_bytes == expected
    assert tyro.cli(OffloadPolicy, args=["--host_limit_bytes", "None"]).host_limit_bytes is None


def test_a_step_takes_one_closure() -> None:
    script = Script(torch.optim.NAdam, attach=True)
    script.backward()
    with pytest.raises(TypeError, match=r"NAdam\.step\(\) takes a closure or nothing, got 2 arguments"):
        script.optimizer.step(None, 4)
    script.train()


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
    saved = {"optimizer": ours.get_optimizer_state_dict(script.model, script.optimizer), "seed": 5}
    ours.save(saved, checkpoint_id=tmp_path / "there")
    state = {"optimizer": ours.get_optimizer_state_dict(script.model, script.optimizer, for_load=True), "epoch": 0}
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
    # allow_missing=[patterns] leaves such keys as they are.
    ours.load(state, checkpoint_id=tmp_path / "there", planner=ours.LoadPlanner(allow_missing=["epoch"]))
    ours.set_optimizer_state_dict(script.model, script.optimizer, state["optimizer"])
    script.train()


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


def whole(script: Script, form: dict[str, Any]) -> Any:
    return ours.get_optimizer_state_dict(script.model, script.optimizer, for_load=True, **form)


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

    script = Script(torch.optim.RMSprop, lr=0.02, momentum=0.5, attach=True)
    scheduler = LambdaLR(script.optimizer, factor)
    for _ in range(4):
        script.train(1)
        scheduler.step()
    saved = ours.get_optimizer_state_dict(script.model, script.optimizer, **form)
    ours.save(saved if is_root else {"optimizer": saved}, checkpoint_id=tmp_path)
    rates = []
    for _ in range(2):
        script.train(1)
        scheduler.step()
        rates += scheduler.get_last_lr()
    other = Script(torch.optim.RMSprop, lr=0.02, momentum=0.5, attach=True)
    template = whole(other, form)
    state = template if is_root else {"optimizer": template}
    loaded = ours.load(state, checkpoint_id=tmp_path)
    assert any(key.endswith("initial_lr") for key in loaded.filled)
    ours.set_optimizer_state_dict(other.model, other.optimizer, state if is_root else state["optimizer"])
    assert [group["initial_lr"] for group in other.optimizer.param_groups] == [0.02]
    scheduler = LambdaLR(other.optimizer, factor, last_epoch=3)
    resumed = []
    for _ in range(2):
        other.train(1)
        scheduler.step()
        resumed += scheduler.get_last_lr()
    assert resumed == rates


def test_a_refused_load_adds_nothing_to_the_groups(tmp_path: Path) -> None:
    script = Script(attach=True)
    script.train()
    script.optimizer.param_groups[0] |= {"initial_lr": 0.5, "warm": torch.tensor(0.25)}
    ours.save({"o": ours.get_optimizer_state_dict(script.model, script.optimizer), "more": 1}, checkpoint_id=tmp_path)
    other = Script(attach=True)
    state = {"o": whole(other, {}), "less": 1}
    with pytest.raises(ValueError, match="less"):
        ours.load(state, checkpoint_id=tmp_path)
    assert "initial_lr" not in state["o"]["param_groups"][0]
    state = {"o": whole(other, {}), "more": 0}
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
    saved = {"m": one.model.state_dict(), "o": ours.get_optimizer_state_dict(one.model, one.optimizer)}
    ours.save(saved, checkpoint_id=tmp_path)
    one.train(2)
    other = script_of()
    with pytest.raises(
        ValueError, match=r"Call get_optimizer_state_dict of torch\.distributed\.checkpoint\.state_dict once"
    ):
        whole(other, {})
    torch_state_dict.get_optimizer_state_dict(other.model, other.optimizer)
    state = {"m": other.model.state_dict(), "o": whole(other, {})}
    ours.load(state, checkpoint_id=tmp_path)
    other.model.load_state_dict(state["m"])
    ours.set_optimizer_state_dict(other.model, other.optimizer, state["o"])
    other.train(2)
    assert all(map(torch.equal, one.weights(), other.weights()))


def test_plain_tensors_for_sharded_state() -> None:
    script = Script(attach=True)
    script.train()
    saved = script.optimizer.state_dict()
    for state in saved["state"].values():
        for name, value in state.items():
            if value.dim():
                state[name] = value.full_tensor().clone()
    before = script.weights()
    with pytest.raises(ValueError, match=r"got a plain tensor of shape \(.*set_optimizer_state_dict"):
        script.optimizer.load_state_dict(saved)
    assert all(map(torch.equal, before, script.weights()))
    names = [name for name, _ in script.model.named_parameters()]
    full = {
        "state": {names[number]: state for number, state in saved["state"].items()},
        "param_groups": [{**group, "params": [names[n] for n in group["params"]]} for group in saved["param_groups"]],
    }
    ours.set_optimizer_state_dict(script.model, script.optimizer, full)
    script.train()


# Remedies that reach where they are needed ----------------------------------------------------------------------------


class Halved(Optimizer):
    """A class of a user's: steps by half of the gradient, and counts in its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                param.sub_(self.state[param]["sum"], alpha=self.param_groups[0]["lr"])


def test_trust_is_a_field_that_integrations_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_offload.integrations.plain_values import offload

    script = Script(Halved)
    with pytest.warns(UserWarning, match=r"moves as a whole.*OffloadPolicy\(trust_separable=True\) moves it in pieces"):
        offload(script.optimizer, script.model, None)
    plain = Script(Halved)
    plain.train(3)
    for given in ({"trust_separable": True, "overlap": "forward"}, None):
        monkeypatch.setenv("FSDP_OFFLOAD_TRUST_SEPARABLE", "1" if given is None else "")
        script = Script(Halved)
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


@pytest.mark.parametrize("name", ["exist_ok", "trust_separable"])
def test_text_is_no_promise(name: str) -> None:
    script = Script()
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        offload_optimizer(script.optimizer, model=script.model, **{name: "no"})  # type: ignore[arg-type]
    assert not is_offloaded(script.optimizer)
