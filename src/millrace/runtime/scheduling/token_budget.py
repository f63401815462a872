"""The prefill budget: how many prompt tokens may join a step that running sequences wait for.

A step's time is modelled as `overhead_s + row_s * rows`, where rows are its prompt tokens and half of its decode rows:
one of these costs from nothing, if memory is the limit, to as much as a prompt token. A Kalman filter follows both
numbers, because they change while a server runs: other processes take the cores, contexts grow. A change of the
machine's pace moves both at once, so it does not change how long a chunk may be. Which of the two numbers explains a
step is learned slowly. If several prompts wait, longer chunks are tried while it is uncertain. After each half second
in which all steps had about as many rows, a longer chunk is tried. If a single prompt waits and its steps are clearly
longer than plain ones, a plain step is tried instead, which stretches no gap.

The budget balances three limits:

- A step with prompt tokens aims to last at most `stretch` steps without, and at most `gap_limit_s`.
- It costs at most 12 % of the throughput of the largest chunk by this model, which leaves room for its errors. A decode
  row in a step with few others misses the sequences whose prompts still wait: the more wait, the longer the chunk.
- Prompts get at least a third of the time of a step, however slow the machine is.

Answers do not depend on how prompts are cut into chunks (docs/architecture.md), so the budget is free to
choose.
"""

from dataclasses import dataclass, field
from math import exp, inf, log, sqrt

from millrace.errors import ConfigError

DEFAULT_GAP_LIMIT_S = 0.1
DEFAULT_STRETCH = 1.9  # plain steps that one with prefill may last: so the longest gap stays below two usual ones
DEFAULT_CHUNK_LOW = 4  # tokens, so that long prompts always go on
MAX_COST = 0.12  # share of the throughput of the largest chunk, by the model: what is measured stays below 0.15
FAIR_SHARE = 0.5  # a chunk takes at least this many plain steps, also where `gap_limit_s` would leave less
SMOOTHING = 0.2  # weight of the newest step in `step_s` and `chunk_s`
OUTLIER = 4.0  # one measurement moves the model by at most this factor: a step may have been descheduled

# Deviations of logarithms from one step to the next: of both numbers together, and of each. What interrupts a process
# mostly adds to the overhead, so a step with few rows that takes long is explained by that: the next chunk is longer
# then, and shows what a row takes.
_PACE_NOISE, _OVERHEAD_NOISE, _ROW_NOISE = 0.05, 0.1, 0.06
_NOISE_LOW, _NOISE_HIGH = 0.03, 0.5  # of a step's time from the model: followed as well, within these
_MIN_S = 1e-12  # of anything
_DOUBT = 0.2  # longer chunks are tried if the logarithm of their length has a deviation above this
_OPTIMISM = 3.0  # weight of the deviation above _DOUBT
_PROBE_S = 0.5  # a longer chunk is tried after steps of this duration with about as many rows
_NARROW = 3.0  # "about as many": the most rows are at most this many times the fewest
_PROBE = 6  # the longer chunk has this many times the rows
_CLEAR = 1.5  # times a plain step: steps with a chunk that last longer than this differ clearly from it
_MAX_VARIANCE = 1.0  # of either number
_FIRST_VARIANCES, _SOLVED_VARIANCES = (1.0, 0.25), (0.02, 0.02)  # after the first step, and the first that differs
_DECODE_ROW = 0.5  # prompt tokens that a decode row counts as
_FIRST_ROWS = 8  # before anything is known, the overhead of a step counts as this many rows


