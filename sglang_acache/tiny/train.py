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
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_acache.tiny import samples, structure, task, tokenizer
from sglang_acache.tiny.model import TinyConfig, TinyLLaDA, save

BATCH = 32
WARMUP, FINAL_LR = 100, 5e-5
AUX_WEIGHT, AUX_FADE = 0.5, 0.1
AUX_HEADS = 2  # heads of the last layer taught where to look
SMALLEST, FIRST_NAMES = 4, 3  # numbers of facts and names that are easy
GROWTH = 0.05  # facts added per step while the two-hop task goes well
SAVE_EVERY = 500


@dataclass(frozen=True)
class Stage:
    """A run of the optimiser. Shares are of `schedule`, which a stage may leave before its end."""

    steps: int
    schedule: int
    peak_lr: float
    decay_from: float  # share of the schedule after which the learning rate falls
    aux_until: float  # share of the schedule with auxiliary losses
    first_facts: int
    untouched: float  # see samples.draw_masks
    even: bool  # every request counts the same, whatever its number of masks

    def learning_rate(self, step: int) -> float:
        if step < WARMUP:
            return self.peak_lr * (step + 1) / WARMUP
        progress = max(0.0, (step / self.schedule - self.decay_from) / (1 - self.decay_from))
        return FINAL_LR + (self.peak_lr - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))

    def auxiliary(self, step: int) -> float:
        """Weight of the auxiliary losses, faded out at the end."""
        return min(1.0, max(0.0, (self.aux_until - step / self.schedule) / AUX_FADE))


STAGES = (
    Stage(3500, 4000, 2e-3, 0.35, 0.4, first_facts=4, untouched=0.0, even=False),
    Stage(800, 800, 7e-4, 0.2, 0.0, first_facts=task.N_FACTS, untouched=0.3, even=True),
)


class Curriculum:
    """Problem size, grown while the running accuracy on the two-hop task is above 0.8."""

    def __init__(self, first_facts: int) -> None:
        self.size, self.accuracy = float(first_facts), 0.0

    def update(self, accuracy: float) -> None:
        self.accuracy += 0.05 * (accuracy - self.accuracy)
        if self.accuracy > 0.8:
            self.size = min(self.size + GROWTH, task.N_FACTS)

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Numbers of facts and of names for one batch."""
        n_facts = int(self.size)
        if n_facts == task.N_FACTS and rng.random() < 0.25:
            n_facts = rng.randint(8, 36)
        grown = (min(n_facts, task.N_FACTS) - SMALLEST) / (task.N_FACTS - SMALLEST)
        return n_facts, FIRST_NAMES + int(grown * (task.N_NAMES - FIRST_NAMES) + 1e-6)


def stream_of(rng: random.Random, n_facts: int, n_names: int) -> Iterator[task.Puzzle]:
    names, shares = list(samples.TASK_SHARES), list(samples.TASK_SHARES.values())
    while True:
        facts = task.draw_facts(rng, n_facts, n_names, "train")
        yield task.draw_puzzle(rng, facts, n_names, rng.choices(names, shares)[0])


def answer_loss(logits: Tensor, batch: samples.Batch, even: bool) -> Tensor:
    """logits [B, n, vocab] over the hole."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    weights = batch.weights / batch.weights.sum(1, keepdim=True) if even else batch.weights
    return (losses * weights.flatten()).sum() / weights.sum()


def auxiliary_loss(model: TinyLLaDA, streams: list[Tensor], weights: list[Tensor], batch: samples.Batch) -> Tensor:
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


def batch_loss(model: TinyLLaDA, batch: samples.Batch, stage: Stage, aux_weight: float) -> tuple[Tensor, Tensor]:
    """The loss, and the answer's logits [B, n, vocab]."""
    with torch.autocast("cpu", torch.bfloat16):
        streams, weights = model(batch.ids)
        logits = hole_logits(model, streams[-1], batch)
        loss = answer_loss(logits, batch, stage.even)
        extra = auxiliary_loss(model, streams, weights, batch) if aux_weight else torch.zeros(())
    return loss + aux_weight * extra, logits


def run_stage(model: TinyLLaDA, stage: Stage, rng: random.Random, folder: Path, until: float) -> None:
    """Train `model` in place; stops early at the time `until`."""
    curriculum, running, tokens = Curriculum(stage.first_facts), dict.fromkeys(task.TASKS, 0.0), 0
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    start = time.time()
    for step in range(stage.steps):
        for group in optimiser.param_groups:
            group["lr"] = stage.learning_rate(step)
        n_facts, n_names = curriculum.draw(rng)
        shape = samples.draw_shape(rng, n_facts, n_names)
        batch = samples.draw_batch(rng, stream_of(rng, n_facts, n_names), shape, BATCH, stage.untouched)
        loss, logits = batch_loss(model, batch, stage, AUX_WEIGHT * stage.auxiliary(step))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        tokens += batch.ids.numel()
        for name, value in accuracies(logits, batch).items():
            running[name] += 0.05 * (value - running[name])
            if name == "hop":
                curriculum.update(value)
        if step % 50 == 49:
            shown = " ".join(f"{name} {value:.3f}" for name, value in running.items())
            clock = f"min {(time.time() - start) / 60:.1f} tokens {tokens / 1e6:.2f}M"
            print(f"step {step + 1} {clock} facts {curriculum.size:.1f} loss {loss.item():.3f} {shown}", flush=True)
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            save(model, folder)
        if time.time() > until:
            break


def train(seed: int, folder: Path, minutes: float = math.inf, stages: tuple[Stage, ...] = STAGES) -> TinyLLaDA:
    """Run the stages and save. `minutes` only cuts a run short; a full run is given by its seed."""
    torch.set_num_threads(1)
    until = time.time() + 60 * minutes
    model = TinyLLaDA(TinyConfig())
    structure.initialise(model, seed)
    tokenizer.save(folder)
    for i, stage in enumerate(stages):
        print(f"stage {i + 1} of {len(stages)}: {stage}", flush=True)
        run_stage(model, stage, random.Random(seed + i), folder, until)
    save(model, folder)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled llada-tiny model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop early, for a look")
    arguments = parser.parse_args()
    train(arguments.seed, arguments.out, arguments.minutes)


if __name__ == "__main__":
    main()
