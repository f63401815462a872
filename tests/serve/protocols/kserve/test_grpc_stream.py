"""ModelStreamInfer: many requests on one stream, decoupled models, errors in the stream, and who goes away."""

import queue
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.model_repository.request import response_stream
from millrace.serve.settings import ServerSettings
from tests.serve.support import until
from tests.support.kserve import ID
from tests.support.kserve_grpc import Client, connected, one, refusal, request
from tests.support.python_models import ANY, HEAD, SAY, write
from tests.support.repository import REPEAT, identity, in_process, write_models
from tests.support.server import Threaded

DECOUPLED = "model_transaction_policy { decoupled: true }"
FINAL, EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"
# Answers when the file `go` is beside it, and says in files what it was told: it began, it was cancelled.
WAITS = f"""{HEAD}
    def initialize(self, args):
        from pathlib import Path
        self.here = Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),), daemon=True).start()

    def answer(self, sender):
        import time
        (self.here / "begun").touch()
        while not sender.is_cancelled() and not (self.here / "go").exists():
            time.sleep(0.002)
        if sender.is_cancelled():
            (self.here / "cancelled").touch()
        sender.send(said("there"), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
{SAY}"""
# One response for each element, "!" an error; the last comes with the end of it.
SAYS = f"""{HEAD}
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            texts = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().reshape(-1)
            for i, text in enumerate(texts):
                last = i == len(texts) - 1
                answer = said(text)
                if text == b"!":
                    answer = pb_utils.InferenceResponse(error=pb_utils.TritonError("as asked", pb_utils.TritonError.NOT_FOUND))
                sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
{SAY}"""  # noqa: E501
# A megabyte again and again, until nobody wants it.
LARGE = f"""{HEAD}
    def initialize(self, args):
        from pathlib import Path
        self.here = Path(args["model_repository"])

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),), daemon=True).start()

    def answer(self, sender):
        import time
        while not sender.is_cancelled():
            sender.send(said("x" * 1_000_000))
            time.sleep(0.01)
        (self.here / "cancelled").touch()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
{SAY}"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(
        root,
        {
            "repeat_int32": REPEAT,
            "same": identity("INT32", more="max_batch_size: 4"),
            "slow": identity("INT32", parameters="").replace(
                'backend: "identity"',
                'backend: "identity" parameters { key: "execute_delay_ms" value { string_value: "50" } }',
            ),
        },
    )
    for name, code in (("waits", WAITS), ("says", SAYS), ("large", LARGE)):
        write(root, name, code, ANY % DECOUPLED)
    write(root, "waits_too", WAITS, ANY % "")
    return root


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Threaded]:
    with in_process(root, grpc_port=0) as found:
        yield found


@pytest.fixture
def client(served: Threaded) -> Iterator[Client]:
    with connected(served.grpc_url) as found:
        yield found


def repeat(values: Sequence[int], delays_ms: Sequence[int], request_id: str, **parameters: Any) -> Any:
    n = len(values)
    inputs = [one("INT32", [n], "IN"), one("UINT32", [n], "DELAY"), one("UINT32", [1], "WAIT")]
    raw = [struct.pack(f"<{n}i", *values), struct.pack(f"<{n}I", *delays_ms), bytes(4)]
    return request("repeat_int32", inputs, raw, id=request_id, parameters=parameters)


def same(model: str, values: Sequence[int], request_id: str = "") -> Any:
    shape = [1, len(values)] if model == "same" else [len(values)]
    return request(model, [one("INT32", shape)], [struct.pack(f"<{len(values)}i", *values)], id=request_id)


def text(model: str, *values: bytes, **fields: Any) -> Any:
    raw = b"".join(struct.pack("<I", len(v)) + v for v in values)
    return request(model, [one("BYTES", [len(values)], "IN")], [raw], **fields)


def told(response: Any) -> tuple[str, int | None, bool]:
    """Id, value, whether it is the last."""
    assert not response.error_message, response
    found = response.infer_response
    value = struct.unpack("<i", found.raw_output_contents[0][:4])[0] if found.raw_output_contents else None
    return found.id, value, found.parameters[FINAL].bool_param


def test_decoupled_answers_of_several_requests_on_one_stream(client: Client) -> None:
    asked = [repeat([1, 2, 3], [0, 60, 60], "a"), repeat([7, 8], [20, 60], "b", **{EMPTY_FINAL: {"bool_param": True}})]
    found = [told(response) for response in client.stream(iter(asked))]
    assert [t for t in found if t[0] == "a"] == [("a", 1, False), ("a", 2, False), ("a", 3, False)]
    assert [t for t in found if t[0] == "b"] == [("b", 7, False), ("b", 8, False), ("b", None, True)]
    assert found.index(("b", 7, False)) < found.index(("a", 2, False)), "side by side"
    last = [r for r in client.stream(iter(asked)) if r.infer_response.parameters[FINAL].bool_param]
    assert [(r.infer_response.model_name, r.infer_response.model_version) for r in last] == [("repeat_int32", "")]


def test_a_request_without_answers(client: Client) -> None:
    assert list(client.stream(iter([repeat([], [], "a")]))) == []
    asked = repeat([], [], "a", **{EMPTY_FINAL: {"bool_param": True}})
    assert [told(r) for r in client.stream(iter([asked]))] == [("a", None, True)]
    assert list(client.stream(iter([]))) == [], "a stream without requests"


def test_answers_of_other_models_come_in_the_order_of_their_requests(client: Client) -> None:
    asked = [same("slow", [1], "0"), *(same("same", [i], str(i)) for i in range(1, 300)), same("slow", [9], "300")]
    found = [told(r) for r in client.stream(iter(asked))]
    assert [f[0] for f in found] == [str(i) for i in range(301)] and all(f[2] for f in found)
    assert [f[1] for f in found] == [1, *range(1, 300), 9]


def test_errors_are_messages_and_the_stream_goes_on(client: Client) -> None:
    short = request("same", [one("INT32", [1, 2])], [bytes(4)], id="short")
    asked = [same("gone", [1], "gone"), short, text("says", b"a", b"!", b"b", id="says"), same("same", [5], "last")]
    found: dict[str, list[Any]] = {}
    for response in client.stream(iter(asked)):
        found.setdefault(response.infer_response.id, []).append(response)
    (gone,), (refused,), (last,) = found["gone"], found["short"], found["last"]
    assert gone.error_message == "Request for unknown model: 'gone' is not found"
    what = "input byte size mismatch for input 'INPUT0' for model 'same'. Expected 8, got 4"
    assert refused.error_message == f"[request id: short] {what}"
    first, failed, end = found["says"]
    assert first.infer_response.raw_output_contents == [b"\1\0\0\0a"] and failed.error_message == "as asked"
    assert [r.infer_response.parameters[FINAL].bool_param for r in found["says"]] == [False, False, True]
    assert end.infer_response.raw_output_contents == [b"\1\0\0\0b"] and failed.infer_response.model_name == "says"
    assert told(last) == ("last", 5, True)


def test_the_first_error_ends_the_stream_of_who_asks_for_it(client: Client) -> None:
    asked = [same("same", [1], "1"), text("says", b"!", b"b"), *(same("slow", [1]) for _ in range(9))]
    found: list[Any] = []

    def read() -> None:
        for response in client.stream(iter(asked), [("triton_grpc_error", "true")]):
            found.append(response)

    assert refusal(read) == ("NOT_FOUND", "as asked")
    assert [told(r) for r in found][:1] == [("1", 1, True)]
    assert refusal(lambda: list(client.stream(iter([same("gone", [1])]), [("triton_grpc_error", "true")]))) == (
        "NOT_FOUND", "Request for unknown model: 'gone' is not found",
    )  # fmt: skip


def test_a_message_that_is_none(client: Client) -> None:
    call = client.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    (response,) = call(iter([b"\xff\xff"]), timeout=20)
    assert b"failed to parse the message ModelInferRequest" in response


def begun(root: Path, model: str, file: str = "begun") -> None:
    until((root / model / file).exists)


@pytest.fixture(params=["waits", "waits_too"])
def waits(request: pytest.FixtureRequest, root: Path) -> str:
    name = str(request.param)
    for file in ("begun", "cancelled", "go"):
        (root / name / file).unlink(missing_ok=True)
    return name


def test_a_stream_that_its_client_leaves_cancels_its_requests(client: Client, root: Path, waits: str) -> None:
    call = client.stream(iter([text(waits, b"x")]))
    begun(root, waits)
    call.cancel()
    begun(root, waits, "cancelled")


def test_a_call_that_is_cancelled_and_one_out_of_time(client: Client, root: Path) -> None:
    for file in ("begun", "cancelled", "go"):
        (root / "waits_too" / file).unlink(missing_ok=True)
    call = client.future("ModelInfer", text("waits_too", b"x"))
    begun(root, "waits_too")
    call.cancel()
    begun(root, "waits_too", "cancelled")
    (root / "waits_too" / "cancelled").unlink()
    raw = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    assert refusal(lambda: raw(text("waits_too", b"x").SerializeToString(), timeout=0.2))[0] == "DEADLINE_EXCEEDED"
    begun(root, "waits_too", "cancelled")


def test_a_connection_that_breaks_off_cancels(served: Threaded, root: Path, waits: str) -> None:
    with connected(served.grpc_url) as client:
        call = client.stream(iter([text(waits, b"x")]))
        begun(root, waits)
        assert call.is_active()
    begun(root, waits, "cancelled")


def test_drain_answers_what_was_taken_and_refuses_the_rest(root: Path, waits: str) -> None:
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with in_process(root, grpc_port=0) as served, connected(served.grpc_url) as client:
        stream = client.stream(iter(requests.get, None))
        idle = client.stream(iter(queue.SimpleQueue[Any]().get, None))
        requests.put(text(waits, b"x", id="first"))
        begun(root, waits)
        unary = client.future("ModelInfer", text("waits_too", b"x"))  # of one model the second only waits for its turn
        until(lambda: httpx.get(f"{served.url}/load").json()["server_load"] == 3)  # both streams, and the unary call
        served.server.stop()
        until(lambda: not client.call("ServerReady").ready)
        requests.put(same("same", [1], "late"))
        closing = refusal(lambda: client.infer("same", [one("INT32", [1, 1])], [bytes(4)]))
        assert closing[0] == "UNAVAILABLE" and "the server is shutting down" in closing[1]
        for name in ("waits", "waits_too"):
            (root / name / "go").touch()
        found = {r.infer_response.id: r.error_message for r in (next(stream), next(stream))}
        assert found["first"] == "" and "the server is shutting down" in found["late"]
        assert unary.result()
        for call in (stream, idle):
            assert refusal(lambda: next(call)) == ("UNAVAILABLE", "Server is stopping")  # noqa: B023
        requests.put(None)


def test_a_model_that_is_unloaded_answers_first_and_is_not_missed(root: Path, waits: str) -> None:
    with (
        in_process(root, grpc_port=0, model_control_mode="explicit", load_model=(waits,)) as served,
        connected(served.grpc_url) as client,
    ):
        stream = client.stream(iter([text(waits, b"x")]))
        begun(root, waits)
        client.call("RepositoryModelUnload", model_name=waits)
        assert {m.name: m.state for m in client.call("RepositoryIndex").models}[waits] == "UNLOADING"
        assert client.call("ServerReady").ready and not client.call("ModelReady", name=waits).ready
        (root / waits / "go").touch()
        assert next(stream).infer_response.raw_output_contents == [b"\5\0\0\0there"]


def test_a_reader_that_does_not_read_ends_its_request(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model sends a megabyte again and again: the server holds no more of it than it may."""
    monkeypatch.setattr(response_stream, "MAX_UNREAD_BYTES", 20_000_000)
    with in_process(root, grpc_port=0) as served, connected(served.grpc_url) as client:
        asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stream = client.stream(iter(asked.get, None))
        asked.put(text("large", b"x"))
        first = next(stream)
        assert len(first.infer_response.raw_output_contents[0]) == 1_000_004
        begun(root, "large", "cancelled")
        asked.put(same("same", [5], "last"))
        asked.put(None)
        *found, failed, last = stream
        assert len(found) < 30 and not any(r.error_message for r in found)
        assert (
            failed.error_message.startswith(ID + "responses of ") and "wait for their readers" in failed.error_message
        )
        assert failed.infer_response.parameters[FINAL].bool_param
        assert told(last) == ("last", 5, True)


def test_a_reader_that_takes_nothing_is_left_after_a_while(root: Path) -> None:
    (root / "large" / "cancelled").unlink(missing_ok=True)
    settings = ServerSettings(port=0, write_timeout_s=0.2)
    with in_process(root, settings, grpc_port=0) as served, connected(served.grpc_url) as client:
        stream = client.stream(iter([text("large", b"x")]))
        next(stream)
        begun(root, "large", "cancelled")
        assert refusal(lambda: list(stream)) == ("UNAVAILABLE", "the stream was not read for 0.2 s")
