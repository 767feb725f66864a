"""The references that the server is compared with, checked against each other and by hand."""

import pytest
import torch

from integration_tests.oracle.cached_transformer import CachedTransformer
from integration_tests.oracle.checkpoints import CheckpointSpec, dream_spec, write_checkpoint
from integration_tests.oracle.reference_acache import ACacheForward, Affix, budget, encode
from integration_tests.oracle.reference_loop import (
    CachedForward,
    Decoding,
    FullForward,
    choose,
    commit,
    generate,
    predictor_for,
)
from integration_tests.oracle.transformers_oracle import TransformersOracle

SPECS = {
    "llada": CheckpointSpec(),
    "llada-grouped": CheckpointSpec(kv_heads=2, embedding_rows=256, qkv_bias=True, seed=1),
    "llada-tied": CheckpointSpec(tied=True, seed=2),
    "dream": dream_spec(seed=5),
}


class World:
    """One checkpoint with everything that reads it."""

    def __init__(self, folder, spec):
        self.spec = spec
        self.oracle = TransformersOracle(write_checkpoint(folder, spec))
        self.model = CachedTransformer(self.oracle)
        self.shift = spec.architecture == "DreamModel"

    def text(self, length, seed=0):
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.spec.words, (length,), generator=draw).tolist()

    def decoding(self, **changes):
        base = {"mask_id": self.spec.mask_id, "vocab_size": self.spec.vocab_size, "shift": self.shift}
        if not {"steps", "threshold", "factor"} & changes.keys():
            changes["threshold"] = 0.9
        return Decoding(**{**base, "block_length": 8, **changes})

    def generate(self, cache, left, count, right=(), **changes):
        predictor = predictor_for(cache, self.model, self.oracle.logits)
        return generate(predictor, left, count, self.decoding(**changes), right)


@pytest.fixture(scope="module", params=SPECS)
def world(request, tmp_path_factory):
    return World(tmp_path_factory.mktemp(request.param), SPECS[request.param])


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    return World(tmp_path_factory.mktemp("llada"), SPECS["llada"])


def relative(a, b):
    return float((a - b).abs().max() / b.abs().max())


def test_the_cached_transformer_is_the_transformers_model(world):
    tokens = torch.tensor(world.text(50))
    expected = world.oracle.logits(tokens)
    hidden = world.model.forward(tokens, torch.arange(50), world.model.empty_cache(50))
    assert relative(world.model.logits(hidden), expected) < 1e-5
    assert expected.shape == (50, world.spec.vocab_size)


def test_the_oracle_sees_in_both_directions(world):
    tokens = torch.tensor(world.text(20))
    before = world.oracle.logits(tokens)
    tokens[-1] = (tokens[-1] + 1) % world.spec.words
    assert (world.oracle.logits(tokens)[0] - before[0]).abs().max() > 1e-2


def test_answers_are_clear_and_varied(world):
    """Argmax gaps far above float noise, confidences all over (0, 1), steps that commit one and many."""
    spec = world.spec
    canvas = torch.tensor([*world.text(30), *[spec.mask_id] * 32])
    logits = world.oracle.logits(canvas)[30:]
    best = logits.topk(2, dim=-1).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3
    _, confidence = choose(logits, world.decoding())
    assert min(confidence) < 0.5
    assert max(confidence) > 0.9
    result = world.generate("none", world.text(30), 64)
    sizes = [len(step) for step in result.commits]
    assert 1 in sizes
    assert max(sizes) > 1
    assert len(set(result.output)) > 12


def test_one_block_alone_is_never_stale(llada):
    """With no context, a block is the canvas: every cache policy forwards everything."""
    answers = [llada.generate(cache, [], 16, block_length=16) for cache in ("none", "prefix", "dual")]
    assert answers[0].canvas == answers[1].canvas == answers[2].canvas
    assert answers[0].commits == answers[1].commits == answers[2].commits


def test_prefix_is_dual_when_nothing_follows_the_block(world):
    left = world.text(20)
    prefix, dual = (world.generate(cache, left, 8) for cache in ("prefix", "dual"))
    assert prefix.canvas == dual.canvas
    assert prefix.commits == dual.commits


def test_caching_forwards_less_and_is_an_approximation(world):
    left, right = world.text(40), world.text(10, seed=1)
    forwarded, answers = {}, {}
    for cache in ("prefix", "dual"):
        world.model.forwarded = 0
        answers[cache] = world.generate(cache, left, 32, right, steps=32)
        forwarded[cache] = world.model.forwarded
    length = 40 + 32 + 10
    least = 4 * (length + 7 * 8)  # the shift adds a position while a block's first is masked
    assert least <= forwarded["dual"] <= least + 4 * 7 * world.shift
    assert forwarded["dual"] < forwarded["prefix"] < 32 * length
    assert answers["dual"].canvas != answers["prefix"].canvas


