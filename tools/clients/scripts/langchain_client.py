"""LangChain's ChatOpenAI and OpenAI."""

from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from report import BASE, MODEL, check

chat = ChatOpenAI(model=MODEL, base_url=BASE, api_key="none", max_tokens=12)


@check("invoke")
def _() -> None:
    answer = chat.invoke("What is the capital of France?")
    assert answer.content and answer.usage_metadata["output_tokens"]


@check("stream")
def _() -> None:
    assert "".join(part.content for part in chat.stream("What is the capital of France?"))


@check("batch")
def _() -> None:
    assert all(a.content for a in chat.batch(["Hello!", "Good morning!", "How are you?"]))


@check("completions")
def _() -> None:
    assert OpenAI(model=MODEL, base_url=BASE, api_key="none", max_tokens=8).invoke("Paris is")


@check("tools")
def _() -> None:
    def add(a: Literal[1, 2, 3], b: Literal[1, 2, 3]) -> int:
        """The sum of two numbers."""
        return a + b

    patient = ChatOpenAI(model=MODEL, base_url=BASE, api_key="none", max_tokens=200)
    forced = patient.bind_tools([add], tool_choice="add")
    (call,) = forced.invoke("What is 1 + 2?").tool_calls
    assert call["name"] == "add" and set(call["args"]) == {"a", "b"}
    streamed = None
    for part in forced.stream("What is 1 + 2?"):
        streamed = part if streamed is None else streamed + part
    assert streamed.tool_calls[0]["name"] == "add"
    question = HumanMessage("What is 1 + 2?")
    called = AIMessage("", tool_calls=[call])
    result = ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])
    answer = patient.bind_tools([add]).invoke([question, called, result])
    assert isinstance(answer, AIMessage) and (answer.content or answer.tool_calls)
    shorter = patient.bind_tools([add]).invoke([question])
    assert answer.usage_metadata["input_tokens"] > shorter.usage_metadata["input_tokens"], "call and result were read"


@check("structured output")
def _() -> None:
    name = {"type": "string", "maxLength": 20}  # or a small model goes on for ever
    schema = {"title": "city", "type": "object", "properties": {"name": name}, "required": ["name"]}
    patient = ChatOpenAI(model=MODEL, base_url=BASE, api_key="none", max_tokens=300)  # 20 characters, escaped
    assert patient.with_structured_output(schema, method="json_schema").invoke("A city?")["name"]
