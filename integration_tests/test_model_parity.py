"""Our models, in SGLang's own ModelRunner and over its K/V pool, against `transformers`."""

import os

import pytest
import torch
from safetensors.torch import load_file

from integration_tests.oracle.cached_transformer import CachedTransformer
from integration_tests.oracle.checkpoints import CheckpointSpec, dream_spec, write_checkpoint
from integration_tests.oracle.sglang_runner import Query, SGLangRunner, save_logits, whole_canvas
from integration_tests.oracle.transformers_oracle import TransformersOracle
from sglang_acache.server_process import free_port

SPECS = {
    "llada": CheckpointSpec(rope_theta=500000.0),
    "llada-grouped": CheckpointSpec(kv_heads=2, seed=1),
    "llada-one-key-head-padded-biased": CheckpointSpec(kv_heads=1, embedding_rows=256, qkv_bias=True, seed=2),
    "llada-tied": CheckpointSpec(tied=True, seed=3),
    "llada-head-128": CheckpointSpec(hidden=256, heads=2, kv_heads=2, layers=2, inner=300, seed=4),
    "dream": dream_spec(rope_theta=1000000.0, seed=5),
    "dream-tied": dream_spec(tied=True, seed=6),
}


class World:
    def __init__(self, folder, spec):
        self.spec, self.folder = spec, write_checkpoint(folder, spec)
        self.oracle = TransformersOracle(self.folder)
        self.runner = SGLangRunner(self.folder, trust_remote_code=True)  # there is none, and none is looked for

    def text(self, length, seed=0):
        """Any ids, the mask token's among them."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.spec.vocab_size, (length,), generator=draw).tolist()

    def expected(self, tokens, rows=None):
        logits = self.oracle.logits(torch.tensor(tokens))
        return logits if rows is None else logits[rows]


@pytest.fixture(scope="module", params=SPECS)
def world(request, tmp_path_factory):
    world = World(tmp_path_factory.mktemp(request.param), SPECS[request.param])
    yield world
    world.runner.close()


def assert_close(got, expected):
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


def test_logits_of_a_whole_canvas(world):
    tokens = world.text(70)
    assert_close(world.runner.forward([whole_canvas(tokens, 1)]), world.expected(tokens))


def test_only_the_rows_asked_for(world):
    tokens = world.text(40)
    got = world.runner.forward([whole_canvas(tokens, 1, rows=[39, 3, 3])])
    assert_close(got, world.expected(tokens, [39, 3, 3]))


def test_no_rows_skip_the_head(world, monkeypatch):
    def refuse(*_):
        raise AssertionError("the output head was used")

    monkeypatch.setattr(world.runner.model.logits_processor, "_get_logits", refuse)
    assert world.runner.forward([whole_canvas(world.text(9), 1, rows=[])]).shape == (0, world.spec.vocab_size)


def test_a_ragged_batch(world):
    texts = [world.text(length, seed) for seed, length in enumerate((31, 1, 64, 17))]
    rows = [[0, 30], [0], [], [5, 6, 7]]
    slots = (1, 40, 50, 200)
    queries = [whole_canvas(t, s, r) for t, s, r in zip(texts, slots, rows, strict=True)]
    expected = torch.cat([world.expected(t, r) for t, r in zip(texts, rows, strict=True)])
    assert_close(world.runner.forward(queries), expected)


def test_a_step_inside_a_block_reads_stored_keys(world):
    """Slots in any order, some rows stale: what the K/V-cached oracle computes."""
    canvas = torch.tensor(world.text(48))
    slots = (torch.randperm(48, generator=torch.Generator().manual_seed(1)) + 300).tolist()
    world.runner.forward([Query(canvas.tolist(), range(48), slots, slots)])
    model = CachedTransformer(world.oracle)
    cache = model.empty_cache(48)
    model.forward(canvas, torch.arange(48), cache)

    canvas[20:28] = torch.tensor(world.text(8, seed=2))
    block = torch.arange(20, 28)
    hidden = model.forward(canvas, block, cache)
    step = Query(canvas[block].tolist(), block.tolist(), slots[20:28], slots, [0, 4, 7])
    assert_close(world.runner.forward([step]), model.logits(hidden[[0, 4, 7]]))


def test_angles_of_the_rotary_embedding(world):
    half = world.spec.hidden // world.spec.heads // 2
    expected = world.spec.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    got = world.runner.model.get_inv_freq()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


def test_wrong_checkpoints_are_refused_by_the_name_of_the_tensor(world):
    model = world.runner.model
    tensors = load_file(world.folder / "model.safetensors")
    name = next(name for name in tensors if ".1." in name and "k_proj.weight" in name)
    stray = name.replace("k_proj", "z_proj")
    with pytest.raises(ValueError, match=f"{stray}' is not part of"):
        model.load_weights([(stray, tensors[name])])
    with pytest.raises(ValueError, match=f"{name}' has shape"):
        model.load_weights([(name, tensors[name][:-1])])
    model._loaded = False
    with pytest.raises(ValueError, match=f"lacks {name}"):
        model.load_weights((other, tensor) for other, tensor in tensors.items() if other != name)
    assert model.load_weights(tensors.items()) == set(dict(model.named_parameters()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", [CheckpointSpec(kv_heads=2), dream_spec()], ids=["llada", "dream"])
def test_half_precision(tmp_path, spec, dtype):
    """As near as the dtype's rounding allows, over a checkpoint stored in it."""
    folder = write_checkpoint(tmp_path, CheckpointSpec(**{**vars(spec), "dtype": getattr(torch, dtype)}))
    runner = SGLangRunner(folder, dtype=dtype)
    try:
        tokens = torch.randint(0, spec.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
        got = runner.forward([whole_canvas(tokens.tolist(), 1)])
        expected = TransformersOracle(folder).logits(tokens)
        error = (got - expected).norm() / expected.norm()
        assert error < {"bfloat16": 0.1, "float16": 0.015}[dtype]
    finally:
        runner.close()


def test_tensor_parallel(tmp_path, monkeypatch):
    """Two ranks, each with half of the heads (a lone key head on both) and of the vocabulary."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{(os.cpu_count() or 1) - 1}")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling the embedding's mask takes longer than the test
    names = ("llada-one-key-head-padded-biased", "dream-tied")
    folders = [write_checkpoint(tmp_path / name, SPECS[name]) for name in names]
    tokens = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(0))
    torch.multiprocessing.spawn(save_logits, (folders, tokens.tolist(), 2, free_port()), nprocs=2)
    for folder in folders:
        for rank in (0, 1):
            assert_close(torch.load(folder / f"rank{rank}.pt"), TransformersOracle(folder).logits(tokens))
