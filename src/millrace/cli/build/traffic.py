"""`millrace build --traffic`: what a recording shows decides what no flag says, each choice with its reason."""

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
from millrace.tune.day_night import Part, day_and_night, distance
from millrace.tune.recorded_requests import Recording, read_recording
from millrace.tune.traffic import BUSY, Proposal, TrafficSummary, check_enough, propose


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting: what it will be, what it would have been, who said so (flag, traffic or default), and why."""

    setting: str
    value: Any
    default: Any
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """What one engine is built with. parts: day and night, where they differ"""

    name: str
    recording: Recording
    proposal: Proposal
    choices: tuple[Choice, ...]
    part: str
    parts: tuple[tuple[Part, Proposal], ...]

    def value(self, setting: str) -> Any:
        return next(c.value for c in self.choices if c.setting == setting)

    def default(self, setting: str) -> Any:
        return next(c.default for c in self.choices if c.setting == setting)

    def settings(self, build: BuildSettings) -> BuildSettings:
        names = ("max_context", "max_batch", "tune_rows", "tune")
        return replace(build, **{name: self.value(name) for name in names})


def chosen(
    checkpoint: Path, traffic: TrafficSettings, build: BuildSettings, *, tune_said: bool
) -> list[tuple[str, Chosen]]:
    """Of each engine that is asked for what its folder's name gets, and its choices. raises ConfigError

    tune_said: whether --tune is the user's own
    """
    assert traffic.traffic is not None
    config = Checkpoint.open(checkpoint).config
    if isinstance(config, EncoderConfig):
        raise ConfigError("--traffic is given for an encoder", "a language model", "leave it out")
    path = Path(traffic.traffic)
    recording = read_recording(path)
    check_enough(recording, str(path))
    usual, most = contexts(config)
    asked = TrafficSummary(
        model_context=most, usual_batch=DEFAULT_BATCH, step_tokens=STEP_TOKENS, covers=traffic.traffic_covers or 100.0,
        max_context=build.max_context, max_batch=build.max_batch,
    )  # fmt: skip
    parts = tuple(distance(recording, asked))
    wanted = traffic.traffic_part or "all"
    if wanted != "all" and not parts:
        raise _not_apart(wanted, recording)

    def of(part: str, proposal: Proposal) -> Chosen:
        said = _Words(asked, proposal, build, usual, tune_said, bool(recording.asked.any()))
        return Chosen(path.name, recording, proposal, said.choices(), part, parts)

    if wanted == "all":
        return [("", of("all", propose(recording, asked)))]
    named = [(part.name, proposal) for part, proposal in parts if wanted in (part.name, "both")]
    return [(f"-{name}" if wanted == "both" else "", of(name, proposal)) for name, proposal in named]


def _not_apart(wanted: str, recording: Recording) -> ConfigError:
    what = f"--traffic-part is {wanted}, and "
    if recording.span_s < 24 * 3600:
        what += f"the recording spans {span(recording.span_s)}"
        return ConfigError(what, "a day at least", "record longer, or leave it out")
    few = day_and_night(recording) is None
    what += "day or night holds too few requests" if few else "day and night need the same engine"
    return ConfigError(what, "a recording whose hours differ", "leave it out")


@dataclass(frozen=True, slots=True)
class _Words:
    """The choices with their reasons. limits_known: the recording says what max_tokens requests asked for"""

    asked: TrafficSummary
    proposal: Proposal
    build: BuildSettings
    usual_context: int
    tune_said: bool
    limits_known: bool

    def choices(self) -> tuple[Choice, ...]:
        p, build = self.proposal, self.build
        return (
            Choice("max_context", p.context, self.usual_context, _by(build.max_context), self._context()),
            Choice("max_batch", *self._batch()),
            Choice("tune_rows", build.tune_rows or str(p.rows), str(USUAL_ROWS), _by(build.tune_rows), self._rows()),
            self._tuning(),
        )

    def _context(self) -> str:
        p, needed = self.proposal, self.proposal.lengths["needed"]
        said = f"of {p.n:,} requests half need {needed['p50']:,} tokens, 99 % {needed['p99']:,}, one {p.longest:,}"
        if p.n_unfit:
            said += f"; {p.n_unfit:,} ({percent(p.n_unfit / p.n)}) would not fit"
            if self.build.max_context is None:
                by_model = p.context == self.asked.model_context
                said += ": the model was made for no more" if by_model else f" (--traffic-covers {self.asked.covers:g})"
        else:
            said += f"; all fit, and 19 times of 20 so will {p.sure:.4g} % of others like them"
        return said + ("" if self.limits_known else "; what max_tokens they asked for is not known")

    def _batch(self) -> tuple[int, int, str, str]:
        p, told = self.proposal, self.build.max_batch
        if p.batch is None:
            value = told or DEFAULT_BATCH
            return value, DEFAULT_BATCH, _by(told, "default"), "the recording does not say how long requests stayed"
        why = f"at {BUSY:g} % of the arrivals no more than {p.batch:,} ran, at most {p.peak:,}"
        late = f"{p.n_late:,} of {p.n:,} ({percent(p.n_late / p.n)})" if p.n_late else "none"
        why += f"; {late} would have waited, {percent(p.waited)} did for a tenth of their time"
        return told or p.batch, DEFAULT_BATCH, _by(told), why

    def _tuning(self) -> Choice:
        usual, n = BuildSettings().tune, self.proposal.rows.n_cases
        if self.tune_said or self.build.tune_rows is not None:
            source = "flag" if self.tune_said else "default"
            return Choice("tune", self.build.tune, usual, source, "for the kernels, about")
        why = f"as long a look at each of {n} kinds of steps as else at each of {USUAL_ROWS.n_cases}"
        return Choice("tune", round(usual * n / USUAL_ROWS.n_cases, 2), usual, "traffic", why)

    def _rows(self) -> str:
        if self.proposal.batch is None:
            return "answers as usual, for want of stays; prompts by what half and 90 % of them have to compute"
        return "answers at a time half, 90 and 99 % of the time; what half and 90 % of the prompts have to compute"


def _by(flag: object, otherwise: str = "traffic") -> str:
    return otherwise if flag is None else "flag"


def percent(share: float) -> str:
    """Not 100 % of less than all."""
    shown = f"{100 * share:.3g} %"
    return "almost 100 %" if share < 1 and shown == "100 %" else shown


def span(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
