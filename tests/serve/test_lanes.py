"""Who waits for whom, without a clock: one lane is blocked, and the others answer."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

import pytest
from msgspec import UNSET

from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.checkpoint.tokenizer.tokenizer_process import TokenizerProcess
from millrace.errors import BusyError, CheckpointError
from millrace.serve.http import bounded_executor, routes
from millrace.serve.http.bounded_executor import BoundedExecutor
from millrace.serve.http.errors import HttpError
from millrace.serve.http.server_context import OFF_LOOP_BODY, OFF_LOOP_ITEMS
from millrace.serve.llm import generation_stream
from millrace.serve.llm.language_model import (
    LONG_CHARACTERS,
    LONG_CHAT_BYTES,
    SHORT_CHARACTERS,
    VERY_LONG_CHARACTERS,
    TextProcessor,
)
from millrace.serve.llm.request_decoding import decode, pop_ignored_fields
from millrace.serve.llm.request_types import ChatRequest, Message
from tests.runtime.fakes import FakeTokenizer
from tests.serve.support import Running, post

T = TypeVar("T")
LENGTHS = {
    "short": SHORT_CHARACTERS, "medium": LONG_CHARACTERS, "long": VERY_LONG_CHARACTERS,
    "very long": VERY_LONG_CHARACTERS + 1,
}  # fmt: skip


class Stuck(FakeTokenizer):
    """Texts of some lengths take until `released`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self.lengths, self.released, self.threads = lengths, threading.Event(), dict[int, int]()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.threads[len(text)] = threading.get_ident()
        if len(text) in self.lengths:
            assert self.released.wait(60)
        return [1]


@contextlib.contextmanager
def made(stuck: Sequence[str] = ()) -> Iterator[tuple[TextProcessor, Stuck]]:
    tokenizer = Stuck([LENGTHS[name] for name in stuck])
    made = TextProcessor(tokenizer, None, max_pending=8, max_context=10**9)
    try:
        yield made, tokenizer
    finally:
        tokenizer.released.set()
        made.close()


def within(work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = 20) -> T:
    return asyncio.run(asyncio.wait_for(work(), timeout_s))


@pytest.mark.parametrize("blocked", ["medium", "long", "very long"])
def test_texts_of_other_lengths_do_not_wait(blocked: str) -> None:
    with made([blocked]) as (given, tokenizer):

        async def main() -> None:
            waiting = [asyncio.create_task(given.encode(["a" * LENGTHS[blocked]], False)) for _ in range(4)]
            await asyncio.sleep(0)
            for name, n in LENGTHS.items():
                if name != blocked:
                    assert await given.encode(["a" * n], False) == [[1]], f"{name} beside {blocked}"
            assert not any(w.done() for w in waiting)
            tokenizer.released.set()
            assert await asyncio.gather(*waiting) == [[[1]]] * 4

        within(main)


def test_only_short_texts_are_tokenised_on_the_event_loop() -> None:
    with made() as (given, tokenizer):

        async def main() -> int:
            for n in LENGTHS.values():
                await given.encode(["a" * n], False)
            return threading.get_ident()

        loop_thread = within(main)
        assert [n for n, thread in tokenizer.threads.items() if thread == loop_thread] == [SHORT_CHARACTERS]


class Template:
    """Renders at once, but where it is told to wait."""

    source = "{{ messages }}"

    def source_for(self, has_tools: bool) -> str:
        return self.source

    def __init__(self) -> None:
        self.released = threading.Event()
        self.released.set()
        self.others: list[Template] = []

    def name_for(self, has_tools: bool) -> str:
        return "default"

    def separate_copy(self) -> "Template":
        self.others.append(Template())
        return self.others[-1]

    def render(self, messages: Sequence[object], **given: object) -> str:
        assert self.released.wait(60)
        return "a"

    def close(self) -> None:
        self.released.set()


def test_long_chats_do_not_hold_up_short_ones() -> None:
    template = Template()
    given = TextProcessor(FakeTokenizer(), cast(ChatTemplate, template), 8, 10**9)
    (for_long,) = template.others
    for_long.released.clear()
    hello = [Message(role="user", content="Hi")]

    async def main() -> None:
        long = asyncio.create_task(given.encode_chat(hello, body_bytes=LONG_CHAT_BYTES + 1))
        await asyncio.sleep(0)
        assert await given.encode_chat(hello, body_bytes=LONG_CHAT_BYTES), "a short one is answered meanwhile"
        assert not long.done()
        for_long.released.set()
        assert await long

    within(main)
    given.close()