def test_prompts_survive(world):
    mask = world.spec.mask_id
    left, right = [*world.text(5), mask, mask, *world.text(3)], [mask, *world.text(4)]
    for cache in ("none", "prefix", "dual"):
        result = world.generate(cache, left, 16, right)
        assert result.canvas[:10] == left
        assert result.canvas[26:] == right
        assert mask not in result.output
        assert not result.masked


def test_rules():
    logits = torch.tensor([[3.0, 2.0, 0.0, -torch.inf]])
    p = torch.tensor([3.0, 2.0, 0.0]).double().softmax(0)
    expected = {
        "low_confidence": p[0],
        "maskgit_plus": p[0],
        "topk_margin": p[0] - p[1],
        "entropy": (p * p.log()).sum(),
    }
    for rule, value in expected.items():
        chosen, confidence = choose(logits, Decoding(mask_id=3, vocab_size=4, steps=1, rule=rule))
        assert chosen == [0]
        assert confidence[0] == pytest.approx(float(value), rel=1e-5)


# By hand: a model that predicts token p at position p, surer the further right.


def ladder(tokens):
    length = len(tokens)
    logits = torch.zeros(length, 64)
    logits[torch.arange(length), torch.arange(length)] = torch.linspace(4.2, 8.0, length)
    return logits


def by_hand(**changes):
    return Decoding(**{"mask_id": 59, "vocab_size": 60, "block_length": 4, **changes})


def test_steps_are_dealt_out():
    result = generate(FullForward(ladder), [1, 2], 8, by_hand(steps=5))
    assert [len(step) for step in result.commits] == [2, 1, 1, 2, 2]
    assert result.commits[:3] == [[4, 5], [3], [2]]
    assert result.output == [2, 3, 4, 5, 6, 7, 8, 9]
    many = generate(FullForward(ladder), [1, 2], 8, by_hand(steps=99))
    assert [len(step) for step in many.commits] == [1] * 8


def test_the_shift_reads_one_to_the_left():
    result = generate(FullForward(ladder), [9, 9, 9], 8, by_hand(steps=8, shift=True))
    assert result.output == [2, 3, 4, 5, 6, 7, 8, 9]


def test_threshold_commits_all_that_are_sure_and_at_least_one():
    how = by_hand(threshold=0.8)
    assert commit([0.1, 0.81, 0.9, 0.79], how, 0, 1, 0) == [1, 2]
    assert commit([0.1, 0.3, 0.3], how, 0, 1, 0) == [1]


def test_factor_commits_the_largest_count_that_holds():
    how = by_hand(factor=1.0)
    # sorted: .9 (2 x .1), .8 (3 x .2), .7 (4 x .3 = 1.2 >= 1)
    assert commit([0.7, 0.9, 0.8], how, 0, 1, 0) == [1, 2]
    assert commit([0.1, 0.2], how, 0, 1, 0) == [1]


def test_ids_that_are_no_tokens_neither_win_nor_weigh():
    logits = torch.zeros(1, 64)
    logits[0, 7], logits[0, 61], logits[0, 59] = 1.0, 9.0, 9.0
    chosen, confidence = choose(logits, by_hand(threshold=0.5))
    assert chosen == [7]
    assert confidence[0] == pytest.approx(float(torch.tensor([1.0, *[0.0] * 58]).softmax(0)[0]))


def test_early_stop_waits_for_the_masks_before_it():
    """The end-of-sequence token (5) is committed first; the request ends once all before it is final."""
    result = generate(FullForward(ladder), [1, 2], 12, by_hand(steps=12, eos_ids=(5,)))
    assert result.output == [2, 3, 4, 5]
    assert result.commits == [[5], [4], [3], [2]]
    assert result.masked == {6, 7, 8, 9, 10, 11, 12, 13}


def test_output_is_cut_to_what_was_asked():
    result = generate(FullForward(ladder), [1, 2], 6, by_hand(steps=8))
    assert result.output == [2, 3, 4, 5, 6, 7]
    assert len(result.canvas) == 10


# ACache


def acache(world, affixes, ratio, left, count, right=(), selector="attention", **changes):
    region = (len(left), len(left) + count)
    predictor = ACacheForward(world.model, affixes, ratio, region, shift=world.shift, selector=selector)
    return predictor, generate(predictor, left, count, world.decoding(**changes), right)