@dataclass(slots=True)
class StepTime:
    """The time of a step, `overhead_s + row_s * rows`, followed by an extended Kalman filter over the logarithms.

    Nothing is known before the first `observe` or `assume`.
    """

    overhead_s: float = 0.0
    row_s: float = 0.0
    _covariance: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the overhead's logarithm, of both, of the row's
    _noise: float = 0.3**2  # variance of the logarithm of a step's time, for a given model
    _first: tuple[float, float] | None = None  # rows and seconds of the first step, while the row's time is a guess
    probe_rows: float = 0.0  # if all steps had about as many rows for a while: what to try, to tell the numbers apart
    _range: tuple[float, float, float] = (inf, 0.0, 0.0)  # fewest and most rows since then, and seconds

    @property
    def is_known(self) -> bool:
        return self.row_s > 0

    def step_s(self, rows: float) -> float:
        """Return the predicted duration of a step with `rows` rows."""
        return self.overhead_s + self.row_s * rows

    def optimistic_row_s(self, rows: float) -> float:
        """Return a row's time, lower the less is known of how many rows take as long as a step of `rows`.

        Chunks that are short compared with the overhead tell nothing about it. So longer ones are tried while in doubt.
        """
        overhead_variance, covariance, row_variance = self._covariance
        difference = max(overhead_variance + row_variance - 2 * covariance, 0.0)
        deviation = self.overhead_s / self.step_s(rows) * sqrt(difference)
        return self.row_s * exp(-_OPTIMISM * max(deviation - _DOUBT, 0.0))

    def assume(self, overhead_s: float, row_s: float, variances: tuple[float, float]) -> None:
        """Start from given numbers. variances: of their logarithms"""
        self.overhead_s, self.row_s = max(overhead_s, _MIN_S), max(row_s, _MIN_S)
        self._covariance = (variances[0], 0.0, variances[1])

    def observe(self, rows: float, step_time_s: float) -> None:
        """Update the model with a step of `rows` rows that took `step_time_s`."""
        measured_s = max(step_time_s, _MIN_S)
        self._watch_range(rows, measured_s)
        if not self.is_known:
            row_s = measured_s / (rows + _FIRST_ROWS)
            self.assume(_FIRST_ROWS * row_s, row_s, _FIRST_VARIANCES)
            self._first = rows, measured_s
            return
        if self._first is not None and self._solve(rows, measured_s):
            return
        overhead_variance, covariance, row_variance = self._covariance
        overhead_variance = min(overhead_variance + _PACE_NOISE**2 + _OVERHEAD_NOISE**2, _MAX_VARIANCE)
        row_variance = min(row_variance + _PACE_NOISE**2 + _ROW_NOISE**2, _MAX_VARIANCE)
        limit = sqrt(overhead_variance * row_variance)
        covariance = min(max(covariance + _PACE_NOISE**2, -limit), limit)
        expected_s = self.step_s(rows)
        error = min(log(measured_s / expected_s), log(OUTLIER))
        share = self.overhead_s / expected_s  # of the overhead: the derivative by its logarithm
        with_overhead = overhead_variance * share + covariance * (1 - share)  # covariances with the step's time
        with_row = covariance * share + row_variance * (1 - share)
        doubt = with_overhead * share + with_row * (1 - share)
        self._noise += SMOOTHING / 2 * (min(max(error**2 - doubt, _NOISE_LOW**2), _NOISE_HIGH**2) - self._noise)
        # Whatever interrupts a process makes a step longer. One in less than half of the expected time is no accident.
        variance = doubt + (self._noise if error > -log(2) else _NOISE_LOW**2)
        overhead_gain, row_gain = with_overhead / variance, with_row / variance
        self.row_s = max(self.row_s * exp(row_gain * error), _MIN_S)
        self.overhead_s = max(self.overhead_s * exp(overhead_gain * error), self.row_s)  # no step is cheaper than that
        self._covariance = (
            max(overhead_variance - overhead_gain * with_overhead, 0.0),
            covariance - overhead_gain * with_row,
            max(row_variance - row_gain * with_row, 0.0),
        )

    def _solve(self, rows: float, measured_s: float) -> bool:
        """Set both numbers from the first two steps that differ by some rows. Return False if these two do not."""
        assert self._first is not None
        first_rows, first_s = self._first
        more_rows, more_s = rows - first_rows, measured_s - first_s
        if abs(more_rows) < _FIRST_ROWS / 2 or more_rows * more_s <= 0:
            return False
        row_s = more_s / more_rows
        self.assume(max(first_s - row_s * first_rows, row_s), row_s, _SOLVED_VARIANCES)
        self._first = None
        return True

    def _watch_range(self, rows: float, took_s: float) -> None:
        low, high, seconds = self._range
        self._range = low, high, seconds = min(low, rows), max(high, rows), seconds + took_s
        if high > _NARROW * low:
            self.probe_rows, self._range = 0.0, (inf, 0.0, 0.0)
        elif seconds > _PROBE_S:
            self.probe_rows = _PROBE * high


