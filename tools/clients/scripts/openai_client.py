"""OpenAI's own Python client: chats, streams, completions, log probabilities, errors, models."""

import asyncio

import openai
from report import BASE, MODEL, check

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
HELLO = [{"role": "user", "content": "What is the capital of France?"}]


@check("chat")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 16


@check("chat stream with usage")
def _() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) and chunks[-1].usage


@check("async chats side by side")
def _() -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=BASE, api_key="none") as many:
            asked = (many.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, seed=1) for _ in range(8))
            answers = await asyncio.gather(*asked)
        assert len({a.choices[0].message.content for a in answers}) == 1

    asyncio.run(main())


@check("completion with log probabilities")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt="Paris is", max_tokens=8, logprobs=3)
    assert len(answer.choices[0].logprobs.tokens) == 8


@check("completion without max_tokens has 16")
def _() -> None:
    answer = client.completions.create(model=MODEL, prompt="Paris is", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


@check("chat log probabilities")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs.content[0].top_logprobs


@check("reasoning_effort and verbosity are taken")
def _() -> None:
    client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, reasoning_effort="low", extra_body={"verbosity": "low"}
    )


@check("models")
def _() -> None:
    assert MODEL in [m.id for m in client.models.list()] and client.models.retrieve(MODEL).id == MODEL


@check("a wrong model is 404, a wrong field 400")
def _() -> None:
    for kind, asked in ((openai.NotFoundError, {"model": "none"}), (openai.BadRequestError, {"temperature": -1})):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 4, **asked})
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"{asked} was taken")


@check("tools")
def _() -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    client.chat.completions.create(model=MODEL, messages=HELLO, tools=[tool], tool_choice="auto", max_tokens=8)
    forced = {"type": "function", "function": {"name": "now"}}
    asked = {"model": MODEL, "messages": HELLO, "tools": [tool], "max_tokens": 100}
    message = client.chat.completions.create(**asked, tool_choice=forced).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "now" and call.function.arguments == "{}"
    talk = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    assert client.chat.completions.create(**{**asked, "messages": talk}, tool_choice="none").choices[0].message.content


@check("structured output")
def _() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    client.chat.completions.create(model=MODEL, messages=HELLO, response_format=form, max_tokens=8)


@check("responses")
def _() -> None:
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=16)
    assert client.responses.create(
        model=MODEL, input="Go on", previous_response_id=first.id, max_output_tokens=16
    ).output_text
    with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=16) as stream:
        *_, last = stream  # get_final_response() takes none that ends by its length
    assert last.type in ("response.completed", "response.incomplete") and last.response.output_text
    tool = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    called = client.responses.create(
        model=MODEL, input="What time is it?", tools=[tool], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=100,
    )  # fmt: skip
    assert [item.name for item in called.output] == ["now"]
