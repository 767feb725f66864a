from itertools import pairwise

import pytest
from transformers import AutoTokenizer

from sglang_acache.tiny import task, tokenizer
from sglang_acache.tiny import vocabulary as words
from sglang_acache.tiny.fidelity import BUNDLED


@pytest.fixture(scope="module")
def bundled():
    return AutoTokenizer.from_pretrained(BUNDLED)


def test_words_are_distinct_and_fit():
    assert len(words.TOKEN_IDS) == len(words.WORDS) + len(words.SPECIALS) <= words.VOCAB_SIZE


def test_bundled_files_are_what_the_code_writes(tmp_path):
    tokenizer.save(tmp_path)
    for written in tmp_path.iterdir():
        assert written.read_text() == (BUNDLED / written.name).read_text()


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_text_round_trips_and_spans_hold(bundled, layout):
    for item in task.held_out(0, 5, layout):
        for text in (item.left, item.right, item.answer):
            ids = bundled(text)["input_ids"]
            assert ids == words.encode(text)
            assert bundled.decode(ids) == text
        canvas = bundled(item.left)["input_ids"] + [bundled.mask_token_id] * item.hole
        canvas += bundled(item.right)["input_ids"]
        assert bundled.decode(canvas[slice(*item.affix_span)]) == item.affix


def test_decoding_more_ids_only_appends(bundled):
    ids = bundled(task.held_out(0, 1, "prefix")[0].answer)["input_ids"]
    texts = [bundled.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert bundled.decode([*ids, bundled.eos_token_id], skip_special_tokens=True) == texts[-1]


def test_special_tokens(bundled):
    assert bundled("<|mdm_mask|>")["input_ids"] == [words.TOKEN_IDS[words.MASK]]
    assert bundled("lamp <|mdm_mask|>key")["input_ids"] == words.encode("lamp <|mdm_mask|> key")
    assert bundled("zebra")["input_ids"] == [bundled.unk_token_id]
    assert bundled("lamp")["input_ids"] == [words.TOKEN_IDS["lamp"]], "no BOS of its own"
    assert bundled.eos_token_id == bundled.pad_token_id == words.TOKEN_IDS[words.EOS]


def test_chat_template(bundled):
    messages = [{"role": "system", "content": " hello "}, {"role": "user", "content": "Facts: lamp"}]
    text = bundled.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nFacts: lamp<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert bundled.unk_token_id not in bundled(text)["input_ids"]
