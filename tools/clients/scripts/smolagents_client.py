"""smolagents' OpenAI model, alone and in an agent that writes code."""

from report import BASE, MODEL, check
from smolagents import ChatMessage, MessageRole, OpenAIServerModel, Tool, ToolCallingAgent

model = OpenAIServerModel(model_id=MODEL, api_base=BASE, api_key="none", max_tokens=24)
HELLO = [ChatMessage(role=MessageRole.USER, content="What is the capital of France?")]


@check("generate")
def _() -> None:
    assert model.generate(HELLO).content


@check("parts as content")
def _() -> None:
    parts = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "Hello!"}])]
    assert model.generate(parts).content


@check("stream")
def _() -> None:
    assert "".join(delta.content or "" for delta in model.generate_stream(HELLO))


@check("stop sequences")
def _() -> None:
    assert "France" not in (model.generate(HELLO, stop_sequences=["France"]).content or "")


@check("tools")
def _() -> None:
    class Now(Tool):
        name, description, inputs, output_type = "now", "The time.", {}, "string"

        def forward(self) -> str:
            return "noon"

    patient = OpenAIServerModel(model_id=MODEL, api_base=BASE, api_key="none", max_tokens=200)
    message = patient.generate(HELLO, tools_to_call_from=[Now()])
    assert message.tool_calls and message.tool_calls[0].function.name == "now"
    agent = ToolCallingAgent(tools=[Now()], model=patient, max_steps=1, verbosity_level=0)
    steps = [step for step in agent.run("What time is it?", stream=True) if getattr(step, "tool_calls", None)]
    assert steps, "no tool was called"
