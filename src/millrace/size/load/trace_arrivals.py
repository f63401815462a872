"""Arrivals from recorded requests: Azure's and Mooncake's traces, and files of `millrace serve --record`."""

from dataclasses import dataclass

import numpy as np

from millrace.errors import ConfigError
from millrace.size.simulation.virtual_clock import Arrival
from millrace.tune.recorded_requests import Recording


@dataclass(frozen=True, slots=True)
class Replay:
    """How a trace is replayed. context: longer requests are dropped; speed: 2 replays twice as fast

    jitter_s: random spread of arrivals whose timestamps were rounded to such ticks
    """

    context: int
    speed: float = 1.0
    jitter_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.speed <= 1e4 and 0 <= self.jitter_s <= 3600 and 1 < self.context <= 1 << 24):
            raise ConfigError(
                f"a replay {self.speed:g} times as fast, spread over {self.jitter_s:g} s, of {self.context} tokens",
                "up to 10000 times, up to 3600 s, 2 tokens at least", "correct them",
            )  # fmt: skip


def arrivals(recording: Recording, replay: Replay) -> tuple[list[Arrival], int]:
    """Return arrivals in time order from 0, and how many requests were dropped because they are empty or too long."""
    n_input, n_output = recording.n_input, recording.answers
    fits = (n_input > 0) & (n_output > 0) & (n_input + n_output <= replay.context)
    spread_s = np.random.default_rng(replay.seed).uniform(0, replay.jitter_s, len(recording))
    at_s = recording.at_s - recording.at_s.min() + spread_s
    cuts = np.searchsorted(recording.block_of, np.arange(len(recording) + 1))
    blocks = recording.block_id
    requests = [
        Arrival(
            float(at_s[i]) / replay.speed, int(n_input[i]), int(n_output[i]),
            tuple(blocks[cuts[i] : cuts[i + 1]].tolist()),
        )
        for i in np.argsort(at_s, kind="stable").tolist()
        if fits[i]
    ]  # fmt: skip
    if not requests:
        raise ConfigError(
            "no request of the trace fits", f"at most {replay.context} tokens", "plan for a longer context"
        )
    return requests, int((~fits).sum())