def test_what_nobody_waits_for_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon, but not at once: a new process costs something too."""
    assert 0 < bounded_executor.ABANDONED_S <= 2
    monkeypatch.setattr(bounded_executor, "ABANDONED_S", 0.05)
    stopped, entered = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert stopped.wait(60)

    lane = BoundedExecutor("test", 4, stop=stopped.set)

    async def main() -> None:
        task = asyncio.create_task(lane.run(work))
        await asyncio.to_thread(entered.wait, 20)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(stopped.wait, 20), "what runs for nobody is stopped"

    within(main)
    lane.close()


@pytest.mark.parametrize("n", [SHORT_CHARACTERS, LONG_CHARACTERS, VERY_LONG_CHARACTERS])
def test_a_tokenizer_that_fails_says_so_in_every_lane(n: int) -> None:
    """And does not blame the chat template."""

    class Broken(FakeTokenizer):
        def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise CheckpointError("it panicked", "a tokenizer that works", "fix it")

    given = TextProcessor(Broken(), None, 8, 10**9)
    with pytest.raises(HttpError) as error:
        within(lambda: given.encode(["a" * n], False))
    assert (error.value.status, error.value.code) == (503, "tokenizer_failed")
    given.close()


def test_long_texts_go_to_processes_that_closing_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    closed: list[TokenizerProcess] = []
    monkeypatch.setattr(TokenizerProcess, "close", lambda process: closed.append(process))
    given = TextProcessor(FakeTokenizer(), None, 8, 10**9, tmp_path)
    assert given._medium._process is None
    processes = [given._long._process, given._very_long._process]
    assert None not in processes and processes[0] is not processes[1]
    given.close()
    assert closed == processes


def test_who_comes_after_the_end_is_told() -> None:
    lane = BoundedExecutor("test", 4)

    async def main() -> None:
        assert await lane.run(lambda: 1) == 1
        lane.close()
        with pytest.raises(BusyError, match="shutting down"):
            await lane.run(lambda: 2)

    within(main)


def bodies(large: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is done for a request, and a request for which that is much; each a little above or below its bound."""
    text, characters, stop = (
        "/v1/completions",
        OFF_LOOP_BODY + 1 if large else OFF_LOOP_BODY - 200,
        OFF_LOOP_ITEMS // 9 - 1,
    )
    return {
        "read_request": (text, {"prompt": "a", "max_tokens": 1, "user": "x" * characters}),
        "token_text": (
            "/tokenize",
            {"prompt": "1" * (OFF_LOOP_ITEMS + (1 if large else -1)), "return_token_strs": True},
        ),
        "StopTables": (
            text,
            {"prompt": "a", "max_tokens": 1, "stop": [f"{i:0{stop}}" for i in range(10 if large else 9)]},
        ),
    }


@pytest.mark.parametrize(
    "what, where", [("read_request", routes), ("token_text", Tokenizer), ("StopTables", generation_stream)]
)
@pytest.mark.parametrize("large", [True, False])
def test_only_what_is_small_is_done_on_the_event_loop(
    server: Running, what: str, where: object, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, real = set[int](), getattr(where, what)

    def recorded(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return real(*given)

    monkeypatch.setattr(where, what, recorded)
    path, body = bodies(large)[what]
    assert post(server.url, path, body).status_code == 200
    assert threads and (server.thread.ident not in threads) == large


def test_what_changes_nothing_is_let_go_of() -> None:
    """Decoded it is many times the body, and the answer may take minutes."""
    body = b'{"messages": [], "metadata": [{}, {}], "verbosity": "low", "functions": [], "temperature": 1}'
    asked = decode(body, ChatRequest)
    assert pop_ignored_fields(asked, ChatRequest) == ("verbosity",)
    held = {name: getattr(asked, name) for name in asked.__struct_fields__ if getattr(asked, name) not in (UNSET, None)}
    assert held == {"messages": [], "temperature": 1}
