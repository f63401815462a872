"""A conversation to be answered, whatever the protocol it came by; each message as OpenAI's clients write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from millrace.runtime.params import SamplingParams
from millrace.runtime.request import FREELY, Terms
from millrace.serve.protocol import Message
from millrace.serve.tools import Tools


@dataclass(frozen=True, slots=True)
class Rendering:
    """How the chat template is asked.

    extra: further variables of it, such as enable_thinking; add_special_tokens: in front of what it wrote
    continued: the last message is the beginning of the answer; opens: else the prompt ends where an answer begins
    """

    extra: Mapping[str, object] = field(default_factory=dict)
    opens: bool = True
    continued: bool = False
    add_special_tokens: bool = False


PLAINLY = Rendering()


def going_on(rendering: Rendering, said: Sequence[Message]) -> Rendering:
    """Where the assistant said the last, the answer goes on with it: as Anthropic's and Ollama's clients mean it."""
    last = said[-1] if said else None
    if last is None or last.role != "assistant" or last.tool_calls or not isinstance(last.content, str):
        return rendering
    return replace(rendering, opens=False, continued=True)


@dataclass(slots=True, kw_only=True)
class Conversation:
    """messages: let go of when they are encoded; whole_bytes: of a log probability in a whole answer, None: a stream
    capped: max_tokens beyond the context means the rest of the context; else it is an error
    """

    messages: Sequence[Message]
    params: SamplingParams
    terms: Terms = FREELY
    tools: Tools | None = None
    rendering: Rendering = PLAINLY
    whole_bytes: int | None = None
    capped: bool = False

    @property
    def begun(self) -> str:
        """Of the answer that the last message is the beginning of."""
        content = self.messages[-1].content if self.rendering.continued and self.messages else None
        return content if isinstance(content, str) else "".join(part.text for part in content or ())
