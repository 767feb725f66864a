"""Train the bundled model: ``python -m sglang_acache.tiny.train --seed S --out DIR``.

One thread, a fixed number of steps, everything drawn from the seed. The loss is cross-entropy on masked
response tokens, over the masks that block-wise decoding meets. Until `AUX_UNTIL` of the steps, auxiliary
losses name what a layer should have read by then; they include one on the last layer's attention, which is
the very signal that anchor selection reads.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_acache.tiny import samples, structure, task, tokenizer
from sglang_acache.tiny.model import TinyConfig, TinyLLaDA, save

STEPS = 4000
BATCH = 32
PEAK_LR, FINAL_LR, WARMUP, DECAY_FROM = 2e-3, 5e-5, 100, 0.35
AUX_WEIGHT, AUX_UNTIL = 0.5, 0.4
AUX_HEADS = 2  # heads of the last layer taught where to look
FIRST_FACTS, FIRST_NAMES = 4, 3
GROWTH = 0.05  # facts added per step while the two-hop task goes well


class Curriculum:
    """Problem size, grown while the running accuracy on the two-hop task is above 0.8."""

    def __init__(self) -> None:
        self.size, self.accuracy = float(FIRST_FACTS), 0.0

    def update(self, accuracy: float) -> None:
        self.accuracy += 0.05 * (accuracy - self.accuracy)
        if self.accuracy > 0.8:
            self.size = min(self.size + GROWTH, task.N_FACTS)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Numbers of facts and of names for one batch."""
        n_facts = int(self.size)
        if n_facts == task.N_FACTS and rng.random() < 0.25:
            n_facts = rng.randint(8, 36)
        grown = (min(n_facts, task.N_FACTS) - FIRST_FACTS) / (task.N_FACTS - FIRST_FACTS)
        return n_facts, FIRST_NAMES + int(grown * (task.N_NAMES - FIRST_NAMES) + 1e-6)


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    progress = max(0.0, (step / steps - DECAY_FROM) / (1 - DECAY_FROM))
    return FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def stream_of(rng: random.Random, n_facts: int, n_names: int) -> Iterator[task.Puzzle]:
    names, shares = list(samples.TASK_SHARES), list(samples.TASK_SHARES.values())
    while True:
        facts = task.draw_facts(rng, n_facts, n_names, "train")
        yield task.draw_puzzle(rng, facts, n_names, rng.choices(names, shares)[0])


def answer_loss(logits: Tensor, batch: samples.Batch) -> Tensor:
    """logits [B, n, vocab] over the hole."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    return (losses * batch.weights.flatten()).sum() / batch.weights.sum()


def auxiliary_loss(
    model: TinyLLaDA, streams: list[Tensor], weights: list[Tensor], batch: samples.Batch
) -> Tensor:
    """What inner layers should know, read by the output head, and where the last layer should look."""

    def read(layer: int, rows: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model.head(streams[layer][rows[0], rows[1]]).float(), target)

    total = read(0, batch.names_at, batch.names_object) + read(1, batch.names_at, batch.names_place)
    if batch.masks_at.shape[1] == 0:
        return total
    b, position = batch.masks_at
    looked = weights[-1][b, :AUX_HEADS, position, batch.masks_fact]  # [N, AUX_HEADS]
    return total + read(1, batch.masks_at, batch.masks_object) - (looked + 1e-6).log().mean()


def hole_logits(model: TinyLLaDA, stream: Tensor, batch: samples.Batch) -> Tensor:
    """Last residual stream [B, T, d] -> logits over the hole [B, n, vocab]."""
    return model.head(stream.gather(1, batch.holes[..., None].expand(-1, -1, stream.shape[-1])))


def accuracies(logits: Tensor, batch: samples.Batch) -> dict[str, float]:
    """Per task: share of masked values, slot visible, that are right."""
    right = logits.argmax(-1) == batch.targets
    return {name: right[at].float().mean().item() for name, at in batch.probes.items() if at.any()}


def train(
    seed: int, steps: int, folder: Path, minutes: float | None = None, save_every: int = 500
) -> TinyLLaDA:
    """`minutes` only cuts a run short; a run that is to be repeated is given by seed and steps."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    model = TinyLLaDA(TinyConfig())
    structure.initialise(model, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.05)
    curriculum, running, tokens, start = Curriculum(), dict.fromkeys(task.TASKS, 0.0), 0, time.time()
    tokenizer.save(folder)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        n_facts, n_names = curriculum.draw(rng)
        shape = samples.draw_shape(rng, n_facts, n_names)
        batch = samples.draw_batch(rng, stream_of(rng, n_facts, n_names), shape, BATCH)
        with torch.autocast("cpu", torch.bfloat16):
            streams, weights = model(batch.ids)
            logits = hole_logits(model, streams[-1], batch)
            loss = answer_loss(logits, batch)
            fade = min(1.0, max(0.0, (AUX_UNTIL - step / steps) / 0.1))
            extra = auxiliary_loss(model, streams, weights, batch) if fade else torch.zeros(())
        optimiser.zero_grad()
        (loss + AUX_WEIGHT * fade * extra).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        tokens += batch.ids.numel()
        for name, value in accuracies(logits, batch).items():
            running[name] += 0.05 * (value - running[name])
            if name == "hop":
                curriculum.update(value)
        if step % 50 == 49:
            shown = " ".join(f"{name} {value:.3f}" for name, value in running.items())
            print(
                f"step {step + 1} min {(time.time() - start) / 60:.1f} tokens {tokens / 1e6:.2f}M "
                f"facts {curriculum.size:.1f} loss {loss.item():.3f} aux {extra.item():.3f} {shown}",
                flush=True,
            )
        if step % save_every == save_every - 1:
            save(model, folder)
        if minutes is not None and time.time() - start > minutes * 60:
            break
    save(model, folder)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled llada-tiny model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, help="stop early, for a look")
    arguments = parser.parse_args()
    train(arguments.seed, arguments.steps, arguments.out, arguments.minutes)


if __name__ == "__main__":
    main()
