"""Models come as asked for, or the user is told in one line why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from chai_eval.errors import RunError, SettingError
from chai_eval.models import load_model, model_names, model_settings
from chai_eval.models.architectures import config_from_mapping
from chai_eval.models.device import resolve_dtype
from chai_eval.models.load import load
from chai_eval.resources import conf_dir
from chai_eval.settings import parse_model

TINY = ["tiny_llama_random", "tiny_opt_random"]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, tokenizer = load_model("tiny_llama_random", device="cpu")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("name", model_names())
def test_the_settings_of_a_model_are_those_hydra_composes(name: str) -> None:
    with initialize_config_dir(str(conf_dir() / "model"), version_base=None):
        composed: Any = OmegaConf.to_container(compose(name))
    assert parse_model(composed) == model_settings(name)
    assert model_settings(name).name == name


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the hub counts them.
        ("llama7b", 6_738_415_616),
        ("llama33b", 32_528_943_616),
        ("opt125m", 125_239_296),
        ("pythia160m", 162_322_944),
    ],
)
def test_configs_that_need_no_hub_have_the_published_size(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_from_mapping(model_settings(name).architecture))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", TINY)
def test_random_weights_are_the_same_at_every_call_and_leave_the_global_state_alone(name: str) -> None:
    torch.manual_seed(1)
    first, _ = load_model(name, device="cpu")
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    second, _ = load_model(name, device="cpu")
    assert not first.training
    assert all(torch.equal(weight, weights(second)[key]) for key, weight in weights(first).items())


def test_random_weights_in_half_precision_are_the_same_ones_rounded() -> None:
    full, _ = load_model("tiny_llama_random", device="cpu")
    half, _ = load_model("tiny_llama_random", device="cpu", dtype="bfloat16")
    assert all(torch.equal(weight.bfloat16(), weights(half)[key]) for key, weight in weights(full).items())


@pytest.mark.parametrize("name", TINY)
def test_heads_of_random_models_attend_unlike_each_other(name: str) -> None:
    model, tokenizer = load_model(name, device="cpu")
    model.set_attn_implementation("eager")
    tokens = tokenizer("Heads that attend alike", return_tensors="pt").input_ids
    for probabilities in model(tokens, output_attentions=True).attentions:
        last = probabilities[0, :, -1]  # [heads, keys]
        apart = torch.cdist(last, last, p=1)[~torch.eye(len(last), dtype=torch.bool)]
        assert apart.median() > 0.5  # of at most 2


@pytest.mark.parametrize("name", TINY)
def test_the_builtin_tokenizer_gives_any_text_back(name: str) -> None:
    _, tokenizer = load_model(name, device="cpu")
    text = "Naïve café 😀\n\n  x = 42;\t"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_a_random_model_can_be_given_fewer_key_value_heads() -> None:
    model, _ = load_model("tiny_llama_random", device="cpu", config={"num_key_value_heads": 2})
    assert model.model.layers[0].self_attn.k_proj.out_features == 2 * 8


@pytest.mark.parametrize("name", [*TINY, "llama7b"])
def test_layers_keeps_the_first_layers_only(name: str) -> None:
    if name == "llama7b":
        small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 300}
        model, _ = load_model(name, device="cpu", weights="random", layers=2, config=small)
    else:
        model, _ = load_model(name, device="cpu", layers=2)
    assert model.config.num_hidden_layers == 2
    assert model(torch.tensor([[1, 5]])).logits.isfinite().all()


def test_the_first_layers_of_saved_weights_are_the_same_ones(saved: Path) -> None:
    whole, _ = load_model("local", device="cpu", path=saved)
    part, _ = load_model("local", device="cpu", path=saved, layers=1)
    assert len(part.model.layers) == 1
    assert all(torch.equal(weight, weights(whole)[key]) for key, weight in weights(part).items())


def test_a_local_directory_gives_the_logits_that_were_saved(saved: Path) -> None:
    original, tokenizer = load_model("tiny_llama_random", device="cpu")
    loaded, own_tokenizer = load_model("llama7b", device="cpu", path=saved)
    tokens = own_tokenizer("the same", return_tensors="pt").input_ids
    assert tokens.tolist() == tokenizer("the same", return_tensors="pt").input_ids.tolist()
    assert torch.equal(original(tokens).logits, loaded(tokens).logits)


def test_weights_lie_aligned_in_memory(saved: Path) -> None:
    model, _ = load_model("local", device="cpu", path=saved)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())


def test_pickled_weights_are_refused(saved: Path) -> None:
    torch.save({}, saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(SettingError, match=r"^model\.path: .* has only pytorch_model\.bin.*allowed: .*safetensors"):
        load_model("local", device="cpu", path=saved)


def test_weights_that_are_missing_are_not_made_up(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"^model\.path: .* lacks 1 of the model's weights, first model\.layers\.1\.mlp"):
        load_model("local", device="cpu", path=saved)


def test_weights_that_are_damaged_are_one_line(saved: Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=r"^model\.path: .* can't be loaded") as raised:
        load_model("local", device="cpu", path=saved)
    assert "\n" not in str(raised.value)


def test_a_model_of_the_hub_without_network_says_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    expected = r"^model\.path: huggyllama/llama-7b can't be loaded from the hub .*local directory.*weights=random"
    with pytest.raises(RunError, match=expected) as raised:
        load_model("llama7b", device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("smolm2", {}, r"^model: 'smolm2' is unknown \(did you mean smollm2\?\); allowed: "),
        ("tiny_llama_random", {"layers": 5}, r"^model\.layers: 5 given for a model of 4 layers; allowed: 1 to 4$"),
        ("tiny_llama_random", {"dtype": "int8"}, r"^model\.dtype: 'int8' given; allowed: auto, float32"),
        ("tiny_llama_random", {"weights": "pretrained"}, r"^model\.weights: .*allowed: random, or model\.path$"),
        ("tiny_llama_random", {"config": {"num_key_value_heads": 3}}, r"^model\.config: num_key_value_heads 3 given"),
        (
            "tiny_llama_random",
            {"config": {"hidden_size": 63}},
            r"^model\.config: makes no llama model \(.*hidden size \(63\) is not a multiple of .* heads \(8\)",
        ),
        (
            "tiny_llama_random",
            {"config": {"foo": {"bar": 1}}},
            r"^model\.config: a llama model has no foo; allowed: fields of its config$",
        ),
        (
            "tiny_llama_random",
            {"config": {"hiden_size": 64}},
            r"^model\.config: a llama model has no hiden_size \(did you mean hidden_size\?\); allowed: ",
        ),
        (
            "tiny_llama_random",
            {"revision": "v2"},
            r"^model\.revision: v2 given for a model that is built from model\.config; allowed: null$",
        ),
        ("llama7b", {"weights": "random", "revision": "v2"}, r"^model\.revision: v2 given .*; allowed: null$"),
        ("tiny_llama_random", {"config": {"vocab_size": 100}}, r"^model\.config: vocab_size 100 is too small"),
        ("tiny_llama_random", {"config": {"model_type": "lama"}}, r"^model\.config: makes no lama model"),
        ("llama7b", {"path": "/no/such"}, r"^model\.path: /no/such is not a directory; allowed: "),
        ("llama7b", {"path": "asset:llama"}, r"^model\.path: asset:llama is unknown; allowed: asset:smollm2, "),
    ],
)
def test_a_wrong_setting_is_one_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message) as raised:
        load_model(name, device="cpu", **settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "lama"}'])
def test_random_weights_at_a_path_without_a_whole_config_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for name in ("tiny_llama_random", "llama7b"):
        with pytest.raises(SettingError, match=r"^model\.path: .*; allowed: a directory with [^\n]*$") as raised:
            load_model(name, device="cpu", weights="random", path=tmp_path)
        assert "\n" not in str(raised.value)


def test_random_weights_take_the_config_that_lies_at_the_path(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    model, _ = load_model("tiny_llama_random", device="cpu", path=saved)
    assert model.config.num_hidden_layers == 3


def test_random_weights_of_another_model_on_the_hub_are_not_those_of_the_built_in_config() -> None:
    with pytest.raises(RunError, match=r"^model\.path: nobody/nothing can't be loaded from the hub"):
        load_model("tiny_llama_random", device="cpu", path="nobody/nothing")


def test_a_config_field_that_transformers_renames_is_taken() -> None:
    model, _ = load_model("tiny_llama_random", device="cpu", config={"rope_theta": 5000.0})
    assert model.config.rope_parameters["rope_theta"] == 5000.0


@pytest.mark.parametrize("tokenizer", ["/no/such", "./nope", __file__])
def test_a_tokenizer_that_is_no_directory_is_a_wrong_setting(tokenizer: str) -> None:
    settings = model_settings("tiny_llama_random", tokenizer=tokenizer)
    with pytest.raises(SettingError, match=r"^model\.tokenizer: .* is not a directory; allowed: "):
        load(settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line() -> None:
    with pytest.raises(SettingError, match=r"^model\.device: this machine has no cuda; allowed: auto, cpu"):
        load_model("tiny_llama_random", device="cuda")


def test_precision_is_float32_on_a_cpu_and_bfloat16_on_a_gpu() -> None:
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda:0")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize("has", [True, False])
def test_a_precision_that_the_processor_does_not_have_is_said_in_one_line(
    has: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "chai_eval.attention.kernels.decode.cpu_multiplies", lambda dtype: has or dtype == torch.float32
    )
    ours = logging.getLogger("chai_eval")
    # After a command ran in this process it would be caught here as well as above.
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)
    resolve_dtype("auto", torch.device("cpu"))
    resolve_dtype("bfloat16", torch.device("cuda:0"))
    assert not caplog.messages
    resolve_dtype("bfloat16", torch.device("cpu"))
    said = [
        message.startswith("model.dtype: this processor has no instructions for bfloat16")
        for message in caplog.messages
    ]
    assert said == [True] * (not has)


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("name", ["llama7b", "local"])
def test_changes_reach_the_config_that_lies_with_weights_and_nothing_else_does(
    saved: Path, name: str, weights: str
) -> None:
    # 2048 is what our file says of LLaMA-7B, and 128 what lies at the path.
    for changed in (64, 2048):
        model, _ = load_model(
            name, path=saved, device="cpu", weights=weights, config={"max_position_embeddings": changed}
        )
        assert model.config.max_position_embeddings == changed
    stock, _ = load_model(name, path=saved, device="cpu", weights=weights)
    written = json.loads((saved / "config.json").read_text())
    assert {key: getattr(stock.config, key) for key in ("hidden_size", "max_position_embeddings")} == {
        key: written[key] for key in ("hidden_size", "max_position_embeddings")
    }


def test_weights_are_not_made_another_kind_of_model(saved: Path) -> None:
    with pytest.raises(
        SettingError, match=r"^model\.config: model_type mistral given for a llama model; allowed: changes"
    ):
        load_model("llama7b", path=saved, device="cpu", config={"model_type": "mistral"})
