"""`millrace build --traffic`: chooses settings from a recording unless flags do, each with its reason."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.checkpoint.config.encoder_config import EncoderConfig
from millrace.cli.build.flags import TrafficSettings
from millrace.compile.build import DEFAULT_BATCH, STEP_TOKENS
from millrace.compile.settings import BuildSettings
from millrace.compile.source import contexts
from millrace.compile.tune.tuning_cases import USUAL_ROWS
from millrace.errors import ConfigError
from millrace.tune.day_night import DayPart, day_and_night, distance
from millrace.tune.recorded_requests import Recording, read_recording
from millrace.tune.traffic import BUSY, Proposal, TrafficSummary, check_enough, propose


@dataclass(frozen=True, slots=True)
class TrafficChoice:
    """One setting: its value, its default, the source (flag, traffic or default), and the reason."""

    setting: str
    value: Any
    default: Any
    source: str
    why: str


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
    checkpoint: Path, traffic: TrafficSettings, build: BuildSettings, *, tune_said: bool
) -> list[tuple[str, ChosenSettings]]:
    """Return the name suffix and the settings of each requested engine. raises ConfigError

    tune_said: whether --tune was given
    """
    assert traffic.traffic is not None
    config = Checkpoint.open(checkpoint).config
    if isinstance(config, EncoderConfig):
        raise ConfigError("--traffic is given for an encoder", "a language model", "leave it out")
    path = Path(traffic.traffic)
    recording = read_recording(path)
    check_enough(recording, str(path))
    usual, most = contexts(config)
    summary = TrafficSummary(
        model_context=most, usual_batch=DEFAULT_BATCH, step_tokens=STEP_TOKENS, covers=traffic.traffic_covers or 100.0,
        max_context=build.max_context, max_batch=build.max_batch,
    )  # fmt: skip
    parts = tuple(distance(recording, summary))
    wanted_part = traffic.traffic_part or "all"
    if wanted_part != "all" and not parts:
        raise _not_apart(wanted_part, recording)

    def choose(part: str, proposal: Proposal) -> ChosenSettings:
        reasons = _Words(summary, proposal, build, usual, tune_said, bool(recording.max_tokens.any()))
        return ChosenSettings(path.name, recording, proposal, reasons.choices(), part, parts)

    if wanted_part == "all":
        return [("", choose("all", propose(recording, summary)))]
    named = [(part.name, proposal) for part, proposal in parts if wanted_part in (part.name, "both")]
    return [(f"-{name}" if wanted_part == "both" else "", choose(name, proposal)) for name, proposal in named]


def _not_apart(wanted_part: str, recording: Recording) -> ConfigError:
    what = f"--traffic-part is {wanted_part}, and "
    if recording.span_s < 24 * 3600:
        what += f"the recording spans {span(recording.span_s)}"
        return ConfigError(what, "a day at least", "record longer, or leave it out")
    few = day_and_night(recording) is None
    what += "day or night holds too few requests" if few else "day and night need the same engine"
    return ConfigError(what, "a recording whose hours differ", "leave it out")


@dataclass(frozen=True, slots=True)
class _Words:
    """The choices with their reasons. limits_known: the recording has the requests' max_tokens"""

    summary: TrafficSummary
    proposal: Proposal
    build: BuildSettings
    usual_context: int
    tune_said: bool
    limits_known: bool

    def choices(self) -> tuple[TrafficChoice, ...]:
        p, build = self.proposal, self.build
        return (
            TrafficChoice("max_context", p.context, self.usual_context, _by(build.max_context), self._context()),
            TrafficChoice("max_batch", *self._batch()),
            TrafficChoice(
                "tune_rows", build.tune_rows or str(p.rows), str(USUAL_ROWS), _by(build.tune_rows), self._rows()
            ),
            self._tuning(),
        )

    def _context(self) -> str:
        p, needed = self.proposal, self.proposal.lengths["needed"]
        text = f"of {p.n:,} requests half need {needed['p50']:,} tokens, 99 % {needed['p99']:,}, one {p.longest:,}"
        if p.n_unfit:
            text += f"; {p.n_unfit:,} ({percent(p.n_unfit / p.n)}) would not fit"
            if self.build.max_context is None:
                by_model = p.context == self.summary.model_context
                text += (
                    ": the model was made for no more" if by_model else f" (--traffic-covers {self.summary.covers:g})"
                )
        else:
            text += f"; all fit, and 19 times of 20 so will {p.sure:.4g} % of others like them"
        return text + ("" if self.limits_known else "; what max_tokens they asked for is not known")

    def _batch(self) -> tuple[int, int, str, str]:
        p, fixed = self.proposal, self.build.max_batch
        if p.batch is None:
            value = fixed or DEFAULT_BATCH
            return value, DEFAULT_BATCH, _by(fixed, "default"), "the recording does not say how long requests stayed"
        why = f"at {BUSY:g} % of the arrivals no more than {p.batch:,} ran, at most {p.peak:,}"
        late = f"{p.n_late:,} of {p.n:,} ({percent(p.n_late / p.n)})" if p.n_late else "none"
        why += f"; {late} would have waited, {percent(p.waited)} did for a tenth of their time"
        return fixed or p.batch, DEFAULT_BATCH, _by(fixed), why

    def _tuning(self) -> TrafficChoice:
        usual, n = BuildSettings().tune, self.proposal.rows.n_cases
        if self.tune_said or self.build.tune_rows is not None:
            source = "flag" if self.tune_said else "default"
            return TrafficChoice("tune", self.build.tune, usual, source, "for the kernels, about")
        why = f"as long a look at each of {n} kinds of steps as else at each of {USUAL_ROWS.n_cases}"
        return TrafficChoice("tune", round(usual * n / USUAL_ROWS.n_cases, 2), usual, "traffic", why)

    def _rows(self) -> str:
        if self.proposal.batch is None:
            return "answers as usual, for want of stays; prompts by what half and 90 % of them have to compute"
        return "answers at a time half, 90 and 99 % of the time; what half and 90 % of the prompts have to compute"


def _by(flag: object, default: str = "traffic") -> str:
    return default if flag is None else "flag"


def percent(share: float) -> str:
    """Format a share; less than 1 is never shown as 100 %."""
    shown = f"{100 * share:.3g} %"
    return "almost 100 %" if share < 1 and shown == "100 %" else shown


def span(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
