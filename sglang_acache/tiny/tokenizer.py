"""The word-level tokenizer of the bundled model, written in the Hugging Face format.

One token per whitespace-separated word; decoded words are joined by single spaces, so decoding a longer list
of ids only ever appends text. No `<|startoftext|>` is added to plain text; the chat template writes one, as
LLaDA's does.
The text of the mask token in a prompt becomes the mask id, as with the published tokenizer.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from sglang_acache.tiny import vocabulary as words

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

_ROLES = {
    "bos_token": words.BOS,
    "eos_token": words.EOS,
    "pad_token": words.EOS,
    "mask_token": words.MASK,
    "unk_token": words.UNKNOWN,
}


def build() -> Tokenizer:
    plain = {word: words.TOKEN_IDS[word] for word in [*words.WORDS, words.UNKNOWN]}
    tokenizer = Tokenizer(models.WordLevel(plain, unk_token=words.UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in words.SPECIALS])
    return tokenizer


def save(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    added = {
        str(words.TOKEN_IDS[token]): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for token in words.SPECIALS
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 4096,
        **_ROLES,
    }
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", _ROLES)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
