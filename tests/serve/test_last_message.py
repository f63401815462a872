"""A last message of the assistant, which the answer goes on with; and a stored answer, which is told whole."""

from typing import Any

import httpx
import pytest

from millrace.runtime.loop import EngineLoop
from tests.serve.support import Running
from tests.serve.test_protocol_edges import ASK, RESPONSES, ask

BEGUN = [*ASK, {"role": "assistant", "content": "The mill"}]


def test_an_answer_that_the_client_began_is_gone_on_with(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Anthropic's and Ollama's clients mean it: what is computed is what continue_final_message computes."""
    prompts, prepare = list[list[int]](), EngineLoop.prepare

    def watched(self: EngineLoop, prompt: Any, *given: Any, **named: Any) -> Any:
        prompts.append(list(prompt))
        return prepare(self, prompt, *given, **named)

    monkeypatch.setattr(EngineLoop, "prepare", watched)
    plain = ask(server, "/v1/chat/completions", messages=BEGUN)
    meant = ask(server, "/v1/chat/completions", messages=BEGUN, continue_final_message=True)
    in_blocks = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "The mill"}]}]
    others = [
        ask(server, "/v1/messages", messages=BEGUN), ask(server, "/v1/messages", messages=in_blocks),
        ask(server, "/api/chat", messages=BEGUN),
    ]  # fmt: skip
    assert {reply.status_code for reply in (plain, meant, *others)} == {200}
    assert prompts[0] != prompts[1] == prompts[2] == prompts[3] == prompts[4]


@pytest.mark.parametrize("query, name", [("stream=true", "stream"), ("include[]=x", "include[]"), ("foo", "foo")])
def test_a_stored_response_is_told_whole(server: Running, query: str, name: str) -> None:
    """What would be told otherwise is refused, and not told as it is without a word."""
    stored = f"{server.url}{RESPONSES}/{ask(server, RESPONSES).json()['id']}"
    refused = httpx.get(f"{stored}?{query}").json()["error"]
    assert refused["param"] == name and "stored response" in refused["message"]
    assert httpx.get(stored).json() == httpx.get(f"{stored}?stream=false").json()
