"""Measures the accuracy loss of compression: compares the folder with its source in float32, on one text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.build import BuildOptions, plan_pieces
from millrace.compile.lower_cpu.program import Bounds, Program
from millrace.compile.precision import PrecisionMap
from millrace.compile.settings import Progress
from millrace.compile.source import Source
from millrace.engine.cache_specs import KvFormat
from millrace.errors import CheckpointError, MachineError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.divergence import BLOCK, DivergenceScore
from millrace.evaluate.fake_quant_activations import fp8_rows, read_with_fp8
from millrace.evaluate.kl_agreement import agreement
from millrace.evaluate.piecewise_forward import ReadText, answers, read, score
from millrace.evaluate.sizes import LENGTH, SHORTEST
from millrace.evaluate.text_windows import Windows
from millrace.kernels.precision import Precision

_ROWS = 64  # of logits per step
_DOING = "measuring it beside its source"
_FLOAT_BYTES, _DOUBLE_BYTES, _BASE_BYTES = 4, 8, 96 << 20


@dataclass(frozen=True, slots=True)
class SimulatedLoss:
    """Figures as in `Loss` for a folder that specifies FP8 activations, simulated: no engine here supports them.

    Engines here use bfloat16 instead, which is closer to the source.
    """

    kl: float
    perplexity: float
    agreement: float
    kl_error: float | None = None
    perplexity_error: float | None = None
    agreement_error: float | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss. kl: KL divergence from the source's distribution, mean nats per token; agreement: of the top-1 tokens

    errors: standard errors, assuming independent tokens (those of one window are not); None for a single token
    text, digest: "bundled" or "own", and a digest of the whole text; "" in older records
    """

    kl: float
    perplexity: float
    source_perplexity: float
    agreement: float
    tokens: int
    precision: str  # that the folder runs in
    kl_error: float | None = None
    perplexity_error: float | None = None
    agreement_error: float | None = None
    fp8_activations: SimulatedLoss | None = None
    text: str = ""
    digest: str = ""

    def on(self, text: Calibration) -> "Loss":
        """Return a copy with the name of the text that the loss was measured on."""
        return replace(self, text=text.kind, digest=text.digest)


@dataclass(frozen=True, slots=True)
class Reference:
    """A source's results on a text in float32, to compare several folders with. Memory: the last piece's inputs.

    read: the outputs of all pieces except the last one, which is loaded again for each folder
    """

    source: Source
    text: Windows
    read: ReadText

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, text: Windows, progress: Progress = lambda *_: None
    ) -> "Reference":
        source = Source.from_checkpoint(checkpoint)
        options = BuildOptions(precision=PrecisionMap(Precision.FP32), kv_format=KvFormat.F32)
        pieces = pieces_of(source, text, options)
        return cls(source, text, _read(pieces, text, source.vocab_size, "reading the source", progress))

    def compare_with(
        self, other: Source, options: BuildOptions, progress: Progress = lambda *_: None
    ) -> DivergenceScore:
        """Compare with another model with the same vocabulary, built with these options, window by window."""
        return self.score(pieces_of(other, self.text, options), progress)

    def score(self, pieces: Sequence[Program], progress: Progress = lambda *_: None) -> DivergenceScore:
        """Compare with planned pieces, whose weights are loaded one piece at a time."""
        return self._score(_read(pieces, self.text, self.source.vocab_size, _DOING, progress))

    def with_fp8(
        self, other: Source, options: BuildOptions, progress: Progress = lambda *_: None
    ) -> DivergenceScore | None:
        """Like `compare_with`, with the FP8 activations that the other's checkpoint specifies; None if it has none."""
        if not fp8_rows(other):
            return None
        report = partial(progress, "simulating its FP8 activations")
        return self._score(read_with_fp8(other, _one_window(self.text, options), self.text, report))

    def _score(self, read_text: ReadText) -> DivergenceScore:
        size = self.source.vocab_size
        with answers(self.read, size) as reference, answers(read_text, size) as its:
            return score(reference, its, self.text)


def unmeasurable_reason(checkpoint: Checkpoint) -> str:
    """Return why the loss cannot be measured; "" if it can."""
    if not checkpoint.has_tokenizer:
        return "the checkpoint has no tokenizer to read a text with"
    if checkpoint.decoder.max_context < SHORTEST:
        return "the model's context is too short for it"
    return ""


