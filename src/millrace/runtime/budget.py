"""How many prompt tokens may ride along in a step that others are waiting for.

The model of a step: `step_s + token_s * prefill tokens`. Both are fitted to measured steps, the first by those without
prefill, the second by those with. A chunk is as long as keeps the step within a limit on the gap between two tokens
of a running answer: so many plain steps, and never more than an absolute time. So whoever reads along sees gaps of at
most about twice the usual one, however long the prompts of others are. Promise 1 makes this free: no chunking changes
an answer.
"""

from dataclasses import dataclass

from millrace.errors import ConfigError

DEFAULT_GAP_LIMIT_S = 0.1
DEFAULT_STRETCH = (
    1.9  # plain steps that one with prefill may last: in a mix, the longest gap stays below two usual ones
)
DEFAULT_CHUNK_LOW = 4  # so that long prompts always go on; more could outlast the stretch where attention is deep
SMOOTHING = 0.2  # weight of the newest step
OUTLIER = 4.0  # one measurement moves a cost by at most this factor towards itself: a step may have been descheduled


@dataclass(slots=True)
class TokenBudget:
    """Chooses prefill chunks of `chunk_low` .. `max_step_tokens` tokens; ConfigError for a limit of 0 s or less."""

    max_step_tokens: int
    gap_limit_s: float = DEFAULT_GAP_LIMIT_S  # for a step that running answers wait for
    chunk_low: int = DEFAULT_CHUNK_LOW  # tokens; goes before both limits
    stretch: float = DEFAULT_STRETCH  # limit on a step with prefill, in plain steps; infinite: only the absolute one
    step_s: float | None = None  # fitted; None until measured
    token_s: float | None = None

    def __post_init__(self) -> None:
        if not self.gap_limit_s > 0:
            raise ConfigError(f"gap_limit_s is {self.gap_limit_s}", "a time above 0 s", "leave it at its default")
        if not self.stretch > 1:
            raise ConfigError(f"stretch is {self.stretch}", "more than 1 plain step", "leave it at its default")
        if self.chunk_low < 1:
            raise ConfigError(f"chunk_low is {self.chunk_low}", "at least 1 token", "leave it at its default")

    def prefill_tokens(self, n_decode: int) -> int:
        """Prompt tokens for a step with `n_decode` rows of running answers."""
        room = self.max_step_tokens - n_decode
        return min(room, self._chunk()) if n_decode else room  # nobody waits for a step without decode rows

    def observe(self, n_prefill: int, step_time_s: float) -> None:
        """Learn from a step that took `step_time_s` with `n_prefill` prompt tokens in it."""
        if n_prefill == 0:
            self.step_s = _moved(self.step_s, step_time_s, SMOOTHING)
        else:
            rest_s = max(0.0, step_time_s - (self.step_s or 0.0))
            weight = SMOOTHING * min(1.0, n_prefill / self.chunk_low)  # a short chunk says little about the slope
            self.token_s = _moved(self.token_s, rest_s / n_prefill, weight)

    def _chunk(self) -> int:
        if not self.token_s:
            return self.chunk_low  # unmeasured: careful
        plain_s = self.step_s or 0.0
        limit_s = min(self.gap_limit_s, self.stretch * plain_s) if plain_s else self.gap_limit_s
        fitting = int((limit_s - plain_s) / self.token_s)
        return max(self.chunk_low, min(fitting, self.max_step_tokens))


def _moved(old: float | None, sample: float, weight: float) -> float:
    if not old:
        return sample
    return old + weight * (min(sample, OUTLIER * old) - old)
