"""Prompts of embedding rows: the answers of the tokens they stand for, in any company, and no page of other rows."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.api.offline_generate import Prompt, generate
from millrace.checkpoint.tokenizer.tokenizer import Detokenizer
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.executor import ExecutorLimits
from millrace.errors import RequestError
from millrace.runtime.request.prompt_embeds import Rows, to_rows
from millrace.runtime.request.sampling_params import SamplingParams
from tests.runtime.fakes import VOCAB, limits, make_loop
from tests.support.checkpoints import random_checkpoint

WIDTH = 3


def rows(tokens: list[int]) -> Rows:
    """Whose first numbers are the tokens, as the fake executor reads them."""
    found = np.random.default_rng(sum(tokens)).standard_normal((len(tokens), WIDTH)).astype(np.float32)
    found[:, 0] = tokens
    return found


def of(**changes: Any) -> ExecutorLimits:
    return limits(embedding_width=WIDTH, **changes)


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_those_of_the_tokens(seed: int) -> None:
    """Tokens and rows mixed, prompts that begin alike, few pages, steps of few tokens."""
    draw = random.Random(seed)
    shared = [draw.randrange(1, VOCAB - 1) for _ in range(20)]
    prompts = [shared[: draw.randrange(1, 20)] + [draw.randrange(1, VOCAB - 1) for _ in range(5)] for _ in range(12)]
    each = [
        SamplingParams(
            max_tokens=12, seed=draw.randrange(99), temperature=draw.choice((0, 1)), n=draw.choice((1, 2)),
            logprobs=draw.choice((None, 1)),
        )
        for _ in prompts
    ]  # fmt: skip
    plain = generate(make_loop(of()), prompts, each)
    loop = make_loop(of(n_pages=draw.choice((24, 64)), max_step_tokens=draw.choice((8, 32))))
    asked: list[Prompt] = [{"prompt_embeds": rows(p)} if draw.random() < 0.7 else p for p in prompts]
    found = generate(loop, asked, each)
    for output, expected in zip(found, plain, strict=True):  # texts may begin with half a character of the prompt
        for one, other in zip(output.outputs, expected.outputs, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert [o.prompt_token_ids == [] for o in found] == [isinstance(p, dict) for p in asked]


def test_equal_rows_are_found_and_others_are_not() -> None:
    loop = make_loop(of())
    params = SamplingParams(max_tokens=2, seed=1)
    tokens = list(range(1, 21))
    cached = []
    for given in (rows(tokens), rows(tokens), rows(tokens) + np.array([0, 1, 0], np.float32), tokens, tokens):
        prompt: Prompt = given if isinstance(given, list) else {"prompt_embeds": given}
        (output,) = generate(loop, [prompt], params)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 19, 0, 0, 19]


def test_penalties_count_the_answer_alone() -> None:
    """Rows are no tokens: of a prompt of rows nothing is known to have been said."""
    seen: list[list[int]] = []
    loop = make_loop(of(), before_run=lambda step: seen.append(step.history.tolist()))
    params = SamplingParams(max_tokens=8, seed=1, repetition_penalty=1.5, repeat_last_n=5, ignore_eos=True)
    (output,) = generate(loop, [{"prompt_embeds": rows([5, 6, 7, 8])}], params)
    answer = output.outputs[0].token_ids
    assert seen == [answer[max(0, i - 5) : i] for i in range(8)]


@pytest.mark.parametrize(("given", "why"), [
    (np.zeros((4, WIDTH + 1), np.float32), f"has rows of {WIDTH + 1} numbers\n  expected: rows of {WIDTH}"),
    (np.full((4, WIDTH), np.nan, np.float32), "not finite"),
    (np.zeros((129, WIDTH), np.float32), "context"),
    (np.zeros((0, WIDTH), np.float32), "is not a matrix"),
    (np.zeros(WIDTH, np.float32), "is not a matrix"),
    ([[1.0, 2.0], [1.0]], "is not a matrix"), ([["a"]], "is not a matrix"), ("a", "is not a matrix"),
    (None, "is not a matrix"),
])  # fmt: skip
def test_what_is_refused(given: Any, why: str) -> None:
    loop = make_loop(of())
    with pytest.raises(RequestError) as refused:
        generate(loop, [{"prompt_embeds": given}])
    assert why in str(refused.value)
    assert not loop.step(), "nothing was queued"


@pytest.mark.parametrize(("prompt", "params"), [
    ({"prompt_embeds": rows([1, 2]), "resume_token_id": [3]}, {}),
    ({"prompt_embeds": rows([1, 2])}, {"prompt_logprobs": 1}),
])  # fmt: skip
def test_what_is_beside_rows_is_not_ignored(prompt: Any, params: dict[str, Any]) -> None:
    loop = make_loop(of())
    with pytest.raises(RequestError, match=r"resume_token_id|prompt_logprobs is set for a prompt of prompt_embeds"):
        generate(loop, [prompt], SamplingParams(**params))
    assert not loop.step(), "nothing was queued"


def test_the_text_is_no_first_one(tmp_path: Path) -> None:
    """SentencePiece's vocabularies drop the space of a text's first token: rows stand before it."""
    tokenizer = open_tokenizer(random_checkpoint(tmp_path / "mistral", "mistral"))
    ids = next([i] for i in range(5, 1000) if tokenizer.token_bytes(i) != tokenizer.token_bytes(i, first=True))
    assert Detokenizer(tokenizer, prompt=None).push(ids) == " " + Detokenizer(tokenizer).push(ids)


def test_an_engine_that_takes_none_says_so() -> None:
    with pytest.raises(RequestError, match="this engine takes token ids only"):
        generate(make_loop(limits()), [{"prompt_embeds": rows([1, 2])}])


def test_a_prompt_is_given_in_one_way() -> None:
    with pytest.raises(RequestError, match="a dict with"):
        generate(make_loop(of()), [{"prompt_embeds": rows([1]), "prompt": "a"}])


def test_tensors_and_lists_are_rows() -> None:
    torch = pytest.importorskip("torch")
    values = rows([1, 2, 3])
    for given in (
        values.tolist(),
        torch.from_numpy(values),
        torch.from_numpy(values).double(),
        values.astype(np.float64),
    ):
        np.testing.assert_array_equal(to_rows(given, of()), values)
    half = torch.from_numpy(values).bfloat16()
    np.testing.assert_array_equal(to_rows(half, of()), half.float().numpy())
