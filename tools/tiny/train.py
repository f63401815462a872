"""Training: packed documents, Muon for the matrices and AdamW for the rest, resumable at any step.

    python -m tools.tiny.train --work build/tiny --hours 2

A work folder holds the checkpoint (written aside and renamed, so a kill never leaves half of one), the tokenizer and
`train.log`. Started again, the run goes on where the checkpoint is: weights, optimizers, position in the data, time
spent. With a budget of tokens the run is a function of its settings alone; with a budget of hours the length of the
schedule depends on the machine.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from tools.tiny.data import Batch, Shape, next_batch
from tools.tiny.model import TinyConfig, TinyLlama, document_mask
from tools.tiny.tokenizer import save_tokenizer, train_tokenizer
from tools.tiny.world import LETTER, SAID

SHORT = Shape(rows=16, length=256)
LONG = Shape(rows=4, length=2048, episodes=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run is; one of `tokens` and `hours` limits it."""

    tokens: int | None = None
    hours: float | None = None
    seed: int = 0
    precision: str = "bf16"  # of the matrix products; weights and optimizers are float32
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    warmup_steps: int = 50
    high_tokens: int = 10_000_000  # at the beginning, at the full learning rate
    low_plateau: float = 0.4  # of it after that: what was found roughly is then found exactly
    decay_share: float = 0.25  # of the run, at its end, with a falling learning rate
    long_share: float = 0.05  # of the run, at its end, at the full context
    short: Shape = SHORT
    long: Shape = LONG
    save_every_s: float = 180.0

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.hours is None):
            raise ValueError("a plan has either a budget of tokens or a budget of hours")


@dataclass(slots=True)
class Progress:
    """How far a run has come; all of it is in the checkpoint."""

    step: int = 0
    tokens: int = 0
    position: int = 0  # number of the next training document
    seconds: float = 0.0


class Trainer:
    """A model, its optimizers and its progress; `step` does one step, `save` and `load` keep all of it."""

    def __init__(self, cfg: TinyConfig, plan: Plan, tokenizer: Tokenizer, device: torch.device) -> None:
        self.plan, self.tokenizer, self.device = plan, tokenizer, device
        self.model = TinyLlama(cfg, plan.seed).to(device)
        self.progress = Progress()
        self.means: dict[str, float] = {}
        self.parts: dict[str, Tensor] = {}  # mean loss of some tokens in the last batch
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=plan.matrix_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base_lr = (plan.matrix_lr, plan.other_lr)

    @property
    def done_share(self) -> float:
        """0 at the start, 1 when the budget is spent."""
        if self.plan.tokens is not None:
            return self.progress.tokens / self.plan.tokens
        assert self.plan.hours is not None
        return self.progress.seconds / (self.plan.hours * 3600)

    def lr_factor(self) -> float:
        """Warm-up, a high and a low plateau, linear decay to a fiftieth (after WSD, arXiv:2404.06395)."""
        warm = min(1.0, (self.progress.step + 1) / self.plan.warmup_steps)
        plateau = 1.0 if self.progress.tokens < self.plan.high_tokens else self.plan.low_plateau
        left = max(0.0, 1.0 - self.done_share)
        return max(0.02, warm * plateau * min(1.0, left / self.plan.decay_share))

    def next_batch(self) -> Batch:
        shape = self.plan.long if self.done_share > 1 - self.plan.long_share else self.plan.short
        batch, self.progress.position = next_batch(self.tokenizer, self.progress.position, shape)
        return batch

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy, each token by its weight."""
        inputs, targets, weights, documents = (
            t.to(self.device) for t in (batch.inputs, batch.targets, batch.weights, batch.documents)
        )
        bf16 = self.plan.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            logits = self.model(inputs, document_mask(documents))  # (B, T, V)
        each = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        self.parts = {
            name: each.detach()[weights.flatten() == weight].mean()
            for name, weight in (("answers", SAID), ("letters", LETTER))
        }
        return (each * weights.flatten()).sum() / weights.sum()

    def step(self) -> float:
        """One batch forward and backward; returns its loss."""
        began = time.perf_counter()
        factor = self.lr_factor()
        for optimizer, lr in zip(self.optimizers, self.base_lr, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
        batch = self.next_batch()
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for name, part in self.parts.items():  # averaged over about 50 steps, for the log
            self.means[name] = 0.98 * self.means.get(name, float(part)) + 0.02 * float(part)
        self.progress.step += 1
        self.progress.tokens += batch.inputs.numel()
        self.progress.seconds += time.perf_counter() - began
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """The whole state, under a temporary name first."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": {k: getattr(self.progress, k) for k in ("step", "tokens", "position", "seconds")},
        }
        aside = path.with_suffix(".part")
        torch.save(state, aside)
        aside.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def run(trainer: Trainer, work: Path, log: Callable[[str], None]) -> None:
    """Train until the budget is spent, with a checkpoint every few minutes and one at the end."""
    from tools.tiny.probe import probe  # here, because it is only a progress report

    last_save = time.monotonic()
    losses: list[float] = []
    while trainer.done_share < 1:
        losses.append(trainer.step())
        p = trainer.progress
        if p.step % 50 == 0:
            rate = p.tokens / max(p.seconds, 1e-9)
            mean = sum(losses) / len(losses)
            parts = " ".join(f"{name} {value:.3f}" for name, value in trainer.means.items())
            log(f"step {p.step} tokens {p.tokens / 1e6:.2f}M loss {mean:.4f} {parts} lr x{trainer.lr_factor():.2f} "
                f"{rate:.0f} tok/s {trainer.done_share:.1%}")  # fmt: skip
            losses = []
        if p.step % 250 == 0:
            log("  held-out: " + probe(trainer.model, trainer.tokenizer))
        if time.monotonic() - last_save > trainer.plan.save_every_s:
            trainer.save(work / "checkpoint.pt")
            last_save = time.monotonic()
    trainer.save(work / "checkpoint.pt")
    log(f"finished: {trainer.progress} held-out: {probe(trainer.model, trainer.tokenizer)}")


def open_tokenizer(work: Path) -> Tokenizer:
    """The tokenizer of the work folder; trained first if there is none."""
    path = work / "tokenizer.json"
    if not path.exists():
        save_tokenizer(train_tokenizer(), work, TinyConfig().context)
    return Tokenizer.from_file(str(path))


def open_trainer(work: Path, plan: Plan) -> Trainer:
    """A trainer at the checkpoint of the work folder, or at the beginning."""
    work.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # a larger batch costs nothing there
        plan = replace(plan, short=replace(plan.short, rows=64), long=replace(plan.long, rows=16))
    trainer = Trainer(TinyConfig(), plan, open_tokenizer(work), device)
    if (work / "checkpoint.pt").exists():
        trainer.load(work / "checkpoint.pt")
    return trainer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model `tiny`.")
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="checkpoint, tokenizer and log")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--hours", type=float, help="budget of training time, over all resumed runs together")
    budget.add_argument("--tokens", type=float, help="budget of training tokens")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of the matrix products")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for PyTorch's own choice")
    a = parser.parse_args(arguments)
    if a.threads:
        torch.set_num_threads(a.threads)
    plan = Plan(tokens=int(a.tokens) if a.tokens else None, hours=a.hours, precision=a.precision)
    trainer = open_trainer(a.work, plan)
    with (a.work / "train.log").open("a") as file:

        def log(line: str) -> None:
            print(line, flush=True)
            file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
            file.flush()

        log(json.dumps({"budget": a.hours or a.tokens, "device": str(trainer.device), "torch": torch.__version__}))
        run(trainer, a.work, log)


if __name__ == "__main__":
    main()
