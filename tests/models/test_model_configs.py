import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from integration_tests.oracle.checkpoints import CheckpointSpec, dream_spec, write_checkpoint
from sglang_acache.models.configs import DreamConfig, LLaDAConfig, register_configs
from sglang_acache.models.defaults import mask_token_id, model_defaults
from sglang_acache.models.tokenizer import DreamTokenizer

LLADA_8B = {
    "architectures": ["LLaDAModelLM"],
    "d_model": 4096,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "include_bias": False,
    "include_qkv_bias": False,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 126464,
    "weight_tying": False,
}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_configs()
    register_configs()  # every process of a server does, some more than once


def test_llada_fields_under_the_names_that_sglang_reads():
    config = LLaDAConfig(**{**LLADA_8B, "n_kv_heads": 8})
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (4096, 32, 8)
    assert (config.num_hidden_layers, config.intermediate_size, config.head_dim) == (32, 12288, 128)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (4096, False)
    assert config.rope_parameters == {"rope_theta": 500000.0, "rope_type": "default"}
    assert config.rope_theta == 500000.0
    assert not config.attention_bias
    assert config.embedding_rows == 126464


def test_dream_fields():
    config = DreamConfig(rope_theta=1000000.0, rope_scaling=None, torch_dtype="bfloat16")
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (3584, 28, 4)
    assert (config.vocab_size, config.mask_token_id, config.head_dim) == (152064, 151666, 128)
    assert config.rope_theta == 1000000.0
    assert config.attention_bias


def test_padding_rows_are_no_tokens():
    config = LLaDAConfig(**{**LLADA_8B, "vocab_size": 126400})
    assert (config.vocab_size, config.embedding_rows) == (126400, 126464)


def test_multi_query_attention_means_one_key_head():
    assert LLaDAConfig(d_model=64, n_heads=4, multi_query_attention=True).num_key_value_heads == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", True),
        ("block_type", "sequential"),
        ("block_group_size", 2),
        ("layer_norm_type", "default"),
        ("layer_norm_with_affine", False),
        ("bias_for_layer_norm", True),
        ("attention_layer_norm", True),
        ("activation_type", "gelu"),
        ("include_bias", True),
        ("input_emb_norm", True),
        ("scale_logits", True),
        ("rope", False),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_theta", -1.0),
        ("n_kv_heads", 5),
        ("d_model", 100),
        ("n_layers", 0),
        ("embedding_size", 8),
        ("mask_token_id", None),
        ("mask_token_id", 126464),
        ("default_block_length", 0),
        ("head_dim", 64),
    ],
)
def test_llada_refuses_what_it_does_not_implement(field, value):
    with pytest.raises(ValueError, match=f"{field}=") as error:
        LLaDAConfig(**{**LLADA_8B, field: value})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_act", "gelu"), ("use_sliding_window", True), ("num_key_value_heads", 3)]
)
def test_dream_refuses_what_it_does_not_implement(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        DreamConfig(**{field: value})


@pytest.mark.parametrize("trust_remote_code", [False, True])
@pytest.mark.parametrize(
    ("spec", "kind"),
    [(CheckpointSpec(block_length=4), LLaDAConfig), (dream_spec(block_length=4), DreamConfig)],
)
def test_no_remote_code_is_needed_or_run(tmp_path, spec, kind, trust_remote_code):
    """The folder names code in ``auto_map`` and does not have it: running any would fail."""
    write_checkpoint(tmp_path, spec)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust_remote_code)
    assert type(config) is kind
    assert (config.hidden_size, config.mask_token_id) == (spec.hidden, spec.mask_id)
    assert model_defaults(config).block_length == 4
    config.save_pretrained(tmp_path / "saved")
    again = AutoConfig.from_pretrained(tmp_path / "saved")
    assert again.to_json_string() == config.to_json_string()


def test_checkpoint_tokenizer(tmp_path):
    spec = CheckpointSpec()
    tokenizer = AutoTokenizer.from_pretrained(write_checkpoint(tmp_path, spec))
    assert tokenizer("w3 w0 <|mdm_mask|> nothing").input_ids == [
        3,
        0,
        spec.mask_id,
        spec.special("<|unknown|>"),
    ]
    assert tokenizer.decode([3, 0]) == "w3 w0"
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id) == (spec.eos_id, spec.mask_id)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], add_generation_prompt=True)
    assert turn["input_ids"] == [1, spec.special("<|eot_id|>"), spec.special("<|startoftext|>")]


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_dream_tokenizer_without_its_remote_code(tmp_path, trust_remote_code):
    write_checkpoint(tmp_path, dream_spec())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    letters = {letter: index for index, letter in enumerate("abcĠ")}
    (tmp_path / "vocab.json").write_text(json.dumps({**letters, "ab": 4, "<|endoftext|>": 5}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "DreamTokenizer",
                "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
                "added_tokens_decoder": {"6": {"content": "<|mask|>", "special": True}},
                "mask_token": "<|mask|>",
            }
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=trust_remote_code)
    assert type(tokenizer) is DreamTokenizer
    assert tokenizer("abc a<|mask|>").input_ids == [4, 2, 3, 0, 6]


def test_defaults_table():
    llada = model_defaults(LLaDAConfig(**LLADA_8B))
    assert (llada.shift_logits, llada.remasking, llada.block_length) == (False, "low_confidence", 32)
    assert (llada.threshold, llada.temperature) == (0.9, 0.0)
    dream = model_defaults(DreamConfig(architectures=["DreamModel"]))
    assert (dream.shift_logits, dream.remasking, dream.block_length) == (True, "maskgit_plus", 32)
    assert mask_token_id(LLaDAConfig(**LLADA_8B)) == 126336
    with pytest.raises(ValueError, match="LLaDAModelLM, DreamModel"):
        model_defaults(LLaDAConfig(architectures=["Other"]))
