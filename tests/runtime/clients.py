"""Clients of an engine loop that is stepped by hand, and what their requests cost."""

from millrace.runtime.generate import Collector, CompletionOutput, new_output
from millrace.runtime.loop import EngineLoop
from millrace.runtime.params import Delta, FinishReason, SamplingParams
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
