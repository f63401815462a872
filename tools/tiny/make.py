"""The whole recipe in one command: train (or go on training), export, evaluate, write the model card.

python -m tools.tiny.make --hours 2 --work build/tiny --out src/millrace/bundled/tiny
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.tiny import train
from tools.tiny.card import TrainingRecord, model_card
from tools.tiny.data import next_batch
from tools.tiny.evaluate import evaluate, report
from tools.tiny.export import export

DEFAULT_HOURS = 2.0


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the state is kept and where the model goes."""

    work: Path
    out: Path


def _loss_ahead(trainer: train.Trainer, batches: int = 20) -> float:
    """Mean loss on the next documents of the training stream, which no step has seen yet."""
    position, total = trainer.progress.position, 0.0
    for _ in range(batches):
        batch, position = next_batch(trainer.tokenizer, position, trainer.plan.short)
        with torch.no_grad():
            total += float(trainer.loss(batch))
    return total / batches


def export_and_evaluate(folders: Folders, plan: train.Plan, scale: float) -> None:
    """Export the work folder's checkpoint, evaluate the export, write card and figures."""
    trainer = train.open_trainer(folders.work, plan)
    export(trainer.model, trainer.tokenizer, folders.out)
    found, examples = evaluate(folders.out, scale)
    print("\n".join([*report(found), *examples]))
    p = trainer.progress
    record = TrainingRecord(p.step, p.tokens, p.position, p.seconds / 3600, _loss_ahead(trainer), str(trainer.device))
    parameters = sum(t.numel() for t in trainer.model.parameters())
    (folders.out / "MODEL_CARD.md").write_text(model_card(record, parameters, found))
    figures = {name: share.as_json() for name, share in found.items()}
    (folders.work / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train, export, evaluate and describe the bundled model `tiny`.")
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="checkpoint, tokenizer and log")
    parser.add_argument("--out", type=Path, default=Path("src/millrace/bundled/tiny"), help="the exported model")
    parser.add_argument("--hours", type=float, default=DEFAULT_HOURS, help="budget of training time")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for PyTorch's own choice")
    parser.add_argument("--export-only", action="store_true", help="no training: export and evaluate what is there")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the evaluation's items")
    a = parser.parse_args(arguments)
    if a.export_only and not (a.work / "checkpoint.pt").exists():
        parser.error(f"{a.work / 'checkpoint.pt'} does not exist; train first, without --export-only")
    if not a.export_only:
        train.main(["--work", str(a.work), "--hours", str(a.hours), "--threads", str(a.threads)])
    elif a.threads:
        torch.set_num_threads(a.threads)
    export_and_evaluate(Folders(a.work, a.out), train.Plan(hours=a.hours), a.scale)


if __name__ == "__main__":
    main()