def test_ratio_one_is_the_baseline(world):
    left, right = world.text(30), world.text(12, seed=4)
    baseline = world.generate("dual", left, 16, right)
    affixes = [Affix(2, 20, cuts=(9,)), Affix(48, 58)]
    predictor, result = acache(world, affixes, 1.0, left, 16, right)
    assert result.canvas == baseline.canvas
    assert result.commits == baseline.commits
    assert len(predictor.selection.anchors) == 28


@pytest.mark.parametrize("affixes", [[], [Affix(5, 5)]])
def test_no_affix_is_the_baseline(world, affixes):
    left = world.text(30)
    _, result = acache(world, affixes, 0.2, left, 16)
    assert result.canvas == world.generate("dual", left, 16).canvas


@pytest.mark.parametrize("selector", ["attention", "attention_affix"])
def test_anchors_and_what_is_recomputed(world, selector):
    left, right = world.text(30), world.text(12, seed=4)
    affixes = [Affix(0, 13), Affix(15, 30), Affix(46, 58)]
    predictor, result = acache(world, affixes, 0.2, left, 16, right, selector)
    anchors = predictor.selection.anchors
    assert [sum(a.start <= p < a.stop for p in anchors) for a in affixes] == [3, 3, 3]
    outside = {13, 14, *range(30, 46)}
    own = {29} if world.shift else set()  # read by the answer's first token, so never from shared slots
    assert not own & set(anchors)
    assert predictor.recompute == outside | set(anchors) | own
    if selector == "attention":  # every mask of every layer and head pays 1 over the whole canvas
        paid = sum(float(score.sum()) for score in predictor.selection.scores)
        assert 0 < paid < world.spec.layers * world.spec.heads * 16
    else:
        for score in predictor.selection.scores:
            assert float(score.sum()) == pytest.approx(world.spec.layers * world.spec.heads * 16, rel=1e-4)
    assert result.canvas[:30] == left
    assert result.canvas[46:] == right


def test_shared_keys_and_values_are_never_written(world):
    left = world.text(30)
    affix = Affix(3, 23, cuts=(10,))
    predictor, result = acache(world, [affix], 0.3, left, 16)
    fresh = world.model.empty_cache(46)
    encode(world.model, torch.tensor(result.canvas), affix, fresh)
    frozen = [p for p in range(3, 23) if p not in predictor.selection.anchors]
    for ours, first in zip(predictor.cache.keys, fresh.keys, strict=True):
        assert torch.equal(ours[frozen], first[frozen])
    for ours, first in zip(predictor.cache.values, fresh.values, strict=True):
        assert torch.equal(ours[frozen], first[frozen])


def test_an_affix_alone_does_not_care_where_it_stands(world):
    """Values are equal, keys are turned by the distance."""
    text = world.text(12)
    caches = []
    for start in (0, 17):
        tokens = torch.tensor([*[0] * start, *text])
        caches.append(world.model.empty_cache(len(tokens)))
        encode(world.model, tokens, Affix(start, start + 12), caches[-1])
    angle = 17 * world.model.inv_freq
    for k, moved, v, same in zip(caches[0].keys, caches[1].keys, caches[0].values, caches[1].values, strict=True):
        first, second = k.chunk(2, dim=-1)
        turned = torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )
        assert relative(moved[17:], turned) < 2e-5
        assert relative(same[17:], v) < 2e-5


def test_a_node_depends_on_its_ancestors_only(llada):
    text = llada.text(20)
    one, two = llada.model.empty_cache(20), llada.model.empty_cache(14)
    encode(llada.model, torch.tensor(text), Affix(0, 20, cuts=(8, 14)), one)
    encode(llada.model, torch.tensor(text[:14]), Affix(0, 14, cuts=(8,)), two)
    assert torch.equal(one.keys[-1][:14], two.keys[-1])


def test_the_anchor_budget_is_exact():
    assert [budget(0.07, 100), budget(0.2, 11), budget(0.0, 9), budget(1.0, 9)] == [7, 3, 0, 9]


def test_cached_forward_reads_only_what_was_stored(llada):
    """The cache starts as NaN: reading a position that was never stored would show."""
    predictor = CachedForward(llada.model, to_end=False)
    tokens = torch.tensor([*llada.text(10), *[llada.spec.mask_id] * 8])
    assert predictor.predict(tokens, [10, 11], 10, 18, True).isfinite().all()
    assert predictor.predict(tokens, [10, 11], 10, 18, False).isfinite().all()
