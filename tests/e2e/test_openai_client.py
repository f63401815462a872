"""The `openai` client against the real engine: every endpoint, and numbers that another library confirms."""

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.live import MODEL, Live
from tests.support.shared import shared

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]
ONCE = "Once upon a time"
LONG: dict[str, Any] = {"model": MODEL, "extra_body": {"ignore_eos": True}}


def joined(stream: Any, n: int = 1) -> list[str]:
    """The text of each choice of a chat or completion stream."""
    texts = [""] * n
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
    return texts


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_stream_is_the_whole_answer(tiny_client: openai.OpenAI, n: int) -> None:
    ask: dict[str, Any] = {**LONG, "messages": HELLO, "max_tokens": 40, "seed": 4, "temperature": 1.0, "n": n}
    whole = tiny_client.chat.completions.create(**ask)
    texts = [c.message.content or "" for c in whole.choices]
    assert [c.index for c in whole.choices] == list(range(n)) and len(set(texts)) == n
    assert [c.finish_reason for c in whole.choices] == ["length"] * n
    events = list(tiny_client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert joined(events, n) == texts
    alike = {"prompt_tokens_details": None}  # the second of the two finds what the first has left
    assert events[-1].usage and whole.usage and events[-1].choices == []
    assert events[-1].usage.model_copy(update=alike) == whole.usage.model_copy(update=alike)
    assert whole.usage.completion_tokens == 40 * n
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 40 * n


def test_a_completion_stream_is_the_whole_answer(stories_client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**LONG, "prompt": [ONCE, "The dog"], "max_tokens": 50, "seed": 9, "n": 3}
    whole = stories_client.completions.create(**ask)
    assert joined(stories_client.completions.create(**ask, stream=True), 6) == [c.text for c in whole.choices]
    assert len({c.text for c in whole.choices}) == 6
    assert whole.usage and whole.usage.completion_tokens == 6 * 50


def test_choices_do_not_depend_on_how_many_there_are(stories_client: openai.OpenAI) -> None:
    one, three = (
        stories_client.completions.create(**LONG, prompt=ONCE, max_tokens=60, seed=2, n=n).choices for n in (1, 3)
    )
    assert three[0].text == one[0].text and len({c.text for c in three}) == 3


def test_a_seed_gives_the_same_answer_in_any_company(stories: Live, stories_client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = stories_client.completions.create(**LONG, prompt=ONCE, max_tokens=60, seed=seed, temperature=1.0)
        return str(answer.choices[0].text)

    alone = [ask(seed) for seed in range(4)]
    assert len(set(alone)) == 4
    prompts = ["A cat " * i for i in range(1, 20)]
    company = stories_client.completions.create(**LONG, prompt=prompts, max_tokens=200, stream=True)
    next(iter(company))  # 19 sequences for 16 places
    assert stories.stats().running + stories.stats().waiting >= 16
    assert [ask(seed) for seed in range(4)] == alone
    company.close()


def test_a_drawn_seed_can_be_asked_again(tiny_client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {**LONG, "messages": HELLO, "max_tokens": 30, "temperature": 1.5}
    first = tiny_client.chat.completions.create(**ask)
    again = tiny_client.chat.completions.create(**ask, seed=first.millrace["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_greedy_is_the_golden_story(stories_client: openai.OpenAI) -> None:
    golden = json.loads((shared("models/stories260K") / "golden.json").read_text())["text"]
    answer = stories_client.completions.create(**LONG, prompt=ONCE, temperature=0, max_tokens=120, echo=True)
    assert golden.startswith(answer.choices[0].text) and len(answer.choices[0].text) > 200


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_exactly(stories_client: openai.OpenAI, stream: bool) -> None:
    ask: dict[str, Any] = {**LONG, "prompt": ONCE, "temperature": 0, "max_tokens": 100}
    whole = stories_client.completions.create(**ask).choices[0].text
    for stop in (whole[30:37], whole[50:51], ". "):  # within and across tokens
        answer: Any = stories_client.completions.create(**ask, stop=["never to be seen", stop], stream=stream)
        text = joined(answer)[0] if stream else answer.choices[0].text
        assert text == whole[: whole.index(stop)]


def test_stops_are_told(stories_client: openai.OpenAI) -> None:
    answer = stories_client.completions.create(**LONG, prompt=ONCE, temperature=0, max_tokens=100, stop=", there")
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and choice.stop_reason == ", there"
    assert choice.text == "" and answer.usage and answer.usage.completion_tokens < 10


def reference_logprobs(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(len(ids), vocabulary): of the token after each, by transformers in float64."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(shared("models/stories260K"), dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy().astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_the_models(stories: Live, stories_client: openai.OpenAI, temperature: float) -> None:
    """Of the model itself, before temperature and filters, within 1e-4 of transformers in float64."""
    answer = stories_client.completions.create(
        **LONG, prompt=ONCE, max_tokens=40, seed=3, temperature=temperature, logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    tokenizer = stories.opened.tokenizer
    prompt = tokenizer.encode(ONCE)
    ids = prompt + tokens_of(stories, answer.choices[0].text)
    reference = reference_logprobs(ids)[len(prompt) - 1 : -1]
    assert len(reference) == 40
    chosen = reference[np.arange(40), ids[len(prompt) :]]
    np.testing.assert_allclose(logprobs.token_logprobs, chosen, atol=1e-4)
    for given, row in zip(logprobs.top_logprobs, reference, strict=True):
        np.testing.assert_allclose(sorted(given.values())[-5:], np.sort(row)[-5:], atol=1e-4)


def tokens_of(server: Live, text: str) -> list[int]:
    """The drawn tokens, from the text: asked of /tokenize without what encoding puts in front."""
    with_space = server.post("/tokenize", {"prompt": ONCE + text}).json()["tokens"]
    return list(with_space[len(server.opened.tokenizer.encode(ONCE)) :])


def test_chat_logprobs_are_the_texts(tiny_client: openai.OpenAI) -> None:
    answer = tiny_client.chat.completions.create(
        **LONG, messages=HELLO, max_tokens=20, seed=1, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content and len(logprobs.content) == 20
    text = b"".join(bytes(t.bytes or []) for t in logprobs.content).decode("utf-8", "replace")
    assert text.strip() == (answer.choices[0].message.content or "").strip()
    for token in logprobs.content:
        values = [t.logprob for t in token.top_logprobs]
        assert values == sorted(values, reverse=True) and token.logprob <= values[0] <= 0


def test_logit_bias_decides(stories: Live, stories_client: openai.OpenAI) -> None:
    token = stories.opened.tokenizer.encode("z", add_special_tokens=False)[-1]
    for temperature in (0.0, 1.0):
        answer = stories_client.completions.create(
            **LONG, prompt=ONCE, max_tokens=8, logit_bias={str(token): 100}, temperature=temperature
        )
        assert answer.choices[0].text == "z" * 8
    plain = stories_client.completions.create(**LONG, prompt=ONCE, max_tokens=1, temperature=0)
    first = stories.post("/tokenize", {"prompt": ONCE + plain.choices[0].text}).json()["tokens"][-1]
    banned = stories_client.completions.create(
        **LONG, prompt=ONCE, max_tokens=1, temperature=0, logit_bias={str(first): -100}
    )
    assert banned.choices[0].text != plain.choices[0].text


def test_unset_max_tokens_is_16_for_a_text(stories_client: openai.OpenAI) -> None:
    """As OpenAI and vLLM have it; a longer answer is that of the same seed, gone on."""
    answer = stories_client.completions.create(**LONG, prompt=ONCE, seed=1)
    assert answer.usage and answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"
    more = stories_client.completions.create(**LONG, prompt=ONCE, seed=1, max_tokens=40)
    assert more.choices[0].text.startswith(answer.choices[0].text)


def test_end_of_text_ends_a_chat(tiny_client: openai.OpenAI, tiny: Live) -> None:
    """Biased towards the model's own end-of-text token, which is no part of the text."""
    eos = min(tiny.opened.engine.manifest.eos_token_ids)
    answer = tiny_client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=9, temperature=0, logit_bias={str(eos): 100}
    )
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == ""
    assert answer.usage and answer.usage.completion_tokens == 1


def test_models_and_management(tiny: Live, tiny_client: openai.OpenAI) -> None:
    assert [m.id for m in tiny_client.models.list()] == [MODEL]
    assert tiny_client.models.retrieve(MODEL).max_model_len == 2048  # type: ignore[attr-defined]
    for path in ("/health", "/v1/health/live", "/v1/health/ready", "/v1/version", "/v1/metadata", "/docs"):
        assert httpx.get(tiny.url + path).status_code == 200, path


def test_errors_are_the_clients(tiny_client: openai.OpenAI, stories_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        tiny_client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature is 1000") as bad:
        tiny_client.chat.completions.create(model=MODEL, messages=HELLO, temperature=1000)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as long:
        tiny_client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "mill " * 5000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        stories_client.chat.completions.create(model=MODEL, messages=HELLO)
    function: Any = {"role": "function", "name": "f", "content": "x"}
    with pytest.raises(openai.BadRequestError, match="tool is the role today"):
        tiny_client.chat.completions.create(model=MODEL, messages=[function])


def test_without_max_tokens_each_text_gets_sixteen_tokens_or_what_is_left(stories: Live) -> None:
    """A long prompt beside it does not shorten the answer of a short one."""
    context = stories.engine.limits.max_context
    body = {"prompt": [[5] * (context - 3), [5, 6]], "ignore_eos": True, "seed": 1}
    answer = stories.post("/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 3 + 16
    assert [c["finish_reason"] for c in answer["choices"]] == ["length", "length"]
