"""Names between frameworks: from Hugging Face's to torchtitan's to Megatron's and back, and loaded where they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from checkpoint_tools import rewrite
from checkpoint_tools.fuse import files
from tests.checkpoint_tools.formats import stepped
from tests.checkpoint_tools.megatron import LAYERS, TOKENS, Training, cpu_for_cuda
from tests.checkpoint_tools.saves import same_bits, save
from tests.checkpoint_tools.tool import assert_one_line, made, names, run, shapes_of, shown, values_of
from tests.cpu.checkpoint_tools.test_formats_transformers import SMALLER
from tests.cpu.checkpoint_tools.test_round_trip import loaded
from tests.distributed.launch import spawn

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}),
}
COUNTS = ("head_dim=4", "num_attention_heads=4", "num_key_value_heads=2")
VALUES = [word for count in COUNTS for word in ("--value", count)]


def model_of(family: str) -> Any:
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**SMALLER, **options, rms_norm_eps=1e-5)
    return getattr(hf, f"{name}ForCausalLM")(config).eval()


def renamed(family: str, source: Path, target: Path, to: str, *options: str, of: str = "hf") -> Path:
    """The new one, which is whole."""
    return made("rename", source, target, "--family", family, "--from", of, "--to", to, *options)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family, its model, and a folder with the model as each framework has it."""
    folder = tmp_path_factory.mktemp("frameworks")
    model = model_of(request.param)
    model.save_pretrained(folder / "hf", max_shard_size="20KB")  # with an index
    made("convert", folder / "hf", folder / "dcp")
    renamed(request.param, folder / "dcp", folder / "torchtitan", "torchtitan")
    renamed(request.param, folder / "torchtitan", folder / "megatron", "megatron", of="torchtitan")
    renamed(request.param, folder / "megatron", folder / "back", "hf", of="megatron")
    assert names(folder) == ["back", "dcp", "hf", "megatron", "torchtitan"]
    return request.param, model, folder


