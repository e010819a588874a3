"""From the settings of a model to the model: where it lies, on which device, in which precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from chai_eval.attention.shards import own_part
from chai_eval.data.assets import fetch
from chai_eval.errors import RunError, SettingError, unknown
from chai_eval.hub import MODEL_WITHOUT, hub
from chai_eval.models.architectures import config_from_mapping, random_model, reason, with_changes
from chai_eval.models.device import resolve_device, resolve_dtype
from chai_eval.models.embedded import EMBEDDED
from chai_eval.models.folder import check_adapter, check_directory, check_safetensors
from chai_eval.models.parallel import split_over_processes
from chai_eval.models.tokenizer import load_tokenizer, tokenizer_of_random
from chai_eval.models.untie import untie
from chai_eval.resources import conf_dir
from chai_eval.settings import ModelSettings, parse_model

_ASSET = "asset:"


def model_names() -> list[str]:
    """The choices of `conf/model`."""
    return sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))


def model_settings(name: str, **changes: Any) -> ModelSettings:
    """The settings of `conf/model/<name>.yaml` with `changes`; SettingError where either is wrong."""
    if name not in model_names():
        raise unknown("model", name, model_names())
    values: dict[str, Any] = yaml.safe_load((conf_dir() / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return parse_model({**values, **changes})


def load_model(name: str, **settings: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model of `conf/model/`, such as `smollm2_mha` or `llama7b`, and its tokenizer, ready to evaluate.

    `settings` are fields of `ModelSettings` in place of what the model's file says, such as `device="cuda:1"`,
    `dtype="bfloat16"`, `path=…` or `config={"num_key_value_heads": 2}`; None leaves what it says.

    SettingError for a value that isn't allowed, a directory without safetensors weights, a device that isn't there;
    RunError where the hub can't be reached, or the weights can't be read.
    """
    return load(model_settings(name, **{key: value for key, value in settings.items() if value is not None}))


def load(settings: ModelSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model (in eval mode) and the tokenizer that `settings` describe; raises as `load_model` does."""
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    folder = _local_folder(settings)
    if settings.tokenizer is not None:
        check_directory("model.tokenizer", settings.tokenizer, "a local directory, a name on the hub, builtin")
    if settings.weights == "random":
        model = _random(settings, folder, device, dtype)
        tokenizer = tokenizer_of_random(settings, _own_tokenizer(settings, folder), model)
    else:
        model = _pretrained(settings, folder, device, dtype)
        tokenizer = load_tokenizer(settings, settings.tokenizer or str(folder or settings.path))
    if settings.untie:
        model = untie(model)
    return model.eval(), tokenizer


def check_path(path: str | None) -> None:
    """Refuse a path that is no asset, no directory here, and no name on the hub either; the hub isn't asked."""
    if path is not None and not path.startswith(_ASSET):
        check_directory("model.path", path, "a local directory, a name on the hub")
        if (folder := Path(path).expanduser()).is_dir():
            check_adapter(str(folder))
    elif path is not None and path.removeprefix(_ASSET) not in EMBEDDED:
        known = ", ".join(_ASSET + name for name in EMBEDDED)
        raise SettingError(f"model.path: {path} is unknown; allowed: {known}, a local directory, a name on the hub")


def _local_folder(settings: ModelSettings) -> Path | None:
    """The directory that the settings name, or None for a model of the hub or one that is made from its config."""
    path = settings.path
    check_path(path)
    if path is None:
        return None
    if path.startswith(_ASSET):
        return fetch(EMBEDDED[path.removeprefix(_ASSET)])
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else None


def _random(settings: ModelSettings, folder: Path | None, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    if settings.device_map is not None:
        raise SettingError("model.device_map: given together with weights=random; allowed: null")
    if settings.tensor_parallel:
        raise SettingError("model.tensor_parallel: true given together with weights=random; allowed: false")
    if _from_mapping(settings):
        if settings.revision is not None:
            raise SettingError(
                f"model.revision: {settings.revision} given for a model that is built from model.config; allowed: null"
            )
        config = with_changes(config_from_mapping(settings.whole_config), {}, settings.layers)
    else:
        config = with_changes(_config_at(settings, folder), settings.config, settings.layers)
    return random_model(config, device=device, dtype=dtype, trust_remote_code=settings.trust_remote_code)


def _from_mapping(settings: ModelSettings) -> bool:
    """Whether a random model's config is that of the settings rather than one that lies at its path.

    Our own files name a path on the hub beside the config that lies there, so that random weights need no hub.
    """
    if settings.path is None:
        return True
    if not settings.architecture or Path(settings.path).expanduser().is_dir():
        return False
    return settings.path in (model_settings(name).path for name in model_names())


def _config_at(settings: ModelSettings, folder: Path | None) -> PretrainedConfig:
    if folder is not None and not (folder / "config.json").is_file():
        raise SettingError(f"model.path: {folder} has no config.json; allowed: a directory with one, or null")
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    try:
        with hub(asked=folder is None):
            return AutoConfig.from_pretrained(str(folder or settings.path), **options)
    except Exception as error:  # transformers and the hub client each have errors of their own
        failed = _not_loaded(settings, folder, error)
        if folder is None:
            raise failed from error
        raise SettingError(f"{failed}; allowed: a directory with a whole config.json, or null") from error


def _own_tokenizer(settings: ModelSettings, folder: Path | None) -> str | None:
    """Where the tokenizer of a random model lies, None where it has none."""
    if folder is not None:
        return str(folder) if (folder / "tokenizer_config.json").is_file() else None
    return None if _from_mapping(settings) else settings.path


def _pretrained(
    settings: ModelSettings, folder: Path | None, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    if settings.path is None:
        raise SettingError(f"model.weights: {settings.name} has no pretrained weights; allowed: random, or model.path")
    if folder is not None:
        check_safetensors(folder)
    source = str(folder or settings.path)
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    # Straight onto the GPU: a copy in main memory first may not fit.
    device_map = settings.device_map or ({"": device} if device.type == "cuda" else None)
    try:
        with hub(asked=folder is None), _without_load_report():
            check_adapter(source, settings.revision)
            config = AutoConfig.from_pretrained(source, **options)
            config = with_changes(config, settings.config, settings.layers)
            if split := split_over_processes(settings, config, device):
                device_map = None  # each process's part goes onto its own device
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                output_loading_info=True,
                **split,
                **options,
            )
    except SettingError:
        raise
    except Exception as error:  # transformers, the hub client and safetensors each have errors of their own
        raise _not_loaded(settings, folder, error) from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise RunError(f"model.path: {source} lacks {len(missing)} of the model's weights, first {missing[0]}")
    return model if device_map else _aligned(model if split else model.to(device))


@torch.no_grad()
def _aligned(model: PreTrainedModel) -> PreTrainedModel:
    """Move weights that are views into a mapped file to memory of their own.

    There they start anywhere, and a CPU rounds the product with a single token by where its operands start: two
    loads of equal weights would differ in the last bit.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and own_part(parameter).data_ptr() % 64:
            parameter.data = parameter.data.clone()
    return model


@contextmanager
def _without_load_report() -> Iterator[None]:
    # With `layers` set it lists every weight of the layers that were left out; missing weights are an error of ours.
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _not_loaded(settings: ModelSettings, folder: Path | None, error: Exception) -> RunError:
    why = f"{type(error).__name__}: {reason(error)}"
    if folder is not None:
        return RunError(f"model.path: {settings.path} can't be loaded ({why})")
    return RunError(f"model.path: {settings.path} can't be loaded from the hub ({why}); {MODEL_WITHOUT}")
