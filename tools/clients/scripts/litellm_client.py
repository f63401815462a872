"""LiteLLM, through its routes for OpenAI-like servers and for hosted vLLM."""

import asyncio

import litellm
from report import BASE, MODEL, check

HELLO = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"messages": HELLO, "max_tokens": 12, "api_base": BASE, "api_key": "none"}


@check("chat as openai/")
def _() -> None:
    assert litellm.completion(model=f"openai/{MODEL}", **ASK).choices[0].message.content


@check("chat as hosted_vllm/")
def _() -> None:
    assert litellm.completion(model=f"hosted_vllm/{MODEL}", **ASK).choices[0].message.content


@check("stream")
def _() -> None:
    parts = litellm.completion(model=f"openai/{MODEL}", stream=True, **ASK)
    assert "".join(p.choices[0].delta.content or "" for p in parts)


@check("async stream")
def _() -> None:
    async def main() -> str:
        parts = await litellm.acompletion(model=f"openai/{MODEL}", stream=True, **ASK)
        return "".join([p.choices[0].delta.content or "" async for p in parts])

    assert asyncio.run(main())


@check("text completion")
def _() -> None:
    asked = {"prompt": "Paris is", "max_tokens": 8, "api_base": BASE, "api_key": "none"}
    assert litellm.text_completion(model=f"text-completion-openai/{MODEL}", **asked).choices[0].text


@check("a context that is too long has its own error")
def _() -> None:
    long = [{"role": "user", "content": "word " * 9000}]
    try:
        litellm.completion(model=f"openai/{MODEL}", **{**ASK, "messages": long})
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


@check("tools")
def _() -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    asked = {**ASK, "max_tokens": 100, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(model=f"openai/{MODEL}", **asked).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["now"]
