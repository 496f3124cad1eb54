"""Names between frameworks: from Hugging Face's to torchtitan's to Megatron's and back, and loaded where they are."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from checkpoint_tools.convert.translate import Translation, family_names, translate
from checkpoint_tools.core.errors import CheckpointError
from checkpoint_tools.look.diff import all_keys, diff
from checkpoint_tools.look.verify import check_structure
from checkpoint_tools.rewrite import rewrite
from checkpoint_tools.stored.opening import open_checkpoint
from checkpoint_tools.stored.reading import Checkpoint
from tests.checkpoint_tools.checkpoints import assert_one_line, run_here, save
from tests.checkpoint_tools.converted import converted
from tests.checkpoint_tools.formats import stepped
from tests.checkpoint_tools.megatron import LAYERS, TOKENS, Training, cpu_for_cuda
from tests.checkpoint_tools.offline import same_bits, values_of
from tests.cpu.checkpoint_tools.test_merge_inverts import SMALL
from tests.distributed.launch import spawn

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}),
}
VALUES = {"head_dim": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_of(family: str) -> Any:
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**SMALL, **options, rms_norm_eps=1e-5)
    return getattr(hf, f"{name}ForCausalLM")(config).eval()


def renamed(family: str, source: Path, target: Path, to: str, *, of: str = "hf", **values: float) -> Checkpoint:
    asked = Translation(family, of, to, values, ())
    translate(str(source), str(target), asked, threads=2, max_memory_bytes=1 << 24)
    made = open_checkpoint(target)
    assert check_structure(made, 1)[0] == []
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family, its model, and a folder with the model as each framework has it."""
    folder = tmp_path_factory.mktemp("frameworks")
    model = model_of(request.param)
    model.save_pretrained(folder / "hf")
    converted(folder / "hf", folder / "dcp")
    renamed(request.param, folder / "dcp", folder / "torchtitan", "torchtitan")
    renamed(request.param, folder / "torchtitan", folder / "megatron", "megatron", of="torchtitan")
    renamed(request.param, folder / "megatron", folder / "back", "hf", of="megatron")
    assert sorted(path.name for path in folder.iterdir()) == ["back", "dcp", "hf", "megatron", "torchtitan"]
    return request.param, model, folder


def test_there_and_back_is_the_same_and_transformers_loads_it(family: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, model, folder = family
    converted(folder / "back", tmp_path / "hf")
    first, last = open_checkpoint(folder / "hf"), open_checkpoint(tmp_path / "hf")
    assert not diff(first, last, all_keys(first, last))
    loaded = type(model).from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_what_torchtitan_has(family: tuple[str, Any, Path]) -> None:
    """As its ``state_dict_adapter`` of each family computes it, by indices."""
    name, _, folder = family
    before, found = values_of(open_checkpoint(folder / "hf")), values_of(open_checkpoint(folder / "torchtitan"))
    for n in range(2):
        theirs, ours = f"model.layers.{n}.", f"layers.{n}."
        for letter, heads in (("q", 4), ("k", 2)):
            expected = before[f"{theirs}self_attn.{letter}_proj.weight"]
            if name == "llama":
                expected = expected.view(heads, 2, 2, 16).transpose(1, 2).reshape(heads * 4, 16)
            assert same_bits(found.pop(f"{ours}attention.qkv_linear.w{letter}.weight"), expected)
        if name == "qwen3-moe":
            for letter, what in (("w1_EFD", "gate"), ("w3_EFD", "up"), ("w2_EDF", "down")):
                experts = [before[f"{theirs}mlp.experts.{e}.{what}_proj.weight"] for e in range(3)]
                key = f"{ours}moe.routed_experts.inner_experts.{letter}"
                assert same_bits(found.pop(key), torch.stack(experts))
        else:
            for letter, what in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                expected = before[f"{theirs}mlp.{what}_proj.weight"]
                assert same_bits(found.pop(f"{ours}feed_forward.{letter}.weight"), expected)
    assert same_bits(found["tok_embeddings.weight"], before["model.embed_tokens.weight"])
    assert same_bits(found["lm_head.weight"], before["lm_head.weight"])


def test_what_megatron_has(family: tuple[str, Any, Path]) -> None:
    name, _, folder = family
    before, found = values_of(open_checkpoint(folder / "hf")), values_of(open_checkpoint(folder / "megatron"))
    for n in range(2):
        theirs, ours = f"model.layers.{n}.", f"decoder.layers.{n}."
        q, k, v = (before[f"{theirs}self_attn.{letter}_proj.weight"] for letter in "qkv")
        groups = [torch.cat([q[8 * g : 8 * g + 8], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4]]) for g in range(2)]
        assert same_bits(found[f"{ours}self_attention.linear_qkv.weight"], torch.cat(groups))
        if name == "qwen3-moe":
            experts = [expert(before, f"{theirs}mlp.experts.{e}.") for e in range(3)]
            assert same_bits(found[f"{ours}mlp.experts.experts.linear_fc1.weight"], torch.stack(experts))
        else:
            assert same_bits(found[f"{ours}mlp.linear_fc1.weight"], expert(before, f"{theirs}mlp."))


