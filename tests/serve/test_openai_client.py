"""The real `openai` client against a real server: everything that it can ask for, and its answers' exact shapes."""

import json

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob

from tests.serve.support import MODEL, Running, post, tokenizer

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.openai, api_key="none needed", max_retries=0)


def test_a_chat_has_openais_shape(client: openai.OpenAI, server: Running) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=7)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant" and choice.logprobs is None
    prompt = tokenizer().encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", False)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.usage.total_tokens == len(prompt) + 12
    raw = post(server.url, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 12, "seed": 7}).json()
    assert raw["choices"][0]["message"] == {"role": "assistant", "content": choice.message.content, "refusal": None}
    assert raw["millrace"] == {"seed": 7}


def test_a_chat_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=30, seed=7, n=2)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=30,
            seed=7,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [c.delta.role for c in chunks[0].choices] == ["assistant"] * 2
    texts, finishes = ["", ""], [""] * 2
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id and chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or ""
    assert texts == [c.message.content for c in whole.choices] and finishes == ["length"] * 2
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 60


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3, stream=True))
    assert all(chunk.choices and "usage" not in chunk.model_fields_set for chunk in chunks)


def test_an_answer_can_be_asked_again_with_the_seed_that_was_told(client: openai.OpenAI) -> None:
    first = client.completions.create(model=MODEL, prompt="a", max_tokens=20)
    again, other = (
        client.completions.create(model=MODEL, prompt="a", max_tokens=20, seed=seed)
        for seed in (first.millrace["seed"], 12)  # type: ignore[attr-defined]
    )
    assert first.millrace["seed"] < 2**53  # type: ignore[attr-defined]  # exact in every client's numbers
    assert first.choices[0].text == again.choices[0].text != other.choices[0].text


def test_completions_take_all_four_kinds_of_prompts(client: openai.OpenAI) -> None:
    one, two = tokenizer().encode("the mill"), tokenizer().encode("wheel turns")
    texts = [
        [c.text for c in client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, seed=1, n=2).choices]
        for prompt in ("the mill", one, ["the mill", "wheel turns"], [one, two])
    ]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[2][:2] == texts[0] and len(texts[2]) == 4
    streamed = [""] * 4
    answer = client.completions.create(model=MODEL, prompt=[one, two], max_tokens=9, seed=1, n=2, stream=True)
    for event in answer:
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts[3]


def test_prompts_without_a_seed_get_one_each(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "a"], max_tokens=20)
    first, second = answer.millrace["seeds"]  # type: ignore[attr-defined]
    assert first != second and answer.choices[0].text != answer.choices[1].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["wheel turns", tokenizer().encode("wheel turns")])
def test_echo_begins_with_the_prompt(client: openai.OpenAI, prompt: str | list[int], stream: bool) -> None:
    plain = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, seed=1).choices[0].text
    asked = client.completions.create(model=MODEL, prompt=prompt, max_tokens=5, seed=1, echo=True, stream=stream)
    text = "".join(e.choices[0].text for e in asked) if stream else asked.choices[0].text  # type: ignore[union-attr]
    assert text == "wheel turns" + plain


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_with_logprobs_tells_those_of_the_prompt(client: openai.OpenAI, max_tokens: int) -> None:
    """As lm-eval asks for them: whole and streamed alike, for every choice of every prompt."""
    prompts = [tokenizer().encode("wheel turns and turns"), tokenizer().encode("mill")]
    asked = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "n": 2, "seed": 1, "echo": True}
    whole = client.completions.create(**asked, logprobs=2)  # type: ignore[call-overload]
    assert whole.usage.completion_tokens == 4 * max_tokens
    streamed: dict[int, list[list[object]]] = {i: [[], [], [], []] for i in range(4)}
    for event in client.completions.create(**asked, logprobs=2, stream=True):  # type: ignore[call-overload]
        for choice in event.choices:
            if (piece := choice.logprobs) is not None:
                parts = (piece.tokens, piece.token_logprobs, piece.top_logprobs, piece.text_offset)
                for kept, part in zip(streamed[choice.index], parts, strict=True):
                    kept += part
    for choice in whole.choices:
        told, prompt = choice.logprobs, prompts[choice.index // 2]
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(prompt) + max_tokens
        assert told.token_logprobs[0] is None is told.top_logprobs[0] and all(p <= 0 for p in told.token_logprobs[1:])
        pairs = zip(told.tokens, told.top_logprobs, strict=True)
        assert [top[token] for token, top in list(pairs)[1:]] == told.token_logprobs[1:]
        assert choice.text == "".join(told.tokens) and told.text_offset == [
            len("".join(told.tokens[:i])) for i in range(len(told.tokens))
        ]
        assert streamed[choice.index] == [told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset]
    without = client.completions.create(**{**asked, "echo": False, "max_tokens": 5}, logprobs=2)  # type: ignore[call-overload]
    if max_tokens:
        assert [c.logprobs.token_logprobs for c in without.choices] == [
            c.logprobs.token_logprobs[-5:] for c in whole.choices
        ]


def test_stop_strings_and_stop_tokens(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="a", max_tokens=30, seed=5).choices[0].text
    stop = whole[10:12]
    stopped = client.completions.create(model=MODEL, prompt="a", max_tokens=30, seed=5, stop=[stop]).choices[0]
    assert stopped.text == whole[: whole.index(stop)] and stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop  # type: ignore[attr-defined]
    token = tokenizer().encode(whole[4])[0]
    extra = {"stop_token_ids": [token], "include_stop_str_in_output": True}
    kept = client.completions.create(model=MODEL, prompt="a", max_tokens=30, seed=5, extra_body=extra).choices[0]
    assert kept.text == whole[: whole.index(whole[4]) + 1] and kept.stop_reason == token  # type: ignore[attr-defined]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "seed": 3, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2)  # type: ignore[call-overload]
    logprobs = whole.choices[0].logprobs.content
    assert len(logprobs) == 12 and whole.choices[0].logprobs.refusal is None
    assert b"".join(bytes(t.bytes) for t in logprobs).decode("utf-8", "replace") == whole.choices[0].message.content
    assert all(t.logprob <= 0 and [len(t.top_logprobs)] == [2] and t.top_logprobs[0].token == t.token for t in logprobs)
    streamed: list[ChatCompletionTokenLogprob] = []
    for chunk in client.chat.completions.create(**asked, top_logprobs=2, stream=True):  # type: ignore[call-overload]
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [t.model_dump() for t in streamed] == [t.model_dump() for t in logprobs]
    alone = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert all(t.top_logprobs == [] for t in alone.choices[0].logprobs.content)


@pytest.mark.parametrize("n_top", [0, 2])
def test_completion_logprobs(client: openai.OpenAI, n_top: int) -> None:
    whole = client.completions.create(model=MODEL, prompt="a", max_tokens=12, seed=3, logprobs=n_top)
    text, logprobs = whole.choices[0].text, whole.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == len(logprobs.text_offset) == 12
    for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token == "\ufffd" or text[at : at + len(token)] == token
    if n_top:
        assert logprobs.top_logprobs is not None
        assert all(
            len(top) in (2, 3) and t in top for top, t in zip(logprobs.top_logprobs, logprobs.tokens, strict=True)
        )
    else:
        assert logprobs.top_logprobs is None


def test_vllms_extras_and_harmless_fields_are_taken(client: openai.OpenAI) -> None:
    extra = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2,
        "include_stop_str_in_output": False, "skip_special_tokens": True, "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False}, "prompt_cache_key": "k", "tools": [],
        "stop_token_ids": [690],
        "guided_json": None,
    }  # fmt: skip
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
        safety_identifier="s", parallel_tool_calls=True, tool_choice="none", response_format={"type": "text"},
        modalities=["text"], presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"65": 5}, top_p=0.9,
        temperature=0.5, max_completion_tokens=4, extra_body=extra,
    )  # fmt: skip
    assert answer.choices[0].message.content == tokenizer().decode([65] * 4)  # the fake follows the largest bias
    prompt = tokenizer().encode("<|im_start|>user\nhello<|im_end|>\n", False)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)


