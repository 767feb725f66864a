import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sglang_acache.tiny import fidelity, task
from sglang_acache.tiny import vocabulary as words
from sglang_acache.tiny.fidelity import BUNDLED, Policy
from sglang_acache.tiny.model import load

N = 60
FEW = 20


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load(BUNDLED)


def right(model, policy, layout, kind="hop", n=FEW, hole=12):
    """Shares of questions and of whole answers that are right."""
    found = fidelity.evaluate(model, policy, layout, kind, n, "test", hole)
    return found.questions / n / task.N_SLOTS, found.whole / n


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_answers_held_out_requests(model, layout):
    assert right(model, Policy(), layout, n=N)[1] >= 0.95


@pytest.mark.parametrize("layout", task.LAYOUTS)
@pytest.mark.parametrize("kind", ["kv", "upd", "echo"])
def test_answers_the_other_tasks(model, layout, kind):
    assert right(model, Policy(), layout, kind)[1] >= 0.9


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_ends_by_itself(model, layout):
    assert right(model, Policy(), layout, hole=16)[1] >= 0.9


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_direct_reuse_loses_and_anchors_recover(model, layout):
    assert right(model, Policy("attention", 0.0), layout, n=N)[0] < 0.3
    assert right(model, Policy("random", 0.2), layout, n=N)[0] < 0.5
    assert right(model, Policy("attention", 0.2), layout, n=N)[0] > 0.9


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_one_hop_needs_no_anchors(model, layout):
    assert right(model, Policy("attention", 0.0), layout, "kv")[0] > 0.9


@pytest.mark.parametrize("layout", task.LAYOUTS)
def test_ratio_one_is_full_recompute(model, layout):
    canvases = fidelity.canvases(task.held_out(0, 8, layout))
    full = fidelity.decode(model, canvases, Policy())
    assert torch.equal(full, fidelity.decode(model, canvases, Policy("attention", 1.0)))


@pytest.mark.parametrize("system", [None, "you are a helpful assistant"])
def test_answers_chat_requests(model, system):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    items = task.held_out(4, FEW, "prefix", hole=16)
    before, after = chat_ids(tokenizer, system)
    tokens = fidelity.decode(model, fidelity.canvases(items, before, after), Policy())
    assert fidelity.score(tokens, items).whole >= 0.9 * FEW


def chat_ids(tokenizer, system):
    """Token ids that the chat template puts before and after the user's words."""
    turns = [{"role": "system", "content": system}] if system else []
    messages = [*turns, {"role": "user", "content": "lamp"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(part)["input_ids"] for part in text.split("lamp"))


def test_threshold_decoding(model):
    items = task.held_out(0, FEW, "infix")
    tokens = fidelity.decode(model, fidelity.canvases(items), Policy(), threshold=0.9)
    assert fidelity.score(tokens, items).whole >= 0.9 * FEW


def test_published_layout():
    config = json.loads((BUNDLED / "config.json").read_text())
    tensors = load_file(BUNDLED / "model.safetensors")
    assert config["architectures"] == ["LLaDAModelLM"]
    assert "auto_map" not in config
    assert config["mask_token_id"] == words.TOKEN_IDS[words.MASK]
    assert tensors["model.transformer.wte.weight"].shape == (config["embedding_size"], config["d_model"])
    assert len(tensors) == 9 * config["n_layers"] + 3
    assert (BUNDLED / "model.safetensors").stat().st_size < 4 * 2**20


LLAMA_NAMES = {
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj", "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj", "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm",
}  # fmt: skip


def test_equals_a_llama_with_full_attention(model):
    c = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.mlp_hidden_size,
            num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, rms_norm_eps=c.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=False, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    outer = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
    renamed = {}
    for name, tensor in load_file(BUNDLED / "model.safetensors").items():
        parts = name.removeprefix("model.transformer.").split(".")
        if parts[0] == "blocks":
            renamed[f"model.layers.{parts[1]}.{LLAMA_NAMES[parts[2]]}.weight"] = tensor
        else:
            renamed[f"{outer[parts[0]]}.weight"] = tensor
    llama.load_state_dict(renamed)
    ids = fidelity.canvases(task.held_out(0, 4, "suffix")).ids
    full = torch.zeros(4, 1, ids.shape[1], ids.shape[1])  # additive mask that hides nothing
    with torch.no_grad():
        expected = llama(ids, attention_mask=full).logits
        torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=1e-4)
