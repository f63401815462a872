"""OpenAI's Agents SDK, over chat completions."""

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from report import BASE, MODEL, check

set_tracing_disabled(True)
settings = ModelSettings(max_tokens=16)


def model() -> OpenAIChatCompletionsModel:
    """A new one for each event loop."""
    return OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key="none"))


@check("run")
def _() -> None:
    agent = Agent(name="a", instructions="Answer in a word.", model=model(), model_settings=settings)
    assert Runner.run_sync(agent, "What is the capital of France?").final_output


@check("stream")
def _() -> None:
    async def main() -> None:
        agent = Agent(name="a", instructions="Answer in a word.", model=model(), model_settings=settings)
        answer = Runner.run_streamed(agent, "What is the capital of France?")
        events = [event async for event in answer.stream_events()]
        assert events and answer.final_output

    asyncio.run(main())


@check("tools")
def _() -> None:
    @function_tool
    def now() -> str:
        """The time."""
        return "noon"

    Runner.run_sync(Agent(name="a", model=model(), tools=[now], model_settings=settings), "What time is it?")
