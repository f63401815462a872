"""Load of the server during a run, from its /metrics: running, waiting, KV cache, preemptions.

Metric names are vLLM's, which Millrace uses, too. If there are several models, labels select the one under test.
"""

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.run.run import Run

EVERY_S, MAX_SAMPLES, PATH = 0.25, 100_000, "/metrics"
NOTHING = "The server tells nothing of its load: it has no /metrics with vLLM's names."
_RUNNING, _WAITING, _PREEMPTED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total"
_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the second in older vLLM
_LINE = re.compile(
    rf"^({'|'.join(map(re.escape, (_RUNNING, _WAITING, _PREEMPTED, *_KV)))})(?:\{{([^}}\n]*)\}})? (\S+)", re.MULTILINE
)
_LABEL = re.compile(r'model_name="([^"]*)"')
FULL, QUEUE = 0.9, 0.5  # KV-cache usage that counts as full; mean waiting requests that count as a queue


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of the metrics. kv: share of the KV cache in use; None: not reported"""

    at_s: float
    running: float
    waiting: float
    kv: float | None = None
    preemptions: float | None = None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Means and maxima of a run, and its preemptions."""

    n_samples: int
    running: float
    max_running: float
    waiting: float
    max_waiting: float
    kv: float | None
    preemptions: int | None

    @property
    def description(self) -> str:
        """Describe what limited the server, with the figures."""
        kv = (
            "how full its KV cache was it does not tell"
            if self.kv is None
            else f"its KV cache was {self.kv:.0%} full at most"
        )
        kv += f", with {self.preemptions} preemptions" if self.preemptions else ""
        figures = (
            f"{self.running:.1f} requests ran in the mean, {self.max_running:.0f} at most, "
            f"and {self.waiting:.1f} waited; {kv}."
        )
        if self.preemptions or (self.waiting >= QUEUE and self.kv is not None and self.kv >= FULL):
            return f"The KV cache limits it: {figures}"
        if self.waiting >= QUEUE:
            return f"Requests wait for a place, or for their prompts' turn: {figures}"
        return f"Computing limits it, {'next to ' * (self.waiting >= 0.05)}nothing waits: {figures}"


def read_metrics(text: str, model: str, at_s: float) -> Sample | None:
    """Parse /metrics; None if running or waiting requests are missing."""
    by_name: dict[str, list[tuple[str | None, float]]] = {}
    for name, labels, value in _LINE.findall(text):
        label = _LABEL.search(labels)
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            by_name.setdefault(name, []).append((label[1] if label else None, number))

    def values_of(name: str) -> list[float]:
        values = by_name.get(name, [])
        return [v for label, v in values if label == model] or [v for _, v in values]

    if _RUNNING not in by_name or _WAITING not in by_name:
        return None
    kv = next((max(values_of(name)) for name in _KV if name in by_name), None)
    preempted = sum(values_of(_PREEMPTED)) if _PREEMPTED in by_name else None
    return Sample(at_s, sum(values_of(_RUNNING)), sum(values_of(_WAITING)), kv, preempted)


class Watch:
    """Samples the server's metrics over its own connection: `async with Watch(target) as watch:`."""

    def __init__(self, target: BenchTarget) -> None:
        self._client, self._model, self._samples = Client(target), target.model, list[Sample]()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Watch":
        self._task = asyncio.get_running_loop().create_task(self._look())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._client.__aexit__(kind, error, trace)

    async def _look(self) -> None:
        """Sample periodically; stop if the first sample has no data."""
        while len(self._samples) < MAX_SAMPLES:
            begin_s = time.perf_counter()
            answer = await self._client.get(PATH, 10 * EVERY_S)
            sample = read_metrics(answer.text, self._model, answer.sent_s) if answer.failure is None else None
            if sample is None and not self._samples:
                return
            if sample is not None:
                self._samples.append(sample)
            took_s = time.perf_counter() - begin_s
            await asyncio.sleep(max(EVERY_S, min(10 * took_s, 10 * EVERY_S)))  # at most a tenth of the time, if fast

    def during(self, run: Run) -> ServerLoad | None:
        """Return the load during a run; None if there are no samples."""
        return server_load([s for s in self._samples if run.started_s <= s.at_s <= run.started_s + run.wall_s])


def server_load(samples: Sequence[Sample]) -> ServerLoad | None:
    if not samples:
        return None
    n = len(samples)
    kv = [s.kv for s in samples if s.kv is not None]
    preempted = [s.preemptions for s in samples if s.preemptions is not None]
    return ServerLoad(
        n, sum(s.running for s in samples) / n, max(s.running for s in samples), sum(s.waiting for s in samples) / n,
        max(s.waiting for s in samples), max(kv, default=None),
        max(0, round(preempted[-1] - preempted[0])) if preempted else None,
    )  # fmt: skip
