"""Response senders of models that are not decoupled: one response is the answer, with the final flag or without."""

import asyncio
import logging
from pathlib import Path

import pytest

from millrace.model_repository.request.status_code import StatusError
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, one, text, write

WHERE = pytest.mark.parametrize("where", ["", OWN], ids=["here", "own"])
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
ONCE = "cannot send more than one response"
# What the model does with `sender` and `response`, and what it returns.
ANSWERED = {
    "final, returns None": (f"sender.send(response, {FINAL})", "None"),
    "final, returns [None]": (f"sender.send(response, {FINAL})", "[None]"),
    "no final": ("sender.send(response)", "[None]"),
    "final alone afterwards": (f"sender.send(response); sender.send({FINAL})", "[None]"),
    "final alone, much later": (
        f"sender.send(response); threading.Timer(0.05, lambda: sender.send({FINAL})).start()",
        "None",
    ),
    "from a thread": (f"threading.Timer(0.05, lambda: sender.send(response, {FINAL})).start()", "[None]"),
    "from a thread, no final": ("threading.Timer(0.05, lambda: sender.send(response)).start()", "[None]"),
    "kept": ("sender.send(response); self.kept = sender", "[None]"),
    "kept, and its request": ("sender.send(response); self.kept = sender, requests", "None"),
    "returned as well": ("sender.send(response)", "[said('second')]"),
    "raises afterwards": ("sender.send(response); raise ValueError('unheard')", "[None]"),
    "sends twice": ("sender.send(response); sender.send(said('second'))", "[None]"),
}
BEGIN = "sender = requests[0].get_response_sender(); response = said('first'); "
CODE = HEAD + "    {2}def execute(self, requests):\n        {0}\n        return {1}\n" + SAY
# Does what it is asked to.
ASKED = (
    HEAD
    + """
    {0}def execute(self, requests):
        does, returns = (one.decode() for one in requests[0].inputs()[0].as_numpy())
        scope = dict(globals(), self=self, requests=requests)
        exec(does, scope)
        return eval(returns, scope)
"""
    + SAY
)


@WHERE
@pytest.mark.parametrize("begin", ["", "async "], ids=["sync", "async"])
def test_the_response_is_the_answer(tmp_path: Path, where: str, begin: str) -> None:
    write(tmp_path, "m", ASKED.format(begin), ANY % where)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            for what, (does, returns) in ANSWERED.items():
                for _ in range(2):  # what was kept is let go of
                    answer = await asyncio.wait_for(model.infer(asked(model, IN=text(BEGIN + does, returns))), 20)
                    assert answer.outputs["OUT"].tolist() == [b"first"], what
            await asyncio.wait_for(repository.unload("m"), 20)  # nothing that it keeps holds it

    asyncio.run(run())


REFUSED = {
    f"sender.send({FINAL})": "Non-decoupled model cannot send complete final before sending a response.",
    "sender.send()": "Inference Response object must be provided when the response flags is set to zero.",
    "sender.send(response, 2)": "Unsupported value for the flags",
}


@WHERE
def test_what_cannot_be_sent_is_the_answer(tmp_path: Path, where: str) -> None:
    write(tmp_path, "m", ASKED.format(""), ANY % where)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            for does, words in REFUSED.items():
                with pytest.raises(StatusError) as caught:
                    await asyncio.wait_for(model.infer(asked(model, IN=text(BEGIN + does, "None"))), 20)
                assert words in str(caught.value), does

    asyncio.run(run())


def test_a_second_response_is_refused_in_the_model(tmp_path: Path) -> None:
    write(tmp_path, "m", ASKED.format(""), ANY % "")
    twice = "sender.send(response)\ntry:\n    sender.send(response)\n"
    twice += "except pb_utils.TritonModelException as error:\n    self.words = str(error)\n"

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            await model.infer(asked(model, IN=text(BEGIN + twice, "None")))
            answer = await model.infer(asked(model, IN=text("pass", "[said(self.words)]")))
            assert ONCE in answer.outputs["OUT"][0].decode()

    asyncio.run(run())


DECOUPLED = " model_transaction_policy { decoupled: true } "


@WHERE
@pytest.mark.parametrize("policy", ["", DECOUPLED], ids=["one", "decoupled"])
@pytest.mark.parametrize("begin", ["", "async "], ids=["sync", "async"])
def test_an_exception_after_the_final_response_is_logged(
    tmp_path: Path, where: str, policy: str, begin: str, caplog: pytest.LogCaptureFixture
) -> None:
    does = (
        f"sender = requests[0].get_response_sender(); sender.send(said('first'), {FINAL}); raise ValueError('unheard')"
    )
    write(tmp_path, "m", CODE.format(does, "None", begin), ANY % (where + policy))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model, ended = repository.get("m"), asyncio.Event()
            model.submit(asked(model, IN=text("x")), lambda response, error, final: ended.set() if final else None)
            await asyncio.wait_for(ended.wait(), 20)
            for _ in range(2000):
                if "unheard" in caplog.text:
                    return
                await asyncio.sleep(0.005)

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "model 'm' failed after its final response to request r" in caplog.text
    assert "ValueError: unheard" in caplog.text


@WHERE
def test_objects_become_their_text(tmp_path: Path, where: str) -> None:
    """As `str` of each in Triton; only bytes stay as they are."""
    made = "[1, 2, 20, -3, 0.5, True, None, 'é', b'\\xff', np.int64(7), np.float32(0.1), bytearray(b'a'), 10 ** 30"
    made += ", ('a', 1), np.str_('u'), np.bytes_(b'b')]"
    body = f"    def execute(self, requests):\n        made = np.empty(16, object)\n        made[:] = {made}\n"
    body += "        return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', made)])]\n"
    write(tmp_path, "m", HEAD + body, ANY % where)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            assert (await one(repository, "m", text("x"))).tolist() == [
                b"1", b"2", b"20", b"-3", b"0.5", b"True", b"None", "é".encode(), b"\xff", b"7", b"0.1", b"a",
                b"1" + b"0" * 30, b"('a', 1)", b"u", b"b",
            ]  # fmt: skip

    asyncio.run(run())


LATER = """
    async def execute(self, requests):
        async def later(sender):
            await asyncio.sleep(0.02)
            sender.send(said("late"), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.tasks = [asyncio.create_task(later(request.get_response_sender())) for request in requests]
"""


@WHERE
def test_tasks_of_an_event_loop_answer_after_execute(tmp_path: Path, where: str) -> None:
    write(tmp_path, "m", "import asyncio\n" + HEAD + LATER + SAY, ANY % where)

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            await repository.load("m")
            model = repository.get("m")
            for _ in range(3):  # the first is what starts the thread of the event loop
                answer = await asyncio.wait_for(model.infer(asked(model, IN=text("x"))), 20)
                assert answer.outputs["OUT"].tolist() == [b"late"]

    asyncio.run(run())


@WHERE
def test_an_exception_of_an_async_decoupled_model_is_told_and_logged(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "m", CODE.format("raise ValueError('heard')", "None", "async "), ANY % (where + DECOUPLED))

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            with pytest.raises(StatusError, match="ValueError: heard"):
                await one(repository, "m", text("x"))

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "model 'm' failed: ValueError: heard" in caplog.text