def expert(values: dict[str, Tensor], prefix: str) -> Tensor:
    return torch.cat([values[f"{prefix}gate_proj.weight"], values[f"{prefix}up_proj.weight"]])


@pytest.mark.distributed
def test_megatron_loads_it_and_computes_what_transformers_does(tmp_path: Path) -> None:
    expected = {}
    for name in ("llama", "qwen3"):
        model = model_of(name)
        model.save_pretrained(tmp_path / f"{name}-hf")
        converted(tmp_path / f"{name}-hf", tmp_path / f"{name}-dcp")
        renamed(name, tmp_path / f"{name}-dcp", tmp_path / name, "megatron")
        with torch.no_grad():
            expected[name] = model(TOKENS).logits
    torch.save(expected, tmp_path / "expected.pt")
    spawn(compute, 1, tmp_path, tmp_path)


def compute(rank: int, world_size: int, folder: Path) -> None:
    del rank, world_size
    expected = torch.load(folder / "expected.pt")
    with cpu_for_cuda():
        for name, logits in expected.items():
            training = Training(1, qk_layernorm=name == "qwen3", seed=7)
            torch.testing.assert_close(training.logits_of(folder / name, LAYERS), logits, rtol=1e-4, atol=1e-5)


def test_the_optimizers_state_comes_along(tmp_path: Path) -> None:
    model = model_of("llama")
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, stepped(model))}
    source = save(tmp_path / "source", state)
    there = renamed("llama", source, tmp_path / "there", "torchtitan", **VALUES)
    moments = values_of(open_checkpoint(source))["optim.state.model.layers.1.self_attn.q_proj.weight.exp_avg"]
    found = values_of(there)["optim.state.layers.1.attention.qkv_linear.wq.weight.exp_avg"]
    assert same_bits(found, moments.view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16))
    back = renamed("llama", tmp_path / "there", tmp_path / "back", "hf", of="torchtitan", **VALUES)
    plain = save(tmp_path / "plain", {**model.state_dict(), "optim": state["optim"]})
    assert values_of(back).keys() == values_of(open_checkpoint(plain)).keys()
    assert not diff(back, open_checkpoint(plain), all_keys(back, open_checkpoint(plain)))


def test_what_is_asked_for_wrongly(tmp_path: Path) -> None:
    weights = {key: value.contiguous() for key, value in model_of("qwen3").state_dict().items()}
    source = save(tmp_path / "source", {**weights, "extra.weight": torch.ones(1)})
    command = ("rename", source, tmp_path / "new", "--family", "qwen3", "--from", "hf", "--to")
    assert family_names() == ("llama", "qwen3", "qwen3-moe")
    assert_one_line(
        run_here(*command[:-4], "gemma", "--from", "hf", "--to", "hf"), "no family 'gemma'; there are llama"
    )
    assert_one_line(run_here(*command, "nemo"), "no framework 'nemo' in the family qwen3; there are hf, torchtitan")
    assert_one_line(run_here(*command, "hf"), "--from and --to are both hf")
    assert_one_line(run_here(*command, "torchtitan"), "no name is known for extra.weight. Is it this family")
    missing = run_here(*command, "megatron", "--exclude", "extra.*")
    assert_one_line(missing, "give --value head_dim=NUMBER --value num_attention_heads=NUMBER --value num_key_value_h")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    done = run_here(*command, "torchtitan", "--exclude", "extra.*")
    assert done.returncode == 0, done.stderr
    assert "25 keys as torchtitan has them" in done.stdout


