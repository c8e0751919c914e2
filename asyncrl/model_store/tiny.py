"""A Llama of about 3 M parameters with one token per character; random, always the same.

    python -m asyncrl.model_store.tiny FOLDER

For tests and for trying a run in a minute: it starts fast and can learn dense toy rewards.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path
from typing import Any

SEED = 20
CONTEXT = 1024
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make(folder: Path) -> None:
    """Write model and tokenizer to `folder`, as `save_pretrained` does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, initializer_range=0.02,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        unk_token="<unk>", additional_special_tokens=list(SPECIAL[4:]),
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    make(Path(sys.argv[1]))
