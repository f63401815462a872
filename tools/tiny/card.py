"""The model card, written from the evaluation's figures so that no number in it is typed by hand."""

from dataclasses import dataclass

from tools.tiny.evaluate import LABELS, TARGETS
from tools.tiny.model import TinyConfig
from tools.tiny.shares import Share


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What the training came to."""

    steps: int
    tokens: int
    documents: int
    hours: float
    loss: float
    device: str


_CARD = """# tiny

A small chat model that belongs to Millrace: it tells short stories of a little world, answers questions about them,
knows some lasting facts and small sums, and picks letters in multiple choice questions. It is there so that every part
of Millrace can be tried, tested and measured with real text on any machine, without a download.

- Architecture: Llama, {parameters:,} parameters: hidden {hidden}, {layers} layers, {heads} query and {kv_heads}
  key/value heads of {head_size}, feed-forward {ffn}, vocabulary {vocab:,}, tied embeddings, context of {context:,}
  tokens. Weights in bfloat16.
- Tokenizer: byte-level BPE trained on the same world; any UTF-8 text round-trips.
- Licence: that of Millrace. Data: none but the text of the generator in `tools/tiny/`, so nothing is owed to others.

## Figures

Measured by `python -m tools.tiny.evaluate` through transformers in float32, on items whose content was never trained
on. Intervals are Wilson's, 95 %. The recipe was developed by watching the loss and a probe on other held-out items.

| Measurement | Result | Target |
|---|---|---|
{rows}

What "held out" means: a story by the hash of all its facts, a sum by its two numbers in their order, a choice about a
lasting fact by the fact together with its options (the facts themselves are known from training; they cannot be
guessed). Chance is 25 % in multiple choice. "Agree" counts an answer as agreeing when all it states is among
the story's facts, the lasting facts or the sums.

## Training

{tokens:.1f} M tokens ({documents:,} generated documents, none of them twice) in {steps:,} steps and {hours:.2f} hours
of training on {device}; weighted cross-entropy on the documents that would have come next: {loss:.3f}. Muon for the
matrices, AdamW for the rest, warm-up, plateau, linear decay; rows of 256 tokens, the last part at 2,048.

## Limits

It knows the words of its world and nothing else. Asked for anything else it is meant to say so, and often will not. Its
sums end at 20 + 20. It writes English sentences of a few fixed shapes. Do not use it for anything that matters.

## Reproduce

`make tiny`, or see `tools/tiny/README.md`.
"""


def model_card(record: TrainingRecord, parameters: int, found: dict[str, Share]) -> str:
    rows = []
    for name, share in found.items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"at least {target:.0%}: {'met' if share.share >= target else '**missed**'}"
        rows.append(f"| {LABELS[name]} | {share} | {verdict} |")
    cfg = TinyConfig()
    return _CARD.format(
        parameters=parameters,
        rows="\n".join(rows),
        tokens=record.tokens / 1e6,
        steps=record.steps,
        documents=record.documents,
        hours=record.hours,
        loss=record.loss,
        device={"cpu": "CPU", "cuda": "one GPU"}[record.device],
        **cfg.as_dict(),
    )
