"""A quick look at held-out choices during training; the figures that count are those of `evaluate.py`."""

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from tools.tiny.items import LETTERS
from tools.tiny.model import TinyLlama
from tools.tiny.world import Exam, held_out_exam

PROBE_SEED = 10_000_000  # far from the seeds of the evaluation


def choose(model: TinyLlama, tokenizer: Tokenizer, exams: list[Exam]) -> list[str]:
    """The most likely letter for each exam."""
    letters = torch.tensor([tokenizer.encode(" " + x, add_special_tokens=False).ids[0] for x in LETTERS])
    rows = [tokenizer.encode(e.prompt).ids for e in exams]
    last = torch.tensor([len(r) - 1 for r in rows])
    width = max(map(len, rows))
    device = model.model.embed_tokens.weight.device
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows], device=device)  # causal: what follows is unseen
    with torch.no_grad():
        hidden = model.model(tokens, None)[torch.arange(len(rows)), last]  # (B, D)
        logits = functional.linear(hidden, model.model.embed_tokens.weight)[:, letters]  # (B, 4)
    return [LETTERS[i] for i in logits.argmax(-1).tolist()]


def probe(model: TinyLlama, tokenizer: Tokenizer, count: int = 300) -> str:
    """Accuracy by category on a few held-out choices, as one line."""
    exams = [held_out_exam(PROBE_SEED + i) for i in range(count)]
    chosen = [letter for i in range(0, count, 50) for letter in choose(model, tokenizer, exams[i : i + 50])]
    parts = []
    for category in ("story", "fact", "sum"):
        right = [e.choice.letter == c for e, c in zip(exams, chosen, strict=True) if e.category == category]
        parts.append(f"{category} {sum(right) / max(1, len(right)):.0%}")
    total = sum(e.choice.letter == c for e, c in zip(exams, chosen, strict=True)) / count
    return f"{total:.0%} ({', '.join(parts)})"
