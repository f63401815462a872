"""What compressing costs in answers: the made folder beside its source in float32, on one text."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_pieces
from millrace.compile.precision import PrecisionMap
from millrace.compile.program import Bounds, Program
from millrace.compile.source import Source
from millrace.engine.kv import KvFormat
from millrace.errors import MachineError
from millrace.evaluate.calibration import SHORTEST, Calibration
from millrace.evaluate.pieces import answers, read, score
from millrace.evaluate.windows import Windows
from millrace.kernels.precision import Precision

Progress = Callable[[str, int, int], None]
_ROWS = 64  # of logits in a step


@dataclass(frozen=True, slots=True)
class Loss:
    """kl: of the source's distribution from this, nats a token on average; agreement: of the likeliest tokens"""

    kl: float
    perplexity: float
    source_perplexity: float
    agreement: float
    tokens: int
    precision: str  # in which the folder runs


def why_not(checkpoint: Checkpoint) -> str:
    """Why nothing can be measured; "" where it can."""
    if not checkpoint.has_tokenizer:
        return "the checkpoint has no tokenizer to read a text with"
    if checkpoint.decoder.max_context < SHORTEST:
        return "the model's context is too short for it"
    return ""


def windows_for(source: Checkpoint, calibration: Calibration) -> Windows:
    """What is read of a text. raises ConfigError where it is too short"""
    return calibration.windows(source.tokenizer, Source.from_checkpoint(source).max_context)


def measure(source: Checkpoint, made: Checkpoint, text: Windows, progress: Progress) -> Loss:
    """The source in float32; the folder in its own precision, with keys and values in bfloat16. Memory: a piece.

    raises MachineError where the logits are not finite
    """
    model = Source.from_checkpoint(source)
    exact = _pieces(model, text, BuildOptions(precision=PrecisionMap(Precision.FP32), kv_format=KvFormat.F32))
    other = Source.from_checkpoint(made)
    pieces = _pieces(other, text, BuildOptions())
    done, total = 0, len(exact) + len(pieces)

    def advance() -> None:
        nonlocal done
        done += 1
        progress("measuring it beside its source", done, total)

    size = model.vocab_size
    with (
        answers(read(exact, text, size, advance), size) as reference,
        answers(read(pieces, text, size, advance), size) as found,
    ):
        result = score(reference, found, text)
    kl = result.mean_kl
    if not abs(kl) < float("inf"):
        raise MachineError(
            "the compressed model's logits are not finite", "finite logits",
            "compress with more bits, or leave the layers that overflow as they are",
        )  # fmt: skip
    return Loss(
        kl, result.perplexity, result.perplexity / result.ratio, result.agreement, result.n,
        str(other.own_precision.default),
    )  # fmt: skip


def _pieces(source: Source, text: Windows, options: BuildOptions) -> tuple[Program, ...]:
    """For one window a step."""
    length = int(text.ids.shape[1])
    step = replace(options, max_batch=1, max_step_tokens=length, profile={"R": Bounds(1, _ROWS, _ROWS)})
    return tuple(plan_pieces(source, step))
