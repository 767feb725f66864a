"""Peers: what is sent to them and how they are started; the plain loop against the reference."""

import argparse
import asyncio
import json
import sys

import pytest
import torch

from integration_tests.oracle.reference_loop import Decoding, FullForward, generate
from integration_tests.oracle.transformers_oracle import TransformersOracle
from sglang_acache.bench import peers, peers_plain, peers_worker
from sglang_acache.bench.peers_scripts import (
    DLLM_CACHE_FILE,
    FAST_DLLM_FILE,
    PeerFailed,
    ScriptPeer,
    dllm_cache,
    fast_dllm,
    missing,
    plain,
)
from sglang_acache.bench.peers_servers import (
    MODEL_CODE,
    OurPeer,
    ServerPeer,
    in_flight,
    model_code,
    package_versions,
    with_code,
)
from sglang_acache.bench.peers_work import PUBLISHED_IDS, PUBLISHED_MASK, RANDOM, open_work, random_spec, read_words
from sglang_acache.bench.report import Report

SHAPE = argparse.Namespace(
    layers=2, hidden=64, canvas=64, new_tokens=16, share=0.5, block_length=8, per_step=4
)  # fmt: skip


@pytest.fixture(scope="module")
def work():
    with open_work(RANDOM, SHAPE) as made:
        yield made


def test_requests_share_a_prefix_and_differ_after_it(work):
    first, second = work.requests(2, seed=3)
    assert (work.shared, work.new_tokens, work.steps) == (32, 16, 4)
    assert first.ids[:32] == second.ids[:32]
    assert first.ids[32:-2] != second.ids[32:-2]
    assert len(first.ids) == 48
    assert first.ids[-2:] == [work.spec.special("<|eot_id|>"), work.spec.special("<|startoftext|>")]
    assert read_words(first.user) == first.ids[:-2]
    assert work.requests(2, seed=3) == [first, second]


def test_read_words_marks_what_is_no_word():
    assert read_words("w12 <|x|> w0 what") == [12, -1, 0, -1]


def test_the_plain_loop_is_the_reference(work):
    """A batch of prompts of several lengths, each as the reference answers it alone."""
    prompts = [request.ids[start:] for start, request in enumerate(work.requests(3, seed=1))]
    model = peers_plain.build(
        json.loads((work.model / "config.json").read_text()), peers_plain.read_tensors(work.model)
    )
    answers = peers_plain.generate(model, prompts, 16, 8, 4, work.mask_id)
    predictor = FullForward(TransformersOracle(work.model).logits)
    how = Decoding(mask_id=work.mask_id, vocab_size=work.spec.vocab_size, block_length=8, steps=4)
    assert answers.tolist() == [generate(predictor, prompt, 16, how).output for prompt in prompts]


def test_special_tokens_never_win(work):
    head = peers_plain.read_tensors(work.model)["model.transformer.ff_out.weight"]
    assert (head[work.spec.words :] == 0).all()
    assert head[: work.spec.words].abs().sum(1).min() > 0


def test_schedule_and_padding():
    assert peers_plain.schedule(8, 3) == [3, 3, 2]
    canvas, real = peers_plain.pad([[5, 6, 7], [8]], 2, mask_id=9)
    assert canvas.tolist() == [[5, 6, 7, 9, 9], [0, 0, 8, 9, 9]]
    assert real.tolist() == [[True] * 5, [False, False, True, True, True]]
    assert torch.equal(canvas[:, 3:], torch.full((2, 2), 9))


def test_orders_to_scripts(tmp_path, work):
    requests = work.requests(3, seed=0)
    fast, cached = fast_dllm(tmp_path, "python3", "dual"), dllm_cache(tmp_path, "python3")
    assert {fast.name, cached.name, plain().name} <= peers_worker.LOADERS.keys()
    assert fast.command()[0] == "python3"
    assert fast.command()[-1].endswith("peers_worker.py")
    assert fast.load_order(work, 2) == {
        "do": "load", "peer": "fast-dllm dual", "repo": str(tmp_path), "model": str(work.model), "threads": 2,
    }  # fmt: skip
    assert fast.run_order(work, requests, 16)["batch"] == 1
    order = cached.run_order(work, requests, 16)
    assert (order["batch"], order["steps"], order["mask_id"]) == (16, 4, work.mask_id)
    assert order["prompts"] == [request.ids for request in requests]
    assert order["dllm_cache"]["transfer_ratio"] == 0.25


def test_a_worker_answers_and_reports_what_goes_wrong(work):
    with plain().start(work, 1) as runner:
        done = runner.run(work.requests(2, seed=0), 2)
        assert [len(answer) for answer in done.answers] == [16, 16]
        assert done.seconds > 0
        assert "torch" in runner.versions
        with pytest.raises(PeerFailed, match="plain: KeyError"):
            runner.ask({"do": "run"})
    with (
        pytest.raises(PeerFailed, match="No module named 'dllm_cache'"),
        dllm_cache(work.model, sys.executable).start(work, 1),
    ):
        pass


