"""Measurements of a compressed checkpoint compared with its source; also alone, with --measure.

Each figure is written to the folder's record as soon as it is available, so an interrupted run keeps its results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.cli.compress.flags import QUESTIONS
from millrace.cli.compress.request import command_line, warn_if_unpredictable
from millrace.cli.console import Progress, note, progress
from millrace.cli.eval.questions import mmlu_results
from millrace.cli.eval.request import EvalOptions
from millrace.cli.open_model import opened
from millrace.compile.settings import BuildSettings
from millrace.compile.source import Source
from millrace.compress.calibration.calibrated_methods import is_of
from millrace.compress.calibration.calibration_source import same_text_error
from millrace.compress.checkpoint.compression_record import AnswerChanges, read_record
from millrace.compress.measure.accuracy import Loss, SimulatedLoss, measure, unmeasurable_reason, windows_for
from millrace.compress.measure.speed import TOKENS, Speeds, paces
from millrace.compress.report.page import write_page
from millrace.env import Env
from millrace.errors import ConfigError, MillraceError
from millrace.evaluate.calibration import Calibration
from millrace.evaluate.mmlu import LM_EVAL, read_subjects
from millrace.evaluate.paired_comparison import wilson
from millrace.evaluate.resumable_results import RIGHT, compare_results, precision_summary
from millrace.evaluate.text_windows import Windows
from millrace.machine.cpu import cpu_model, usable_cores
from millrace.runtime.settings import RunSettings

TUNE_S = 2.0  # the default of `millrace build`, so that cached engines are reused


@dataclass(frozen=True, slots=True)
class AccuracyProofOptions:
    """What to measure. text: None skips the loss; mmlu: a folder that has been validated"""

    text: Calibration | None
    measure_speed: bool
    mmlu: Path | None
    questions: int

    @classmethod
    def from_flags(
        cls, *, evaluate: bool, calibration: str | None, measure_speed: bool, mmlu: Path | None, questions: int | None
    ) -> "AccuracyProofOptions":
        """Create from flags. raises ConfigError for options that do not go together, or invalid files"""
        if calibration is not None and not evaluate:
            raise ConfigError("--calibration is given, and nothing is measured", "one of both", "leave one out")
        if mmlu is not None:
            read_subjects(mmlu)
        elif questions is not None:
            raise ConfigError("--questions is given without a folder of them", "both", "name one: --mmlu")
        text = Calibration.open(calibration) if evaluate else None
        return cls(text, measure_speed, mmlu, questions or QUESTIONS)

    @property
    def asks(self) -> bool:
        """Whether anything is to be measured."""
        return self.text is not None or self.measure_speed or self.mmlu is not None

    def windows(self, source: Checkpoint) -> Windows | str:
        """Return the windows to measure the loss on, or why there are none. raises ConfigError if the text is too
        short"""
        if self.text is None:
            return "--no-evaluate was given"
        return unmeasurable_reason(source) or windows_for(source, self.text)

    def loss(self, model: str, source: Checkpoint, out: Path, read: Windows | str, report: Progress) -> dict[str, Any]:
        """Measure and record the loss. model: as typed"""
        if isinstance(read, str):
            write_page(out, {"loss": {"not_measured": read}})
            return {"loss": {"not_measured": read}}
        assert self.text is not None
        loss = asdict(measure(source, Checkpoint.open(out), read, report).on(self.text))
        warn_if_unpredictable(loss["source_perplexity"], source)
        return _record(out, "loss", loss, model)

    def more(self, model: str, out: Path, env: Env, quiet: bool) -> dict[str, Any]:
        """Measure and record speed and MMLU, if requested."""
        results: dict[str, Any] = {}
        if self.measure_speed:
            results |= _record(out, "speed", msgspec.to_builtins(_speeds(model, out, env, quiet)), model)
        if self.mmlu is not None:
            flips = _questions(model, out, self.mmlu, self.questions, (env, quiet))
            results |= _record(out, "mmlu", msgspec.to_builtins(flips), model)
        return results


def _record(out: Path, key: str, value: dict[str, Any], model: str) -> dict[str, Any]:
    """Write a result to the record, with the command that measured it."""
    write_page(out, {key: value, "commands": {**read_record(out).commands, key: command_line(model)}})
    return {key: value}


def measure_again(
    model: str, source: Checkpoint, out: Path, proof: AccuracyProofOptions, report: Progress
) -> dict[str, Any]:
    """Measure an existing folder. raises ConfigError if it is missing, or was made from another model"""
    record = read_record(out)
    if record.model and record.model != source.identity():
        raise ConfigError(
            f"{out} was made of another model than {source.folder}", f"its own source: {record.source}", "name that"
        )
    if proof.text is None:
        return {}
    statistics = record.statistics
    if statistics and is_of(source, proof.text.content, str(statistics.get("text")), int(statistics.get("tokens", 0))):
        raise same_text_error(proof.text)
    return proof.loss(model, source, out, proof.windows(source), report)


@contextmanager
def note_if_interrupted(model: str, out: Path) -> Iterator[None]:
    """Print how to measure a complete folder later if measuring is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MillraceError):
        note(f"{out} is whole, but not all measured. To do that: millrace compress {model} -o {out} --measure")
        raise