def test_developer_is_the_template_s_system_and_parts_are_joined(server: Running) -> None:
    def count(role: str, content: object) -> int:
        body = {"messages": [{"role": role, "content": content}, *HELLO]}
        count: int = post(server.url, "/tokenize", body).json()["count"]
        return count

    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    assert count("developer", parts) == count("system", "be\nbrief")


def test_unset_max_tokens(client: openai.OpenAI) -> None:
    """16 for a text, or what is left; the rest of the context for a chat."""
    to_the_end = {"ignore_eos": True}
    for n_prompt, n_answer in ((1, 16), (496, 16), (500, 12), (511, 1)):
        text = client.completions.create(model=MODEL, prompt=[5] * n_prompt, seed=1, extra_body=to_the_end)
        assert text.usage is not None and text.usage.completion_tokens == n_answer
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, seed=1, extra_body=to_the_end)
    assert chat.usage is not None and chat.usage.total_tokens == 512


def test_usage_has_openais_details(client: openai.OpenAI) -> None:
    usage = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    assert 0 <= (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_event(server: Running, path: str) -> None:
    """guidellm counts by it."""
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "max_tokens": 9, "seed": 1, "n": 2, "ignore_eos": True, "stream": True, "stream_options": options}
    lines = post(server.url, path, body).text.splitlines()
    *events, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    seen: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        seen[event["choices"][0]["index"]].append(usage["completion_tokens"])
    assert all(counts == sorted(counts) and counts[-1] == 9 for counts in seen.values()), seen
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 18
    body["stream_options"] = {"include_usage": False, "continuous_usage_stats": True}  # as in vLLM: then none at all
    assert '"usage"' not in post(server.url, path, body).text


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL, "org/alias"]
    assert client.models.retrieve("org/alias").created == 1_700_000_000
    assert client.completions.create(model="org/alias", prompt="a", max_tokens=1).model == "org/alias"
    with pytest.raises(openai.NotFoundError, match='one of "fake", "org/alias"') as error:
        client.models.retrieve("gpt-9")
    assert error.value.code == "model_not_found"


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match='the model "other" does not exist'):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as long:
        client.completions.create(model=MODEL, prompt=[1] * 600, max_tokens=1)
    assert long.value.code == "context_length_exceeded"


def test_tokenize_and_detokenize(server: Running) -> None:
    text = "the river <|im_end|> 東京"
    for prefix in ("", "/v1"):
        reply = post(server.url, f"{prefix}/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert reply["tokens"] == tokenizer().encode(text) and reply["count"] == len(reply["tokens"])
        assert reply["max_model_len"] == 512 and len(reply["token_strs"]) == reply["count"]
        assert post(server.url, f"{prefix}/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": text}
    chat = post(server.url, "/tokenize", {"model": MODEL, "messages": HELLO, "add_generation_prompt": False}).json()
    assert chat["tokens"] == tokenizer().encode("<|im_start|>user\nhello<|im_end|>\n", False)


def test_a_failed_answer_is_a_500_or_an_error_event(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.completions.create(model=MODEL, prompt=[96, 1], max_tokens=5)
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model=MODEL, prompt=[96, 1], max_tokens=5, stream=True))
    assert client.completions.create(model=MODEL, prompt=[1, 96], max_tokens=5).usage  # others are untouched
