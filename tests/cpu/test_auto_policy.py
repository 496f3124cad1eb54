"""``policy="auto"``: what it chooses follows from what the loop promises, it says so, and the bits stay the same."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_offload import OffloadPolicy, offload_optimizer, remove_offload
from fsdp_offload.api.attachment import engine_of
from fsdp_offload.planning import choices
from fsdp_offload.planning.choices import Choice, Loop, auto_policy
from tests.overlapping import Loop as Training
from tests.overlapping import adamw, same

pytestmark = pytest.mark.filterwarnings("ignore:offload_optimizer. The parameters are on the CPU:UserWarning")

CHOSEN: dict[Loop, Choice] = {
    "any": Choice("step"),
    "synchronizes": Choice("forward", "auto"),
    "no_clipping": Choice("iteration", "auto"),
}
KNOWN = {"hides": "", "elementwise": True, "updates_early": True, "state_bytes": 1 << 30, "tensors": 50}


@pytest.fixture
def large_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests have little state for each parameter."""
    monkeypatch.setattr(choices, "_SMALL_STATE_BYTES", 0)


def attached(mesh: DeviceMesh, loop: Loop) -> Training:
    training = Training(mesh, adamw, None)
    offload_optimizer(training.optimizer, model=training.model, policy="auto", loop=loop)
    return training


@pytest.mark.usefixtures("large_state")
@pytest.mark.parametrize("loop", CHOSEN)
def test_same_bits_while_it_finds_out(mesh: DeviceMesh, loop: Loop) -> None:
    plain, offloaded = Training(mesh, adamw, None), attached(mesh, loop)
    assert same(plain.train(18), offloaded.train(18))


@pytest.mark.usefixtures("large_state")
@pytest.mark.parametrize("loop", CHOSEN)
def test_it_says_what_it_chose_and_why(mesh: DeviceMesh, loop: Loop) -> None:
    training = attached(mesh, loop)
    policy = engine_of(training.optimizer).policy
    assert policy == CHOSEN[loop].policy(0)
    said = training.optimizer.offload_report().tuning[0]
    assert said.startswith("policy='auto': OffloadPolicy(")
    assert f"loop='{loop}' allows" in said
    assert (f'overlap="{policy.overlap}"' in said) == (policy.overlap != "step")


@pytest.mark.parametrize("loop", CHOSEN)
def test_little_state_for_each_parameter_is_moved_in_one_go(mesh: DeviceMesh, loop: Loop) -> None:
    plain, offloaded = Training(mesh, adamw, None), attached(mesh, loop)
    expected = Choice("step" if loop == "any" else "forward")
    assert engine_of(offloaded.optimizer).policy == expected.policy(0)
    said = offloaded.optimizer.offload_report().tuning[0]
    assert ("in less time than the host needs to issue it" in said) == (loop != "any")
    assert same(plain.train(4), offloaded.train(4))


def test_where_little_state_begins() -> None:
    known = {**KNOWN, "tensors": 100}
    for nbytes, choice in (((12 << 20) - 1, Choice("forward")), (12 << 20, Choice("iteration", "auto"))):
        policy, _ = auto_policy("no_clipping", **{**known, "state_bytes": 100 * nbytes})
        assert policy == choice.policy(100 * nbytes)


def test_a_model_that_is_not_sharded_or_not_given_hides_nothing() -> None:
    model = torch.nn.Linear(8, 8)
    for given, why in ((None, "without model="), (model, "not sharded by fully_shard")):
        optimizer = torch.optim.AdamW(model.parameters())
        offload_optimizer(optimizer, model=given, policy="auto", loop="no_clipping")
        assert why in optimizer.offload_report().tuning[0]
        assert engine_of(optimizer).policy == OffloadPolicy()
        remove_offload(optimizer)


def test_what_an_optimizer_cannot_do_is_not_chosen() -> None:
    whole, _ = auto_policy("no_clipping", **{**KNOWN, "elementwise": False})
    late, why = auto_policy("no_clipping", **{**KNOWN, "updates_early": False})
    assert whole == Choice("iteration").policy(1 << 30)
    assert late == Choice("forward", "auto").policy(1 << 30)
    assert "behind the next forward" in why


def test_promises_that_nobody_knows_and_that_nobody_needs(mesh: DeviceMesh) -> None:
    training = Training(mesh, adamw, None)
    with pytest.raises(ValueError, match="loop must be one of any, synchronizes, no_clipping; got 'never'"):
        offload_optimizer(training.optimizer, model=training.model, policy="auto", loop="never")
    with pytest.raises(ValueError, match="is a promise to policy='auto'; got policy=None"):
        offload_optimizer(training.optimizer, model=training.model, loop="synchronizes")
    with pytest.raises(TypeError, match="policy must be an OffloadPolicy"):
        offload_optimizer(training.optimizer, policy="automatic")


def test_attaching_again_is_the_same_only_if_it_was_auto(mesh: DeviceMesh) -> None:
    training = attached(mesh, "any")
    offload_optimizer(training.optimizer, model=training.model, policy="auto", exist_ok=True)
    other = Training(mesh, adamw, OffloadPolicy())
    with pytest.raises(RuntimeError, match="offloaded already"):
        offload_optimizer(other.optimizer, model=other.model, policy="auto", exist_ok=True)
