"""What lies where a model should: weights that can be read without running code, and a whole model."""

from __future__ import annotations

from pathlib import Path

from transformers.utils.peft_utils import find_adapter_config_file

from chai_eval.errors import SettingError
from chai_eval.hub import is_local


def check_directory(setting: str, path: str, allowed: str) -> None:
    """Refuse what is written as a directory, or is there, and is none; what the hub may have isn't looked up."""
    if (is_local(path) or Path(path).exists()) and not Path(path).expanduser().is_dir():
        raise SettingError(f"{setting}: {path} is not a directory; allowed: {allowed}")


def check_adapter(source: str, revision: str | None = None) -> None:
    """Refuse an adapter (LoRA and its like) at `source`, a directory or a name on the hub.

    Where PEFT is installed transformers would load it over whatever model it names; elsewhere it finds no weights, or
    leaves the adapter out without a word.
    """
    if find_adapter_config_file(source, revision=revision) is not None:
        raise SettingError(
            f"model.path: {source} holds an adapter (adapter_config.json); allowed: a whole model, so merge it into "
            "its base model first (PEFT's merge_and_unload, then save_pretrained)"
        )


def check_safetensors(folder: Path) -> None:
    """Refuse a directory without safetensors."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
    has = f"only {pickled[0]}, which can run code when it is read" if pickled else "no weights"
    raise SettingError(f"model.path: {folder} has {has}; allowed: a directory with *.safetensors, or weights=random")