def server(name, code, clients=16):
    return ServerPeer(name, "python3", code, clients)


def test_server_commands(tmp_path, work):
    dlm, fast = server("dlmserve", tmp_path), server("dfastllm", tmp_path)
    command = dlm.command(tmp_path / "m", 8123, work)
    assert command[:4] == ["python3", "-W", "ignore", "-m"]
    assert "8123" in command
    environment = dlm.environment(tmp_path / "m", 2)
    assert environment["DLMSERVE_MODEL"] == str(tmp_path / "m")
    assert (environment["DLMSERVE_MAX_BATCH"], environment["OMP_NUM_THREADS"]) == ("16", "2")
    command = fast.command(tmp_path / "m", 8123, work)
    assert command[command.index("--diffusion-steps") + 1] == "4"
    assert command[command.index("--max-concurrent-requests") + 1] == "16"
    path, body = dlm.request(work, tmp_path / "m", work.requests(1, 0)[0])
    assert path == "/v1/chat/completions"
    assert (body["num_denoising_steps"], body["block_length"], body["max_tokens"]) == (4, 8, 16)
    assert body["messages"][0]["content"].startswith("w")


def test_servers_say_what_they_cannot_serve(tmp_path, work):
    assert "mask token" in server("dlmserve", tmp_path).refuses(work)
    assert server("dfastllm", tmp_path).refuses(work) is None
    spec = random_spec(PUBLISHED_IDS, SHAPE)
    assert spec.mask_id == PUBLISHED_MASK
    with open_work("llada-tiny", SHAPE) as tiny:
        assert "llada-tiny" in server("dfastllm", tmp_path).refuses(tiny)


def test_model_code_is_copied_beside_the_weights(tmp_path, work):
    assert model_code(None, None) is None
    assert model_code(tmp_path, tmp_path) is None
    code = tmp_path / "llada" / "model"
    code.mkdir(parents=True)
    for file in MODEL_CODE:
        (code / file).write_text("# theirs")
    assert model_code(tmp_path, None) == code
    folder = with_code(work.model, tmp_path / "llada-x", code)
    assert {*MODEL_CODE, "config.json", "model.safetensors"} <= {file.name for file in folder.iterdir()}
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_our_payload(work):
    request = work.requests(1, 0)[0]
    reused = OurPeer("a", reuse=True, ratio=0.3).payload(work, request)["sampling_params"]["custom_params"]
    assert reused["acache"] == {"spans": [[0, 32]], "anchor_ratio": 0.3}
    assert (reused["steps"], reused["block_length"]) == (4, 8)
    assert OurPeer("b", reuse=False).payload(work, request)["sampling_params"]["custom_params"]["acache"] == {
        "enabled": False
    }


def test_no_more_requests_in_flight_than_clients():
    running, most = 0, 0

    async def call(index):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return str(index)

    assert asyncio.run(in_flight([call(index) for index in range(9)], 3)) == [str(index) for index in range(9)]
    assert most == 3


def test_absent_peers_are_skipped_with_a_line_each(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    options = parser.parse_args(["--dllm-cache", str(tmp_path), "--dlmserve-python", str(tmp_path / "no-python")])
    report = Report("peers", tmp_path, vars(options))
    assert [peer.name for peer in peers.scripts_of(options, report)] == ["plain"]
    assert peers.servers_of(options, report) == [] or package_versions(sys.executable, ["dfastllm"])
    lines = report.data["skipped"]
    assert any("--fast-dllm PATH" in line for line in lines)
    assert any(str(DLLM_CACHE_FILE) in line for line in lines)
    assert any(line.startswith("dlmserve: not installed") for line in lines)
    assert all(f"skipped {line}" in capsys.readouterr().err for line in lines[:1])


def test_checkouts_are_known_by_their_file(tmp_path):
    assert "has no" in missing(tmp_path, FAST_DLLM_FILE, "--fast-dllm")
    (tmp_path / "llada").mkdir()
    (tmp_path / FAST_DLLM_FILE).write_text("")
    assert missing(tmp_path, FAST_DLLM_FILE, "--fast-dllm") is None


def test_describe_compares_answers_and_rates(tmp_path, work):
    report = Report("peers", tmp_path, {})
    level = {
        peers.OURS_REUSE: peers.Samples([40.0, 60.0], [[1], [2]]),
        "plain": peers.Samples([10.0, 10.0], [[1], [3]]),
    }
    peers.describe(report, work, {16: level}, {"plain": {"torch": "2"}})
    rows = report.tables[0].rows
    assert rows[1][2].startswith("5.00")
    assert rows[0][3] == "0.50"
    assert rows[1][5] == "torch 2"
    assert ScriptPeer("plain").refuses(work) is None
