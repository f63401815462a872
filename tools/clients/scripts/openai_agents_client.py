"""OpenAI's Agents SDK, over chat completions and over responses."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from report import BASE, MODEL, check

set_tracing_disabled(True)
settings = ModelSettings(max_tokens=16)
patient = ModelSettings(max_tokens=1000, temperature=0)  # an answer that is cut off is an error over responses


def model() -> OpenAIChatCompletionsModel:
    """A new one for each event loop."""
    return OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key="none"))


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key="none"))


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


@check("run over responses")
def _() -> None:
    agent = Agent(name="a", instructions="Answer in a word.", model=responses_model(), model_settings=patient)
    assert Runner.run_sync(agent, "What is the capital of France?").final_output


@check("tools")
def _() -> None:
    @function_tool
    def now() -> str:
        """The time."""
        return "noon"

    forced = ModelSettings(max_tokens=1000, temperature=0, tool_choice="now", parallel_tool_calls=False)
    for of in (model(), responses_model()):
        agent = Agent(
            name="a", model=of, tools=[now], model_settings=forced, tool_use_behavior="stop_on_first_tool"
        )  # fmt: skip
        assert Runner.run_sync(agent, "What time is it?").final_output == "noon"
        agent = Agent(name="a", model=of, tools=[now], model_settings=forced)
        assert Runner.run_sync(agent, "What time is it?").final_output is not None, "what the model makes of it"
