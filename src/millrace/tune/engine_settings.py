"""Chooses the settings of an engine from recorded traffic unless flags do, each with its reason."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.compile.build import DEFAULT_BATCH, STEP_TOKENS
from millrace.compile.settings import BuildSettings
from millrace.compile.source import contexts
from millrace.compile.tune.tuning_cases import USUAL_ROWS
from millrace.errors import ConfigError
from millrace.report.format_numbers import format_duration, format_percent
from millrace.tune.day_night import DayPart, day_and_night, distance
from millrace.tune.recorded_requests import Recording, read_recording
from millrace.tune.settings import TrafficSettings
from millrace.tune.traffic import BUSY, Proposal, TrafficSummary, check_enough, propose


@dataclass(frozen=True, slots=True)
class TrafficChoice:
    """One setting: its value, its default, the source (flag, traffic or default), and the reason."""

    setting: str
    value: Any
    default: Any
    source: str
    reason: str

    def summary(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "setting": self.setting, "value": self.value, "default": self.default, "source": self.source,
            "why": self.reason,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChosenSettings:
    """Settings of one engine. parts: day and night, if they differ"""

    name: str
    recording: Recording
    proposal: Proposal
    choices: tuple[TrafficChoice, ...]
    part: str
    parts: tuple[tuple[DayPart, Proposal], ...]

    def value(self, setting: str) -> Any:
        return next(c.value for c in self.choices if c.setting == setting)

    def default(self, setting: str) -> Any:
        return next(c.default for c in self.choices if c.setting == setting)

    def settings(self, build: BuildSettings) -> BuildSettings:
        names = ("max_context", "max_batch", "tune_rows", "tune")
        return replace(build, **{name: self.value(name) for name in names})


def choose_settings(
    checkpoint: Path, traffic: TrafficSettings, build: BuildSettings, *, has_tune_flag: bool
) -> list[tuple[str, ChosenSettings]]:
    """Return the name suffix and the settings of each requested engine. raises ConfigError

    has_tune_flag: whether --tune was given
    """
    assert traffic.traffic is not None
    config = Checkpoint.open(checkpoint).config
    if isinstance(config, EncoderConfig):
        raise ConfigError("--traffic is given for an encoder", "a language model", "leave it out")
    path = Path(traffic.traffic)
    recording = read_recording(path)
    check_enough(recording, str(path))
    default_context, max_context = contexts(config)
    summary = TrafficSummary(
        model_context=max_context, usual_batch=DEFAULT_BATCH, step_tokens=STEP_TOKENS,
        covers=traffic.traffic_covers or 100.0, max_context=build.max_context, max_batch=build.max_batch,
    )  # fmt: skip
    parts = tuple(distance(recording, summary))
    part_name = traffic.traffic_part or "all"
    if part_name != "all" and not parts:
        raise _no_separate_parts(part_name, recording)

    def choose(part: str, proposal: Proposal) -> ChosenSettings:
        has_limits = bool(recording.max_tokens.any())
        choices = _ExplainedChoices(summary, proposal, build, default_context, has_tune_flag, has_limits).choices()
        return ChosenSettings(path.name, recording, proposal, choices, part, parts)

    if part_name == "all":
        return [("", choose("all", propose(recording, summary)))]
    requested = [(part.name, proposal) for part, proposal in parts if part_name in (part.name, "both")]
    return [(f"-{name}" if part_name == "both" else "", choose(name, proposal)) for name, proposal in requested]


def _no_separate_parts(part_name: str, recording: Recording) -> ConfigError:
    problem = f"--traffic-part is {part_name}, and "
    if recording.span_s < 24 * 3600:
        problem += f"the recording spans {format_duration(recording.span_s)}"
        return ConfigError(problem, "a day at least", "record longer, or leave it out")
    too_few = day_and_night(recording) is None
    problem += "day or night holds too few requests" if too_few else "day and night need the same engine"
    return ConfigError(problem, "a recording whose hours differ", "leave it out")


@dataclass(frozen=True, slots=True)
class _ExplainedChoices:
    """Makes the choices, each with its reason.

    has_tune_flag: --tune was given; has_limits: the recording has the requests' max_tokens
    """

    summary: TrafficSummary
    proposal: Proposal
    build: BuildSettings
    default_context: int
    has_tune_flag: bool
    has_limits: bool

    def choices(self) -> tuple[TrafficChoice, ...]:
        p, build = self.proposal, self.build
        return (
            TrafficChoice("max_context", p.context, self.default_context, _source(build.max_context), self._context()),
            TrafficChoice("max_batch", *self._batch()),
            TrafficChoice(
                "tune_rows", build.tune_rows or str(p.rows), str(USUAL_ROWS), _source(build.tune_rows), self._rows()
            ),
            self._tuning(),
        )

    def _context(self) -> str:
        p, needed = self.proposal, self.proposal.lengths["needed"]
        text = f"of {p.n:,} requests half need {needed['p50']:,} tokens, 99 % {needed['p99']:,}, one {p.longest:,}"
        if p.n_unfit:
            text += f"; {p.n_unfit:,} ({format_percent(p.n_unfit / p.n)}) would not fit"
            if self.build.max_context is None:
                by_model = p.context == self.summary.model_context
                text += (
                    ": the model was made for no more" if by_model else f" (--traffic-covers {self.summary.covers:g})"
                )
        else:
            text += f"; all fit, and 19 times of 20 so will {p.sure:.4g} % of others like them"
        return text + ("" if self.has_limits else "; what max_tokens they asked for is not known")

    def _batch(self) -> tuple[int, int, str, str]:
        p, fixed = self.proposal, self.build.max_batch
        if p.batch is None:
            value = fixed or DEFAULT_BATCH
            return (
                value,
                DEFAULT_BATCH,
                _source(fixed, "default"),
                "the recording does not say how long requests stayed",
            )
        reason = f"at {BUSY:g} % of the arrivals no more than {p.batch:,} ran, at most {p.peak:,}"
        late = f"{p.n_late:,} of {p.n:,} ({format_percent(p.n_late / p.n)})" if p.n_late else "none"
        reason += f"; {late} would have waited, {format_percent(p.waited)} did for a tenth of their time"
        return fixed or p.batch, DEFAULT_BATCH, _source(fixed), reason

    def _tuning(self) -> TrafficChoice:
        default, n = BuildSettings().tune, self.proposal.rows.n_cases
        if self.has_tune_flag or self.build.tune_rows is not None:
            source = "flag" if self.has_tune_flag else "default"
            return TrafficChoice("tune", self.build.tune, default, source, "for the kernels, about")
        reason = f"as long a look at each of {n} kinds of steps as else at each of {USUAL_ROWS.n_cases}"
        return TrafficChoice("tune", round(default * n / USUAL_ROWS.n_cases, 2), default, "traffic", reason)

    def _rows(self) -> str:
        if self.proposal.batch is None:
            return "answers as usual, for want of stays; prompts by what half and 90 % of them have to compute"
        return "answers at a time half, 90 and 99 % of the time; what half and 90 % of the prompts have to compute"


def _source(flag: object, default: str = "traffic") -> str:
    return default if flag is None else "flag"
