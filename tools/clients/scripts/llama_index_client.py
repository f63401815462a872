"""LlamaIndex's OpenAILike."""

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from report import BASE, MODEL, check

llm = OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=True, max_tokens=12, context_window=4096)


@check("complete")
def _() -> None:
    assert llm.complete("What is the capital of France?").text


@check("chat")
def _() -> None:
    assert llm.chat([ChatMessage(role="user", content="Hello!")]).message.content


@check("stream")
def _() -> None:
    *_, last = llm.stream_chat([ChatMessage(role="user", content="Hello!")])
    assert last.message.content


@check("plain completions")
def _() -> None:
    plain = OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=False, max_tokens=8)
    assert plain.complete("Paris is").text
