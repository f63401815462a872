"""Messages that come again but for their ids: each is answered as it is the usual way, which reads the whole of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.checkpoint.protobuf import varint
from millrace.model_repository.execution import inline_execution
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.serve.protocols.kserve.grpc.fast_path import GrpcFastPath
from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE, message
from tests.serve.protocols.kserve.test_http_fast_path import n_quick
from tests.support.drawn import examples
from tests.support.kserve_grpc import Client, one, refusal, request

__all__ = ["n_quick"]
Call = Callable[[bytes], Any]


@pytest.fixture(scope="module")
def call(client: Client) -> Call:
    """The answer's bytes, or the code and the words of an error."""
    infer = client.channel.unary_unary(f"{SERVICE}ModelInfer")

    def answer(data: bytes) -> bytes | tuple[str, str]:
        try:
            found: bytes = infer(data, timeout=20)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return found

    return answer


def usually(call: Call, data: bytes) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrpcFastPath, "answer", lambda self, data, arrived_ns: None)
        return call(data)


def sums(draw: np.random.Generator, own: str, **more: Any) -> Any:
    raw = [draw.integers(-1000, 1000, 16, dtype=np.int32).tobytes() for _ in range(2)]
    return request("simple", [one("INT32", [1, 16], f"INPUT{i}") for i in range(2)], raw, id=own, **more)


def id_field(own: bytes, length: bytes = b"") -> bytes:
    return b"\x1a" + (length or varint(len(own))) + own


def placed(whole: Any, own: bytes, way: str) -> bytes:
    """The message with that id, written in some way. whole: without one"""
    head = message("ModelInferRequest")(model_name=whole.model_name, model_version=whole.model_version)
    before = head.SerializeToString()
    data: bytes = whole.SerializeToString()
    raw = b"".join(b"\x3a\x40" + one for one in whole.raw_input_contents)
    inputs = data[len(before) : len(data) - len(raw)]
    field = id_field(own)
    written: dict[str, bytes] = {
        "usual": before + field + inputs + raw,
        "first": field + before + inputs + raw,
        "before the tensors": before + inputs + field + raw,
        "last": data + field,
        "another before": before + id_field(b"other") + field + inputs + raw,
        "another behind": before + field + inputs + id_field(b"other") + raw,
        "the same twice": before + field + inputs + field + raw,
        "none behind": before + field + inputs + id_field(b"") + raw,
        "a long length": before + id_field(own, bytes((len(own) | 128, 0))) + inputs + raw,
        "name again": before + field + before + inputs + raw,
    }
    return written[way]


WAYS = ("usual", "usual", "usual", "first", "before the tensors", "last", "another before", "another behind",
        "the same twice", "none behind", "a long length", "name again")  # fmt: skip
IDS = (
    st.sampled_from((b"7", b"8", b"9", b"10", b"99", b"\x1a", b"\0", b"\x7f", b"", b"abc", b"abd", b":@x"))
    | st.text(max_size=3).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.sampled_from(("é".encode(), "ü".encode(), b"\xff", b"\xc3", b"a\x80", b"\xed\xa0\x80"))
)  # fmt: skip


@settings(max_examples=examples(20, by_night=15), deadline=None)
@given(st.lists(st.tuples(IDS, st.sampled_from(WAYS), st.sampled_from(({}, {"model_version": "1"}))), min_size=3,
                max_size=8), st.sampled_from(WAYS), st.integers(0, 2**32 - 1))  # fmt: skip
def test_whatever_an_id_is_the_answer_is_that_of_the_usual_way(
    call: Call, asked: list[tuple[bytes, str, dict[str, str]]], way: str, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    for own, other, more in asked:
        for written in (way, way, other):
            data = placed(sums(draw, "", **more), own, written)
            assert call(data) == usually(call, data), (own, written)


def test_an_id_that_is_there_twice_is_no_place_for_others(call: Call, n_quick: list[int]) -> None:
    """The last one counts, whatever the first one is."""
    draw = np.random.default_rng(3)
    asked = []
    for own in (b"twice", b"twice", b"twice", b"first"):
        whole = placed(sums(draw, ""), own, "usual")
        at = whole.index(b"\x3a\x40")
        asked.append(whole[:at] + id_field(b"twice") + whole[at:])
    told = [call(data) for data in asked]
    assert len(n_quick) == 1, "the third of the same"
    assert told == [usually(call, data) for data in asked]
    assert {message("ModelInferResponse").FromString(answer).id for answer in told} == {"twice"}


@pytest.mark.parametrize("more", [{}, {"model_version": "1"}, {"outputs": [{"name": "OUTPUT1"}]}])
def test_each_message_has_another_id(call: Call, n_quick: list[int], more: dict[str, Any]) -> None:
    """All but the first two of a length are answered at once, and name theirs; so are those without one, or of one
    beyond ASCII that stays the same. No id that was drawn before is as long as these."""
    draw = np.random.default_rng(16)
    counted = [f"{more!s:.9}{n:04}" for n in range(20)]
    lengths = [text for n in range(4) for text in (f"x{n}" * 6, f"uuid-{n}-{more!s:.30}")]
    for names, n_usual in ((counted, 2), (lengths, 4), ([""] * 4, 2), (["numéro"] * 4, 2)):
        n_quick.clear()
        asked = [sums(draw, own, **more).SerializeToString() for own in names]
        told = [call(data) for data in asked]
        assert len(n_quick) == len(names) - n_usual, names
        assert [message("ModelInferResponse").FromString(answer).id for answer in told] == names
        assert told == [usually(call, data) for data in asked]


def test_an_error_names_the_id_of_its_own_message(
    client: Client, n_quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: InferRequest, outputs: object) -> None:
        raise StatusError(Code.INTERNAL, f"{request.error_prefix}broken")

    infer = client.channel.unary_unary(f"{SERVICE}ModelInfer")

    def ask(own: str) -> bytes:
        asked = sums(np.random.default_rng(0), own, outputs=[{"name": "OUTPUT0"}])
        found: bytes = infer(asked.SerializeToString(), timeout=20)
        return found

    for own in ("error-1", "error-2"):
        ask(own)
    monkeypatch.setattr(inline_execution, "select_requested_outputs", broken)
    for own in ("error-3", "error-4"):
        assert refusal(partial(ask, own)) == ("INTERNAL", f"[request id: {own}] broken")