def test_a_family_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        """
        [source]
        hf = ""
        ours = ""
        [[name]]
        hf = 'layers.{n}.weight'
        ours = 'blocks.{n}.w'
        """
    )
    source = save(tmp_path / "source", {"layers.0.weight": torch.ones(2), "layers.1.weight": torch.zeros(3)})
    command = ("rename", source, tmp_path / "new", "--from", "hf", "--to", "ours", "--family")
    assert run_here(*command, tmp_path / "own.toml").returncode == 0
    assert set(open_checkpoint(tmp_path / "new").tensors) == {"blocks.0.w", "blocks.1.w"}
    for text, message in (("[", "is no TOML"), ("name = 1", "has to have [source]")):
        (tmp_path / "bad.toml").write_text(text)
        wrong = ("rename", source, tmp_path / "x", "--from", "hf", "--to", "ours", "--family", tmp_path / "bad.toml")
        assert_one_line(run_here(*wrong), message)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tmp_path / "source", {"model": model_of("llama").state_dict()})


def test_nothing_is_left_of_an_interrupted_rename(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = renamed("llama", llama, tmp_path / "expected", "megatron", **VALUES)
    write, done = rewrite.write, []

    def interrupted(*args: Any, **options: Any) -> None:
        if done:
            raise KeyboardInterrupt
        write(*args, **options)
        done.append(args[2])

    monkeypatch.setattr(rewrite, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        renamed("llama", llama, tmp_path / "new", "megatron", **VALUES)
    assert done == [f"{tmp_path}/new.steps/0"]
    assert list(tmp_path.glob("new*")) == []
    monkeypatch.setattr(rewrite, "write", write)
    made = renamed("llama", llama, tmp_path / "new", "megatron", **VALUES)
    assert list(tmp_path.glob("new.*")) == []
    keys = all_keys(expected, made)
    assert set(keys) == set(expected.tensors) | set(expected.objects)
    assert diff(expected, made, keys) == []


def test_two_renames_to_one_place(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is refused, and takes nothing from the first; one that cannot be done leaves nothing."""
    write = rewrite.write

    def with_another(*args: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rewrite, "write", write)
            with pytest.raises(CheckpointError, match="another process is writing"):
                renamed("llama", llama, tmp_path / "new", "megatron", **VALUES)
        write(*args, **options)

    monkeypatch.setattr(rewrite, "write", with_another)
    renamed("llama", llama, tmp_path / "new", "megatron", **VALUES)
    monkeypatch.setattr(rewrite, "write", write)
    with pytest.raises(CheckpointError):
        renamed("llama", tmp_path / "new", tmp_path / "other", "torchtitan", **VALUES)
    assert list(tmp_path.glob("*.steps*")) == []


def test_its_progress_is_told(llama: Path, tmp_path: Path) -> None:
    told: dict[str, list[int]] = {}

    def progress(what: str, nbytes: int) -> Any:
        told[what] = [nbytes]
        return contextlib.nullcontext(told[what].append)

    asked = Translation("llama", "hf", "megatron", VALUES, ())
    translate(str(llama), str(tmp_path / "new"), asked, threads=1, max_memory_bytes=1 << 24, progress=progress)
    assert list(told) == [f"rename, {number} of {len(told)}" for number in range(1, len(told) + 1)]
    assert len(told) > 1
    assert all(0 < sum(done) <= total for total, *done in told.values())  # what is around elements is not told of