@dataclass(slots=True)
class TokenBudget:
    """How many prompt tokens may join a step.

    raises ConfigError for a limit of 0 s or less
    """

    max_step_tokens: int
    gap_limit_s: float = DEFAULT_GAP_LIMIT_S  # for a step that running sequences wait for
    chunk_low: int = DEFAULT_CHUNK_LOW  # tokens; goes before all limits
    stretch: float = DEFAULT_STRETCH  # limit on a step with prefill, in plain steps; infinite: only the absolute one
    step_s: float | None = None  # smoothed time of a step without prefill; None until measured
    chunk_s: float | None = None  # the same of steps with prefill
    token_s: float | None = None  # of a prompt token, where it is known beforehand
    model: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        if not self.gap_limit_s > 0:
            raise ConfigError(f"gap_limit_s is {self.gap_limit_s}", "a time above 0 s", "leave it at its default")
        if not self.stretch > 1:
            raise ConfigError(f"stretch is {self.stretch}", "more than 1 plain step", "leave it at its default")
        if self.chunk_low < 1:
            raise ConfigError(f"chunk_low is {self.chunk_low}", "at least 1 token", "leave it at its default")
        if self.step_s and self.token_s:
            self.model.assume(self.step_s - self.token_s, self.token_s, (0.01, 0.01))

    @classmethod
    def unhurried(cls, max_step_tokens: int) -> "TokenBudget":
        """Return a budget that never cuts prompts for the sake of running sequences, for batch work."""
        return cls(max_step_tokens, chunk_low=max_step_tokens)

    def prefill_tokens(self, n_decode: int, n_pending: int = 1) -> int:
        """Return the prompt tokens for a step with `n_decode` decode rows; 0 now and then, to measure a plain step.

        n_pending: sequences whose prompts are not computed yet, and that could run at the same time
        """
        room = self.max_step_tokens - n_decode
        return (
            min(room, self._chunk(n_decode, n_pending)) if n_decode else room
        )  # no running answer waits for this step

    def observe(self, n_prefill: int, step_time_s: float, n_decode: int = 0) -> None:
        """Learn from a step of `n_prefill` prompt tokens and `n_decode` decode rows that took `step_time_s`."""
        if n_prefill == 0:
            self.step_s = _smoothed(self.step_s, step_time_s)
        else:
            self.chunk_s = _smoothed(self.chunk_s, step_time_s)
        if self.chunk_low < self.max_step_tokens:  # else nothing depends on it
            self.model.observe(n_prefill + _DECODE_ROW * n_decode, step_time_s)

    def _chunk(self, n_decode: int, n_pending: int) -> int:
        if not self.model.is_known:
            return self.chunk_low
        rows, alone = _DECODE_ROW * n_decode, n_pending == 1
        plain_s = self.model.step_s(rows)
        row_s = self.model.row_s if alone else self.model.optimistic_row_s(rows)
        stretched = (self.stretch - 1) * plain_s / row_s
        within_gap = (self.gap_limit_s - plain_s) / row_s
        chunk = max(min(stretched, within_gap), min(FAIR_SHARE * plain_s / row_s, stretched))
        efficient = self._efficient_chunk(n_decode, n_pending)
        chunk = max(chunk, min(efficient, stretched) if alone else efficient)
        if (probe_rows := self.model.probe_rows) and alone and self._is_plain_telling(rows):
            return 0
        chunk = max(chunk, probe_rows - rows)
        return max(self.chunk_low, int(min(chunk, self.max_step_tokens)))

    def _is_plain_telling(self, rows: float) -> bool:
        """Return whether a plain step of `rows` would tell overhead and row apart, as a longer chunk would."""
        is_longer = self.step_s is not None and self.chunk_s is not None and self.chunk_s > _CLEAR * self.step_s
        return is_longer and rows * _NARROW < self.model.probe_rows / _PROBE

    def _efficient_chunk(self, n_decode: int, n_pending: int) -> float:
        """Return the shortest chunk whose step costs at most MAX_COST of the throughput of the largest chunk.

        With the largest chunk C, a prompt token costs `row_s + overhead_s / C`, and a decode row
        `row_s / 2 + overhead_s / N` with the N sequences that then decode together. A step of D decode rows and
        c prompt tokens may cost 1 / (1 - MAX_COST) times what its rows would cost so.
        """
        overhead_s, row_s, allowed = self.model.overhead_s, self.model.row_s, 1 / (1 - MAX_COST)
        together = n_decode + n_pending
        missing_s = overhead_s * (1 - allowed * n_decode / together)
        missing_s -= (allowed - 1) * n_decode * _DECODE_ROW * row_s
        return max(0.0, missing_s / ((allowed - 1) * row_s + allowed * overhead_s / self.max_step_tokens))


def _smoothed(old_s: float | None, new_s: float) -> float:
    old_s = old_s or new_s
    return old_s + SMOOTHING * (min(new_s, OUTLIER * old_s) - old_s)
