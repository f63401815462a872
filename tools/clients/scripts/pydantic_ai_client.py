"""Pydantic AI's agent."""

import asyncio
from contextlib import suppress

from pydantic import BaseModel, Field
from pydantic_ai import Agent, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from report import BASE, MODEL, check

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
agent = Agent(model, system_prompt="Answer in a word.", model_settings={"max_tokens": 12})


@check("run")
def _() -> None:
    answer = agent.run_sync("What is the capital of France?")
    assert answer.output


@check("stream")
def _() -> None:
    async def main() -> str:
        async with agent.run_stream("What is the capital of France?") as answer:
            return "".join([part async for part in answer.stream_text(delta=True)])

    assert asyncio.run(main())


@check("history")
def _() -> None:
    first = agent.run_sync("Hello!")
    assert agent.run_sync("And again?", message_history=first.all_messages()).output


@check("tools")
def _() -> None:
    class Answer(BaseModel):
        text: str = Field(max_length=20)

    called, answers = [], []
    with_tool = Agent(model, output_type=Answer)  # so that some function must be called, this one or the answer's

    @with_tool.tool_plain
    def now() -> str:
        called.append("now")
        return "noon"

    for seed in range(16):  # a small model may take either
        settings = {"max_tokens": 100, "temperature": 1.0, "seed": seed}
        with suppress(UsageLimitExceeded):  # it asks for the time again and again
            limits = UsageLimits(request_limit=2)
            answers.append(with_tool.run_sync("What time is it?", model_settings=settings, usage_limits=limits).output)
    assert called and answers and all(isinstance(answer, Answer) for answer in answers)


@check("an object by a tool")
def _() -> None:
    class City(BaseModel):
        name: str = Field(max_length=20)

    city = Agent(model, output_type=City, model_settings={"max_tokens": 100}).run_sync("Name a city.").output
    assert isinstance(city, City)
