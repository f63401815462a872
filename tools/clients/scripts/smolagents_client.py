"""smolagents' OpenAI model, alone and in an agent that writes code."""

from report import BASE, MODEL, check
from smolagents import ChatMessage, MessageRole, OpenAIServerModel, ToolCallingAgent

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
    agent = ToolCallingAgent(tools=[], model=model, max_steps=1, verbosity_level=0)
    steps = list(agent.run("What is 1 + 1?", stream=True))
    failed = [s.error for s in steps if getattr(s, "error", None)]
    assert not failed, failed[0]
