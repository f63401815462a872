"""Events of which the text alone is encoded: byte for byte those that are encoded as a whole."""

import pytest

from millrace.serve.llm.event_stream import TextDeltaEncoder, encode_events
from millrace.serve.protocols.openai.replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    CompletionChoice,
    CompletionReply,
)

TEXTS = ("a", " mill", '"', "\\", 'a"text":""b', "\n\t\x00\x7f", "Mühle 🌊", "\u2028</script>", "x" * 5000)
NAMES = ("m", 'm"text":""', '"content":"",', "\\", "模型")


def completion(name: str, choice: int, text: str) -> CompletionReply:
    return CompletionReply(f"cmpl-{name}", 7, name, [CompletionChoice(choice, text, None, None)], "fp", usage=None)


def chat(name: str, choice: int, text: str) -> ChatChunk:
    return ChatChunk(f"chatcmpl-{name}", 7, name, "fp", [ChatChunkChoice(choice, ChatDelta(content=text))])


@pytest.mark.parametrize(("field", "reply"), [(b'"text"', completion), (b'"content"', chat)])
@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_the_whole_reply(field, reply, name: str) -> None:  # type: ignore[no-untyped-def]
    plain = TextDeltaEncoder(field, lambda choice: reply(name, choice, ""))
    for choice in (0, 3, 0):
        for text in TEXTS:
            assert plain.event(choice, text) == encode_events([reply(name, choice, text)])
