"""What an error is called by its status, and prompts in which there is nothing."""

import pytest

from millrace.errors import BusyError, EngineError, MillraceError, RequestError
from millrace.serve.http.errors import HttpError, generation_failed, problem_of
from tests.serve.support import Fake, Running, post, running, tokenizer
from tests.serve.test_bad_requests import CHAT, TEXT, chat, check, text


def test_an_empty_text_is_a_prompt_where_something_is_put_in_front_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM has it: the prompt of an empty text is the beginning-of-text token, where there is one."""
    real = type(tokenizer())._encode
    monkeypatch.setattr(type(tokenizer()), "_encode", lambda self, s, special: [1] * special + real(self, s, special))
    with running(Fake(template="{{ messages[0].content }}")) as server:
        assert post(server.url, TEXT, text(prompt="")).json()["usage"]["prompt_tokens"] == 1
        assert post(server.url, TEXT, text(prompt=["", ""])).json()["usage"]["prompt_tokens"] == 2
        check(post(server.url, TEXT, text(prompt="", add_special_tokens=False)), 400, "no tokens", "prompt")
        empty = chat(messages=[{"role": "user", "content": ""}])
        check(post(server.url, CHAT, empty), 400, "no tokens", "messages")
        assert post(server.url, CHAT, empty | {"add_special_tokens": True}).status_code == 200


def test_nothing_is_computed_beside_an_empty_prompt(server: Running) -> None:
    before = server.wait_until_idle().generation_tokens_total
    check(post(server.url, TEXT, text(prompt=["a"] * 9 + [""])), 400, "no tokens", "prompt")
    assert server.wait_until_idle().generation_tokens_total == before


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (HttpError(400, "c", "", "", ""), 400, "invalid_request_error"),
        (HttpError(401, "c", "", "", ""), 401, "authentication_error"),
        (HttpError(404, "c", "", "", ""), 404, "invalid_request_error"),
        (HttpError(503, "c", "", "", ""), 503, "service_unavailable_error"),
        (RequestError("", "", ""), 400, "invalid_request_error"),
        (BusyError("", "", ""), 429, "rate_limit_error"),
        (EngineError("", "", ""), 500, "server_error"),
    ],
)
def test_the_type_of_an_error_follows_its_status(error: MillraceError, status: int, kind: str) -> None:
    problem = problem_of(error, accepting=True)
    assert (problem.status, problem.type) == (status, kind)
    if isinstance(error, BusyError):
        closed = problem_of(error, accepting=False)
        assert (closed.status, closed.type) == (503, "service_unavailable_error")
    assert generation_failed(None, status=503).type == "service_unavailable_error"
