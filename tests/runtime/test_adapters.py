"""Requests with adapters: each gets the answer that it gets alone, and no page of another adapter's."""

import random

import pytest

from millrace.errors import RequestError
from millrace.runtime.request.request import RequestOptions
from millrace.runtime.request.sampling_params import Delta, SamplingParams
from tests.runtime.fakes import VOCAB, RandomBudget, limits, make_loop

N_ADAPTERS = 3


@pytest.mark.parametrize("seed", range(10))
def test_answers_are_those_of_requests_that_are_alone(seed: int) -> None:
    """Prompts that begin alike under all adapters, few pages, chunks of any size."""
    draw = random.Random(seed)
    shared = [draw.randrange(1, VOCAB - 1) for _ in range(20)]
    asked = [
        (
            shared[: draw.randrange(1, 20)] + [draw.randrange(1, VOCAB - 1) for _ in range(draw.randrange(5))],
            SamplingParams(max_tokens=draw.randrange(1, 12), seed=draw.randrange(9), temperature=draw.choice((0, 1))),
            draw.randrange(N_ADAPTERS + 1),
        )
        for _ in range(16)
    ]
    of = limits(n_adapters=N_ADAPTERS, n_pages=draw.choice((24, 64)))
    loop = make_loop(of, budget=RandomBudget(of.max_step_tokens, draw))
    found: list[list[Delta]] = [[] for _ in asked]
    for (prompt, params, adapter), deltas in zip(asked, found, strict=True):
        loop.submit(prompt, params, deltas.extend, options=RequestOptions(adapter=adapter))
        if draw.random() < 0.5:
            loop.step()
    while loop.step():
        pass
    for (prompt, params, adapter), deltas in zip(asked, found, strict=True):
        alone = list[Delta]()
        plain = make_loop(limits(n_adapters=N_ADAPTERS))
        plain.submit(prompt, params, alone.extend, options=RequestOptions(adapter=adapter))
        while plain.step():
            pass
        assert tokens(deltas) == tokens(alone)


def tokens(deltas: list[Delta]) -> list[int]:
    return [t for d in deltas for t in d.token_ids]


def test_an_adapter_changes_answers_and_shares_no_pages() -> None:
    loop = make_loop(limits(n_adapters=N_ADAPTERS))
    answers, cached = list[tuple[int, ...]](), list[int]()
    for adapter in (0, 1, 2, 1, 0):
        deltas = list[Delta]()
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        request = loop.submit(list(range(1, 21)), params, deltas.extend, options=RequestOptions(adapter=adapter))
        while loop.step():
            pass
        answers.append(tuple(tokens(deltas)))
        cached.append(request.n_cached)
    assert len(set(answers)) == 3 and answers[:2] == answers[4:2:-1]
    assert cached == [0, 0, 0, 19, 19]


@pytest.mark.parametrize(("n", "number", "expected"), [
    (0, 1, "no adapters"), (N_ADAPTERS, N_ADAPTERS + 1, "0 (none) to 3"), (N_ADAPTERS, -1, "0 (none) to 3"),
])  # fmt: skip
def test_an_adapter_that_is_not_there(n: int, number: int, expected: str) -> None:
    loop = make_loop(limits(n_adapters=n))
    with pytest.raises(RequestError) as refused:
        loop.submit([1, 2], SamplingParams(), lambda deltas: None, options=RequestOptions(adapter=number))
    assert f"adapter {number}" in str(refused.value) and expected in str(refused.value)
    assert not loop.step(), "nothing was queued"
