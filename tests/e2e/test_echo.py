"""What lm-eval reads of a prompt over HTTP is what `prompt_logprobs` says of it in Python, bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace import LLM, SamplingParams
from tests.e2e.live import MODEL, Live

PROMPTS = ["Once upon a time there was a little dog. " * 8, "The mill", "x y z " * 30, "Wheels"]


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echo_is_the_prompts_log_probabilities(max_tokens: int, tiny: Live, tiny_engine: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=max(max_tokens, 1), prompt_logprobs=2, logprobs=2)
    with LLM(str(tiny_engine)) as llm:
        wanted = [llm.generate(prompt, params)[0] for prompt in PROMPTS]  # each alone
    body = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    with ThreadPoolExecutor(len(PROMPTS)) as clients:  # all at once
        replies = list(clients.map(lambda prompt: tiny.post("/v1/completions", {**body, "prompt": prompt}), PROMPTS))
    for reply, want in zip(replies, wanted, strict=True):
        told, prompt = reply.json()["choices"][0]["logprobs"], want.prompt_logprobs
        assert prompt is not None and prompt[0] is None is told["token_logprobs"][0]
        shown = [*zip(prompt[1:], want.prompt_token_ids[1:], strict=True)]
        if max_tokens:
            answer = want.outputs[0]
            assert answer.logprobs is not None
            shown += zip(answer.logprobs, answer.token_ids, strict=True)
        exact = [alternatives[token].logprob for alternatives, token in shown if alternatives is not None]
        assert told["token_logprobs"][1:] == exact and len(exact) == len(shown)
