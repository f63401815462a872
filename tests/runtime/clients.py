"""Clients of an engine loop that is stepped by hand, random schedules of them, and what their requests cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from millrace.api.offline_generate import Collector, CompletionOutput, new_output
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.sampling_params import Delta, FinishReason, SamplingParams
from tests.runtime.fakes import FakeTokenizer, limits, make_loop

PAGE = 4
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)


class Client:
    """Submits to a loop and collects what comes."""

    def __init__(self, loop: EngineLoop, prompt: list[int], params: SamplingParams = GREEDY) -> None:
        self.deltas: list[Delta] = []
        self.prompt, self.params = prompt, params
        asked = params.structured_outputs
        matchers = loop.grammars.matchers(asked, params.n) if asked else ()
        self.request = loop.submit(prompt, params, self.deltas.extend, matchers=matchers)

    @property
    def outputs(self) -> list[CompletionOutput]:
        collector = Collector(new_output(self.request), FakeTokenizer())
        collector.add(self.deltas)
        return collector.output.outputs

    @property
    def reasons(self) -> list[FinishReason]:
        return [delta.finish_reason for delta in self.deltas if delta.finish_reason is not None]


def run_all(loop: EngineLoop) -> None:
    while loop.step():
        pass


def answered(loop: EngineLoop, prompt: list[int], params: SamplingParams = GREEDY) -> Client:
    client = Client(loop, prompt, params)
    run_all(loop)
    return client


def computed(loop: EngineLoop, prompt: list[int], params: SamplingParams = GREEDY) -> int:
    """Tokens that the executor computes for this request alone."""
    before = loop.stats().step_tokens_total
    answered(loop, prompt, params)
    return loop.stats().step_tokens_total - before


def solo(prompt: list[int], params: SamplingParams) -> list[CompletionOutput]:
    loop = make_loop(limits(page_tokens=PAGE), prefix_cache=False)
    return answered(loop, prompt, params).outputs


@dataclass(frozen=True)
class Asked:
    """One request of a schedule. parts: what its prompt is put together from; step: when it comes"""

    parts: tuple[int, ...]
    extra: int
    n: int
    max_tokens: int
    prompt_logprobs: int | None
    step: int
    cancelled: int | None  # so many steps later

    @property
    def prompt(self) -> list[int]:
        """Of few parts, so that prompts begin alike, page by page and across them; a part has 6 tokens, a page 4."""
        parts = [t for part in self.parts for t in range(10 * part + 1, 10 * part + 7)]
        return parts + [90 + self.extra] * self.extra

    def params(self, seed: int) -> SamplingParams:
        return SamplingParams(
            n=self.n, max_tokens=self.max_tokens, ignore_eos=True, seed=seed % 3, temperature=seed % 2,
            prompt_logprobs=self.prompt_logprobs, presence_penalty=0.5 * (seed % 2),
        )  # fmt: skip


ASKED = st.builds(
    Asked,
    parts=st.lists(st.integers(0, 2), min_size=0, max_size=5).map(tuple),
    extra=st.integers(1, 5),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    max_tokens=st.integers(1, 16),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
    step=st.integers(0, 40),
    cancelled=st.sampled_from([None, None, None, 0, 1, 3, 8]),
)


def solo_answers(loop: EngineLoop, schedule: Sequence[Asked]) -> list[Client]:
    """Run the schedule to its end; check that each client has the answer that it gets alone, or its beginning."""
    clients: dict[int, Client] = {}
    for step in range(60):
        for i, asked in enumerate(schedule):
            if asked.step == step:
                clients[i] = Client(loop, asked.prompt, asked.params(i))
            if asked.cancelled is not None and asked.step + asked.cancelled == step:
                loop.cancel(clients[i].request)
        loop.step()
    run_all(loop)
    for i, client in clients.items():
        for got, want in zip(client.outputs, solo(client.prompt, client.params), strict=True):
            if got.finish_reason is FinishReason.ABORT:
                assert want.token_ids[: len(got.token_ids)] == got.token_ids and schedule[i].cancelled is not None
            else:
                assert got == want
    stats = loop.stats()
    assert stats.pages_used == 0 and stats.idle
    return list(clients.values())
