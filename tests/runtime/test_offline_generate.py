"""Whole answers: many prompts at once, in the caller's thread or the loop's own, and one growing answer."""

import asyncio
import time
from typing import cast

import pytest

from millrace.api.offline_generate import Progress, Prompt, astream, generate
from millrace.errors import RequestError
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from millrace.runtime.service import AsyncEngine
from tests.runtime.fakes import LIMITS, POISON, expected_choice, make_loop

PARAMS = SamplingParams(max_tokens=10, seed=5, ignore_eos=True)


@pytest.mark.parametrize("threaded", [False, True])
def test_answers_come_in_the_order_of_the_prompts(threaded: bool) -> None:
    loop = make_loop()
    if threaded:
        loop.start()
    prompts: list[Prompt] = ["abc", [1, 2, 3], {"prompt_token_ids": [4]}, {"prompt": "b"}]
    outputs = generate(loop, prompts, PARAMS)
    assert [o.prompt for o in outputs] == ["abc", None, None, "b"]
    assert [o.prompt_token_ids for o in outputs] == [[1, 2, 3], [1, 2, 3], [4], [2]]
    for output in outputs:
        assert output.finished and output.seed == 5
        assert output.outputs == [expected_choice(output.prompt_token_ids, PARAMS, 0, LIMITS)]
    loop.stop()


def test_params_may_be_one_for_each_prompt() -> None:
    each = [SamplingParams(max_tokens=n, seed=1, ignore_eos=True) for n in (1, 2, 3)]
    outputs = generate(make_loop(), [[1]] * 3, each)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"):
        generate(make_loop(), [[1]], each[:2])


def test_no_prompts_no_answers() -> None:
    assert generate(make_loop(), []) == []


def test_without_params_the_rest_of_the_context_is_used() -> None:
    (output,) = generate(make_loop(), [[1, 2, 3]])
    n = len(output.outputs[0].token_ids)
    assert n <= 125 and (output.outputs[0].finish_reason is FinishReason.STOP or n == 125)


def test_progress_is_told() -> None:
    seen: list[Progress] = []
    generate(make_loop(), [[1], [2]], PARAMS, seen.append)
    assert seen[-1] == Progress(n_finished=2, n_requests=2, n_output_tokens=20)
    assert seen == sorted(seen)


def test_a_wrong_prompt_leaves_nothing_behind() -> None:
    loop = make_loop()
    with pytest.raises(RequestError):
        generate(loop, [[1], []], PARAMS)
    assert loop.stats().idle and loop.stats().finished_total[FinishReason.ABORT] == 1


def test_an_interrupted_caller_leaves_nothing_behind() -> None:
    loop = make_loop()

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(loop, [[1], [2]], PARAMS, interrupt)
    assert loop.stats().idle and loop.stats().pages_used == 0


def test_a_failed_request_is_reported_beside_the_others() -> None:
    bad, good = generate(make_loop(), [[POISON], [1]], PARAMS)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR and bad.outputs[0].error and bad.finished
    assert good.outputs[0].finish_reason is FinishReason.LENGTH


def test_log_probabilities_are_summed() -> None:
    params = SamplingParams(max_tokens=3, seed=5, ignore_eos=True, logprobs=1)
    choice = generate(make_loop(), [[1]], params)[0].outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == 3
    assert choice.cumulative_logprob == pytest.approx(sum(-t / 8 for t in choice.token_ids))


@pytest.mark.parametrize("prompt", [5, None, {"prompt": [1]}, {"prompt_token_ids": "a"}, {"text": "a"}, {}])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(RequestError) as error:
        generate(make_loop(), [cast(Prompt, prompt)], PARAMS)
    assert error.value.param == "prompt"


def test_a_growing_answer() -> None:
    async def main() -> None:
        async with AsyncEngine(make_loop(before_run=lambda step: time.sleep(0.001))) as engine:
            texts = []
            async for output in astream(engine.loop, "abc", PARAMS):
                texts.append(output.outputs[0].text)
            assert output.finished and output.prompt == "abc" and texts == sorted(texts, key=len)
            assert output.outputs == [expected_choice([1, 2, 3], PARAMS, 0, LIMITS)]

            leaving = astream(engine.loop, "abc", SamplingParams(max_tokens=100, ignore_eos=True))
            await anext(leaving)
            await leaving.aclose()  # type: ignore[attr-defined]  # it is a generator
            for _ in range(1000):
                if engine.stats().running == 0:
                    break
                await asyncio.sleep(0.01)
            assert engine.stats().finished_total[FinishReason.ABORT] == 1

    asyncio.run(main())


def test_one_loop_serves_streams_and_lists_in_turn() -> None:
    loop = make_loop()

    async def stream() -> str:
        async with AsyncEngine(loop) as engine:
            return [output async for output in astream(engine.loop, "abc", PARAMS)][-1].outputs[0].text

    texts = [asyncio.run(stream()), generate(loop, ["abc"], PARAMS)[0].outputs[0].text, asyncio.run(stream())]
    assert len(set(texts)) == 1