def test_there_and_back_is_the_same_and_transformers_loads_it(family: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, model, folder = family
    made("convert", folder / "back", tmp_path / "hf", "--shard-size", 8_000)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    shown("diff", folder / "hf", tmp_path / "hf")
    loaded = type(model).from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_what_torchtitan_and_megatron_have(family: tuple[str, Any, Path]) -> None:
    """As torchtitan's ``state_dict_adapter`` of each family, and Megatron, have them: by indices."""
    name, _, folder = family
    before, found, mega = loaded(folder / "hf"), values_of(folder / "torchtitan"), values_of(folder / "megatron")
    for n in range(2):
        theirs, ours, megatrons = f"model.layers.{n}.", f"layers.{n}.", f"decoder.layers.{n}."
        q, k, v = (before[f"{theirs}self_attn.{letter}_proj.weight"] for letter in "qkv")
        groups = [torch.cat([q[8 * g : 8 * g + 8], k[4 * g : 4 * g + 4], v[4 * g : 4 * g + 4]]) for g in range(2)]
        assert same_bits(mega[f"{megatrons}self_attention.linear_qkv.weight"], torch.cat(groups))
        for letter, heads, own in (("q", 4, q), ("k", 2, k)):
            expected = own.view(heads, 2, 2, 16).transpose(1, 2).reshape(heads * 4, 16) if name == "llama" else own
            assert same_bits(found[f"{ours}attention.qkv_linear.w{letter}.weight"], expected)
        if name == "qwen3-moe":
            weights = {
                what: torch.stack([before[f"{theirs}mlp.experts.{e}.{what}_proj.weight"] for e in range(3)])
                for what in ("gate", "up", "down")
            }
            names = [f"{ours}moe.routed_experts.inner_experts.{w}" for w in ("w1_EFD", "w3_EFD", "w2_EDF")]
            fc1 = f"{megatrons}mlp.experts.experts.linear_fc1.weight"
        else:
            weights = {what: before[f"{theirs}mlp.{what}_proj.weight"] for what in ("gate", "up", "down")}
            names = [f"{ours}feed_forward.{w}.weight" for w in ("w1", "w3", "w2")]
            fc1 = f"{megatrons}mlp.linear_fc1.weight"
        assert same_bits(mega[fc1], torch.cat([weights["gate"], weights["up"]], -2))
        assert all(same_bits(found[key], weight) for key, weight in zip(names, weights.values(), strict=True))
    assert same_bits(found["tok_embeddings.weight"], before["model.embed_tokens.weight"])
    assert same_bits(found["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.distributed
def test_megatron_loads_it_and_computes_what_transformers_does(tmp_path: Path) -> None:
    expected = {}
    for name in ("llama", "qwen3"):
        model = model_of(name)
        model.save_pretrained(tmp_path / f"{name}-hf")
        dcp = made("convert", tmp_path / f"{name}-hf", tmp_path / f"{name}-dcp")
        renamed(name, dcp, tmp_path / name, "megatron")
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
    (source / "config.json").write_text("{}")
    record = {"format": files._FORMAT, "crc32": files._crc([]), "splits": []}  # its names would be those of the source
    (source / files.RECORD_FILE).write_text(json.dumps(record))
    there = renamed("llama", source, tmp_path / "there", "torchtitan", *VALUES)
    assert {"config.json", files.RECORD_FILE} & {file.name for file in there.iterdir()} == {"config.json"}
    moments = values_of(source)["optim.state.model.layers.1.self_attn.q_proj.weight.exp_avg"]
    found = values_of(there)["optim.state.layers.1.attention.qkv_linear.wq.weight.exp_avg"]
    assert same_bits(found, moments.view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16))
    back = renamed("llama", there, tmp_path / "back", "hf", *VALUES, of="torchtitan")
    shown("diff", back, save(tmp_path / "plain", {**model.state_dict(), "optim": state["optim"]}))


def test_what_is_asked_for_wrongly_and_a_family_of_ones_own(tmp_path: Path) -> None:
    weights = {key: value.contiguous() for key, value in model_of("qwen3").state_dict().items()}
    source = save(tmp_path / "source", {**weights, "extra.weight": torch.ones(1)})
    command = ("rename", source, tmp_path / "new", "--family", "qwen3", "--from", "hf", "--to")
    assert_one_line(run(*command, "torchtitan"), "no name is known for extra.weight. Is it this family")
    told = "give --value head_dim=NUMBER --value num_attention_heads=NUMBER --value num_key"
    assert_one_line(run(*command, "megatron", "--exclude", "extra.*"), told)
    assert names(tmp_path) == ["source"]
    assert "25 keys as torchtitan has them" in shown(*command, "torchtitan", "--exclude", "extra.*")
    own, listed = tmp_path / "own.toml", "[[name]]\nhf = 'layers.{n}.weight'\nours = 'blocks.{n}.w'\n"
    source = save(tmp_path / "own", {"layers.0.weight": torch.ones(2), "layers.1.weight": torch.zeros(3)})
    own.write_text(f"[source]\nhf = ''\nours = ''\n{listed}")
    shown("rename", source, tmp_path / "renamed", "--from", "hf", "--to", "ours", "--family", own)
    assert set(shapes_of(tmp_path / "renamed")) == {"blocks.0.w", "blocks.1.w"}


def test_renames_that_are_interrupted_or_two_at_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left; the second one is refused, and takes nothing from the first."""
    llama = save(tmp_path / "source", {"model": model_of("llama").state_dict()})
    expected = renamed("llama", llama, tmp_path / "expected", "megatron", *VALUES)
    write, done = rewrite.write, []
    command = ("rename", llama, tmp_path / "new", "--family", "llama", "--from", "hf", "--to", "megatron", *VALUES)

    def interrupted(*args: Any, **options: Any) -> None:
        if done:
            raise KeyboardInterrupt
        write(*args, **options)
        done.append(args[1])

    monkeypatch.setattr(rewrite, "write", interrupted)
    assert run(*command).returncode == 130
    assert done == [f"{tmp_path}/new.steps/0"]
    assert list(tmp_path.glob("new*")) == []

    def with_another(*args: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rewrite, "write", write)
            assert_one_line(run(*command), "another process is writing")
        write(*args, **options)

    monkeypatch.setattr(rewrite, "write", with_another)
    shown("diff", expected, renamed("llama", llama, tmp_path / "new", "megatron", *VALUES))
    monkeypatch.undo()
    assert run(*command).returncode == 2
    assert list(tmp_path.glob("*.steps*")) == []
