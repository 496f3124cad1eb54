"""Several state dicts of ``for_load=True`` at once: the one that is set has what was loaded into it, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_offload.checkpoint import load, save
from tests.remedies import Script

pytestmark = [pytest.mark.usefixtures("mesh"), pytest.mark.filterwarnings("ignore:offload_optimizer")]
both = pytest.mark.parametrize("attach", [False, True], ids=["plain", "offloaded"])


class Two:
    """A checkpoint of four steps, an optimizer without state, and two dicts to load into."""

    def __init__(self, path: Path, *, attach: bool) -> None:
        self.path, self.saved, self.resumed = path, Script(torch.optim.RAdam), Script(torch.optim.RAdam, attach=attach)
        self.saved.train(4)
        save({"o": self.saved.get()}, checkpoint_id=path)
        self.dicts = {name: self.resumed.template() for name in "AB"}

    def load(self, name: str) -> None:
        load({"o": self.dicts[name]}, checkpoint_id=self.path)

    def set(self, name: str) -> None:
        self.resumed.set(self.dicts[name])

    def assert_loaded(self) -> None:
        pairs = zip(self.saved.model.parameters(), self.resumed.model.parameters(), strict=True)
        for saved, resumed in pairs:
            for name, value in self.saved.optimizer.state[saved].items():
                assert torch.equal(value, self.resumed.optimizer.state[resumed][name]), name


@both
@pytest.mark.parametrize(
    ("loaded", "is_set"), [("", "A"), ("", "B"), ("A", "A"), ("B", "B"), ("A", "B"), ("B", "A"), ("AB", "A")]
)
def test_what_is_set_was_loaded(tmp_path: Path, attach: bool, loaded: str, is_set: str) -> None:
    two = Two(tmp_path, attach=attach)
    for name in loaded:
        two.load(name)
    if is_set not in loaded:
        with pytest.raises(ValueError, match=r"nothing was loaded|'step'\] was not loaded"):
            two.set(is_set)
        two.load(is_set)
    two.set(is_set)
    two.assert_loaded()


@both
def test_after_another_was_set(tmp_path: Path, attach: bool) -> None:
    two = Two(tmp_path, attach=attach)
    two.load("B")
    two.set("B")
    with pytest.raises(ValueError, match=r"nothing was loaded|'step'\] was not loaded"):
        two.set("A")
    two.assert_loaded()
    two.load("A")
    two.set("A")
    two.assert_loaded()
    del two.dicts["A"]
    two.dicts["A"] = two.resumed.template()  # of state that there is
    two.set("B")
    two.assert_loaded()


def test_a_save_in_between_makes_no_state_of_unfilled_memory(tmp_path: Path) -> None:
    two = Two(tmp_path, attach=False)
    two.resumed.train(1)
    two.resumed.get()
    with pytest.raises(ValueError, match="nothing was loaded"):
        two.set("A")


@both
@pytest.mark.parametrize("key", ["seen", 1], ids=repr)
def test_state_of_no_parameter_is_refused(attach: bool, key: Any) -> None:
    script = Script(torch.optim.RAdam, attach=attach)
    script.train(1)
    script.optimizer.state[key] = {"sum": torch.ones(2)}
    for for_load in (False, True):
        with pytest.raises(ValueError, match=rf"{key!r}.*no parameter.*Keep it in an attribute of the optimizer"):
            script.get(for_load=for_load)
    other = Script(torch.optim.RAdam)
    other.train(1)
    saved = other.get()
    with pytest.raises(ValueError, match=rf"{key!r}.*no parameter"):
        script.set(saved)
    script.optimizer.seen = script.optimizer.state.pop(key)
    script.set(saved)
    assert torch.equal(script.optimizer.seen["sum"], torch.ones(2))


@both
def test_a_state_dict_without_state_is_told_beside_a_forgotten_template(tmp_path: Path, attach: bool) -> None:
    two = Two(tmp_path, attach=attach)
    two.load("B")
    two.set("B")
    with pytest.warns(UserWarning, match="this state dict has no state"):
        two.resumed.set({**two.dicts["B"], "state": {}})
