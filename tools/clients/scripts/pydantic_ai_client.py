"""Pydantic AI's agent."""

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
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
    with_tool = Agent(model, model_settings={"max_tokens": 12})

    @with_tool.tool_plain
    def now() -> str:
        return "noon"

    assert with_tool.run_sync("What time is it?").output


@check("an object by a tool")
def _() -> None:
    class City(BaseModel):
        name: str = Field(max_length=20)

    city = Agent(model, output_type=City, model_settings={"max_tokens": 100}).run_sync("Name a city.").output
    assert isinstance(city, City)