def rows_of(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Format the results of `AccuracyProofOptions` as rows."""
    return [*_loss(results.get("loss", {})), *_speed(results.get("speed")), *_mmlu(results.get("mmlu"))]


def _speeds(model: str, out: Path, env: Env, quiet: bool) -> Speeds:
    """Measure the speed of both engines, built and cached like by `millrace serve`. raises MachineError if memory is
    insufficient for both"""
    build, run = BuildSettings(tune=TUNE_S), RunSettings()
    needed = -(
        -TOKENS // Source.from_checkpoint(Checkpoint.open(out)).max_context
    )  # full contexts that the KV pages must hold
    with (
        opened(model, build, run, env, sequences=needed, quiet=quiet, one_table=True) as source,
        opened(str(out), build, run, env, sequences=needed, quiet=quiet, one_table=True) as compressed,
        progress(quiet) as report,
    ):
        return Speeds(
            machine=cpu_model(), threads=usable_cores(), isa=compressed.isa, source_precision=precision_summary(source),
            made_precision=precision_summary(compressed), paces=paces(source.native, compressed.native, report),
        )  # fmt: skip


def _questions(model: str, out: Path, folder: Path, n: int, context: tuple[Env, bool]) -> AnswerChanges:
    env, quiet = context
    both = [
        mmlu_results(EvalOptions(
            model=name, task="mmlu", build=BuildSettings(tune=TUNE_S), run=RunSettings(), env=env, as_json=quiet,
            data=folder, definition=LM_EVAL, limit=n,
        )) for name in (model, str(out))
    ]  # fmt: skip
    source, compressed = both
    flips = compare_results(compressed, source)[RIGHT]
    rights = [sum(record.right for record in results.records.values()) for results in both]
    return AnswerChanges(
        task=compressed.about.task, questions=flips.n, source_precision=source.about.precision,
        made_precision=compressed.about.precision, source_right=rights[0], made_right=rights[1],
        source_interval=wilson(rights[0], flips.n), made_interval=wilson(rights[1], flips.n),
        became_right=flips.gained, became_wrong=flips.lost, chose_otherwise=flips.changed,
        difference=flips.difference, interval=flips.interval, p_value=flips.p_value, digest=compressed.about.data,
    )  # fmt: skip


def _loss(record: dict[str, Any]) -> list[tuple[str, str]]:
    if not record:
        return []
    if "not_measured" in record:
        return [("loss", f"not measured: {record['not_measured']}")]
    loss = msgspec.convert(record, Loss)
    return [
        ("KL", f"{loss.kl:.3g} nats a token, beside the source in fp32, on {loss.tokens:,} tokens ({loss.precision})"),
        ("perplexity", f"{loss.perplexity:.3f}, the source's {loss.source_perplexity:.3f}"),
        ("same token", f"{loss.agreement:.1%} of the likeliest"),
        *_simulated(loss.fp8_activations),
    ]  # fmt: skip


def _simulated(simulated: SimulatedLoss | None) -> list[tuple[str, str]]:
    if simulated is None:
        return []
    text = f"KL {simulated.kl:.3g}, perplexity {simulated.perplexity:.3f}, same token {simulated.agreement:.1%}"
    return [("elsewhere", f"with FP8 activations, simulated: {text}")]


def _speed(record: dict[str, Any] | None) -> list[tuple[str, str]]:
    if record is None:
        return []
    rows = [
        f"{pace['work']}: {pace['source']['median']:,.0f} -> {pace['made']['median']:,.0f} tokens/s"
        for pace in record["paces"]
    ]
    return [("speed" if not i else "", row) for i, row in enumerate(rows)]


def _mmlu(record: dict[str, Any] | None) -> list[tuple[str, str]]:
    if record is None:
        return []
    n, (low, high) = record["questions"], record["interval"]
    text = f"{record['source_right'] / n:.1%} -> {record['made_right'] / n:.1%} of {n:,} questions"
    flips = f"{record['became_right']} became right, {record['became_wrong']} wrong"
    return [("MMLU", f"{text} ({low:+.1%} to {high:+.1%}); {flips}")]
