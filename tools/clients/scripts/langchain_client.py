"""LangChain's ChatOpenAI and OpenAI."""

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
    def now() -> str:
        """The time."""
        return "noon"

    chat.bind_tools([now]).invoke("What time is it?")


@check("structured output")
def _() -> None:
    schema = {"title": "city", "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    chat.with_structured_output(schema, method="json_schema").invoke("A city?")
