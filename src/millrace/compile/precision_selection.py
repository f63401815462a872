"""Interface to the selection of a precision by its accuracy.

Measuring is above the compiler in the import order, so callers pass a selector in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.compile.build import BuildOptions, resolve_options
from millrace.compile.precision import PrecisionMap
from millrace.compile.settings import BuildSettings, Progress
from millrace.compile.source import Source
from millrace.engine.artifact.accuracy_loss import Evaluation
from millrace.engine.cache_specs import KvFormat
from millrace.errors import ConfigError
from millrace.kernels.precision import Precision

AUTO = "auto"
AUTO_MAX_KL = 0.01  # nats per token, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyQuery:
    """A language model, and the precisions it may run in.

    candidates: in the order in which they are tried
    max_kl: the first candidate within it is chosen; None: the first one, whatever its loss
    """

    source: Source
    tokenizer: Tokenizer
    options: BuildOptions
    candidates: Sequence[PrecisionMap]
    max_kl: float | None
    progress: Progress


class PrecisionSelector(Protocol):
    """Chooses a precision by its accuracy on one text."""

    @property
    def digest(self) -> str:
        """Digest of the text."""

    def candidates(self, own: PrecisionMap) -> tuple[PrecisionMap, ...]:
        """Return the candidates of `auto`, cheapest first. own: the model's default precision"""

    def select(self, query: AccuracyQuery) -> tuple[PrecisionMap, Evaluation]:
        """Choose a precision. raises ConfigError if no candidate is within the bound, and for an unusable text"""


SelectorFactory = Callable[
    [BuildSettings], PrecisionSelector
]  # supplied by the caller; called only if something is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionTask:
    """What is measured before an engine is built. Without a selector nothing is, for the reason in `without`.

    tiles: whether bfloat16 sums by tiles were requested. An engine that has them because of its machine is measured
    without them, so that equal queries have equal answers everywhere
    """

    candidates: tuple[PrecisionMap, ...] = ()
    max_kl: float | None = None
    selector: PrecisionSelector | None = None
    without: str = ""
    tiles: bool = False

    @property
    def key(self) -> str:
        """Equal for measurements made in the same way; the candidates are identified separately."""
        return "" if self.selector is None else f"measured {self.max_kl} {self.tiles} {self.selector.digest}"


def _exact_reason(source: Source, options: BuildOptions) -> str:
    """Return why no loss is measured: the engine computes what the checkpoint stores, or is the reference itself."""
    own, requested = (
        resolve_options(source, replace(options, precision=None, kv_format=None)),
        resolve_options(source, options),
    )
    if (requested.precision.meaning, requested.kv_format) == (own.precision.meaning, own.kv_format):
        return "it runs in what the checkpoint stores"
    exact = PrecisionMap(Precision.FP32).meaning
    if (requested.precision.meaning, requested.kv_format) == (exact, KvFormat.F32):
        return "fp32 is what other precisions are measured against"
    return ""


def to_measure(
    build: BuildSettings,
    checkpoint: Checkpoint,
    source: Source,
    options: BuildOptions,
    new_selector: SelectorFactory | None,
) -> PrecisionTask:
    """Return what to measure. raises ConfigError if `auto` is requested and nothing can or may be measured"""
    auto = build.precision == AUTO
    if isinstance(checkpoint.config, EncoderConfig):
        without = "an encoder gives vectors, and no distribution of tokens"
    elif not checkpoint.has_tokenizer:
        without = "the checkpoint has no tokenizer to read a text with"
    elif not build.evaluate:
        without = "--no-evaluate was given"
    elif new_selector is None:
        without = Evaluation().not_measured
    else:
        without = ""
    if auto and without:
        raise ConfigError(
            f"--precision auto measures what precisions cost, and here that cannot be: {without}",
            "a language model with its tokenizer, and measuring",
            "name a precision, or leave it out for the model's own",
        )  # fmt: skip
    without = (not auto and _exact_reason(source, options)) or without
    if without or new_selector is None:
        return PrecisionTask(without=without)
    selector, requested, tiles = (
        new_selector(build),
        resolve_options(source, options).precision,
        build.bf16_sums == "tiles",
    )
    if not auto:
        return PrecisionTask(candidates=(requested,), selector=selector, tiles=tiles)
    bound = AUTO_MAX_KL if build.max_kl is None else build.max_kl
    return PrecisionTask(candidates=selector.candidates(requested), max_kl=bound, selector=selector, tiles=tiles)


def check_measured(build: BuildSettings, task: PrecisionTask) -> None:
    """Check that a text to measure on comes with something to measure. raises ConfigError"""
    if build.calibration is not None and task.selector is None:
        raise ConfigError(
            f"--calibration is given, and nothing is measured: {task.without}", "a precision that is measured",
            "leave it out, or ask for --precision auto",
        )  # fmt: skip