def require_measurable(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint. raises CheckpointError if its loss cannot be measured"""
    reason = unmeasurable_reason(checkpoint)
    if reason:
        raise CheckpointError(f"no loss can be measured: {reason}", "a model that reads texts", "name a --recipe")
    return checkpoint


def windows_for(source: Checkpoint, calibration: Calibration) -> Windows:
    """Return the windows of a text to measure on. raises ConfigError if it is too short"""
    return calibration.windows(source.tokenizer, Source.from_checkpoint(source).max_context)


def held_out_for(source: Checkpoint, calibration: Calibration) -> Windows | None:
    """Return other windows of that text; None if it has no more."""
    return calibration.held_out(source.tokenizer, Source.from_checkpoint(source).max_context)


def memory_bytes(source: Checkpoint, *, fp8: bool = False) -> int:
    """Estimate the peak memory of measuring, from the headers: a layer's part, or both heads and their logits.

    fp8: for a folder whose FP8 activations are simulated, in float64
    """
    config, length = source.decoder, min(LENGTH, source.decoder.max_context)
    layer = sum(math.prod(info.shape) for name, info in source.tensors.items() if ".layers.0." in name)
    heads = 3 * _FLOAT_BYTES * config.vocab_size * config.hidden_size  # both, and a copy of one during packing
    scores = length * config.vocab_size
    scored = 2 * _FLOAT_BYTES * scores + 4 * 2 * _FLOAT_BYTES * min(scores, BLOCK)
    simulated = _DOUBLE_BYTES * (2 * layer + 3 * config.n_heads * length**2) if fp8 else 0
    return _BASE_BYTES + max(2 * _FLOAT_BYTES * layer, heads + scored, simulated)


def measure(source: Checkpoint, compressed: Checkpoint, text: Windows, progress: Progress) -> Loss:
    """Compare the folder, in its own precision with a bfloat16 KV cache, to the float32 source. Memory: a piece.

    raises MachineError if the logits are not finite
    """
    return loss_of(Reference.from_checkpoint(source, text, progress), compressed, progress)


def loss_of(
    reference: Reference,
    compressed: Checkpoint,
    progress: Progress = lambda *_: None,
    precision: PrecisionMap | None = None,
) -> Loss:
    """Like `measure`, with a source that was already run. precision: to run the folder in; None: its own"""
    other, options = Source.from_checkpoint(compressed), BuildOptions(precision=precision)
    runs_in = (precision or other.own_precision).default
    read_text = agreement(reference.compare_with(other, options, progress).tokens)
    simulated = reference.with_fp8(other, options, progress) if precision is None else None
    if not abs(read_text.divergence.value) < float("inf"):
        raise MachineError(
            "the compressed model's logits are not finite", "finite logits",
            "compress with more bits, or leave the layers that overflow as they are",
        )  # fmt: skip
    for whose, one in (("compressed model", read_text.perplexity), ("source", read_text.reference_perplexity)):
        if not one.value < float("inf"):
            raise MachineError(
                f"the {whose}'s perplexity is more than a number can be", "a model that can tell the text",
                "measure on another text: --calibration; or look at the model: its answers are of no use",
            )  # fmt: skip
    return Loss(
        read_text.divergence.value, read_text.perplexity.value, read_text.reference_perplexity.value,
        read_text.same.value, read_text.n,
        str(runs_in), read_text.divergence.error, read_text.perplexity.error, read_text.same.error,
        None if simulated is None else _simulated(simulated),
    )  # fmt: skip


def _simulated(score: DivergenceScore) -> SimulatedLoss:
    read_text = agreement(score.tokens)
    return SimulatedLoss(
        read_text.divergence.value, read_text.perplexity.value, read_text.same.value, read_text.divergence.error,
        read_text.perplexity.error, read_text.same.error,
    )  # fmt: skip


def pieces_of(source: Source, text: Windows, options: BuildOptions) -> tuple[Program, ...]:
    """Plan the pieces of a model for one window per step."""
    return tuple(plan_pieces(source, _one_window(text, options)))


def _one_window(text: Windows, options: BuildOptions) -> BuildOptions:
    length = int(text.ids.shape[1])
    return replace(options, max_batch=1, max_step_tokens=length, profile={"R": Bounds(1, _ROWS, _ROWS)})


def _read(pieces: Sequence[Program], text: Windows, vocab_size: int, doing: str, progress: Progress) -> ReadText:
    return read(pieces, text, vocab_size, _counted(doing, progress, len(pieces)))


def _counted(doing: str, progress: Progress, n: int) -> Callable[[], None]:
    """Return a function that reports the progress of one task with n parts."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(doing, done, n)

    return advance
