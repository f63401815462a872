"""Heads that come again but for their ids: what is remembered of them, and that it is answered as it is the usual way.

The usual way is a connection that knows nothing: its parser, and its JSON, are the truth.
"""

import json
import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.model_repository.execution import inline_execution
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError
from millrace.serve.protocols.kserve.http.infer_request import id_place
from millrace.serve.protocols.kserve.http.request_template import ID, JSON_LENGTH, LENGTH, REQUEST_ID, head_of
from tests.serve.protocols.kserve.test_http_fast_path import Connection, n_quick, packet, sums
from tests.support.drawn import examples
from tests.support.kserve import HEADER
from tests.support.server import Threaded

__all__ = ["n_quick"]
INPUTS = ", ".join(
    f'{{"name": "INPUT{i}", "shape": [1, 16], "datatype": "INT32", "parameters": {{"binary_data_size": 64}}}}'
    for i in range(2)
)
PLAIN = ("7", "8", "10", "a b", "urn:x/1", "{}", "~", "id", "another id")
ODD = ('\\"', "\\\\", "\\u0041", "\\/", "\\n", "é", "\\ud800", "😀", "")  # as they stand in JSON


def body(members: list[str], space: str = "") -> tuple[bytes, dict[str, str]]:
    """With tensors behind it that are all ones."""
    head = f"{space}{{{space}{f',{space}'.join(members)}}}".encode()
    return head + b"\1\0\0\0" * 32, {HEADER: str(len(head))}


def members(own: str) -> list[str]:
    return [f'"inputs": [{INPUTS}]', '"parameters": {"binary_data_output": true}', *([own] if own else [])]


@st.composite
def requests(draw: st.DrawFn) -> list[bytes]:
    """Packets of one client, of a few kinds whose ids differ in some way."""
    space = draw(st.sampled_from(("", " ", "\n\t ")))
    key = draw(st.sampled_from(('"id":', '"id" : ', '"\\u0069d":', '"id2":')))
    more = draw(st.sampled_from(("", '"id": "first"', '"id": "last"', '"parameters": {"id": "p"}', '"x": {"id": "n"}')))
    order = draw(st.permutations(range(4)))
    told_id = draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(3, 6))):
        own = draw(
            st.sampled_from(PLAIN).map(json.dumps) | st.sampled_from(ODD).map('"{}"'.format)
            | st.sampled_from(("7", "null", "[]", "true", '""'))
        )  # fmt: skip
        parts = [*members(key + own), more]
        content, headers = body([parts[i] for i in order if parts[i]], space)
        if told_id:
            headers["x-request-id"] = draw(st.sampled_from(("a", "bcd", "x y", "{}", "")))
        found.append(packet(content, headers))
    return found


@settings(max_examples=examples(60, by_night=5), deadline=None)
@given(requests())
def test_whatever_an_id_is_the_answer_is_that_of_the_usual_way(url: str, asked: list[bytes]) -> None:
    with Connection(url) as warm:
        for one in asked:
            with Connection(url) as fresh:
                assert warm.ask(one) == fresh.ask(one), one[:600]


@pytest.mark.parametrize("at_end", [False, True])
def test_each_request_has_another_id(url: str, n_quick: list[int], at_end: bool) -> None:
    """Of any length, as counters and UUIDs have; all but the first two are answered at once, and name theirs."""
    draw = random.Random(16)
    with Connection(url) as warm:
        for i in range(40):
            own = str(i * 7) if i % 2 else f"{draw.getrandbits(128):032x}"
            content, headers = sums(draw, id=own)
            if not at_end:
                head = json.loads(content[: int(headers[HEADER])])
                told = json.dumps({"id": head.pop("id"), **head}).encode()
                content, headers = told + content[int(headers[HEADER]) :], {HEADER: str(len(told))}
            asked = packet(content, headers)
            with Connection(url) as fresh:
                (answer,) = warm.ask(asked)
                assert [answer] == fresh.ask(asked)
            n_json = int(answer[1][HEADER.lower().encode()])
            assert json.loads(answer[2][:n_json])["id"] == own
            assert len(n_quick) == max(0, i - 1)


def test_an_error_names_the_id_of_its_own_request(
    url: str, n_quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: InferRequest, outputs: object) -> None:
        raise StatusError(Code.INTERNAL, f"{request.error_prefix}broken")

    def asked(own: str) -> bytes:
        return packet(*sums(random.Random(0), id=own, outputs=[{"name": "OUTPUT1"}]))

    with Connection(url) as warm:
        for own in ("a1", "b2"):
            warm.ask(asked(own))
        monkeypatch.setattr(inline_execution, "select_requested_outputs", broken)
        for own in ("c3", "d44"):
            ((status, _, told),) = warm.ask(asked(own))
            assert status.split()[1] == b"500" and json.loads(told)["error"] == f"[request id: {own}] broken"
    assert len(n_quick) == 2


def test_the_header_that_names_a_request_may_be_another_each_time(served: Threaded, n_quick: list[int]) -> None:
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        for i, name in enumerate(("one", "two", "three", "33", "no@name", "five")):
            content, headers = sums(random.Random(i))
            raw.sendall(packet(content, {**headers, "X-Request-Id": name}))
            told = b""
            while told.count(b"\r\n\r\n") < 1 or len(told.partition(b"\r\n\r\n")[2]) < 128:
                told += raw.recv(65536)
            echoed = f"x-request-id: {name}\r\n".encode() in told
            assert echoed == ("@" not in name), told[:400]
    assert len(n_quick) == 4


def test_a_raw_tensor_may_have_another_length_each_time(url: str, n_quick: list[int]) -> None:
    """Its head is alike; each length is remembered once it came behind one."""
    draw = random.Random(0)
    with Connection(url) as warm:
        for i, n in enumerate((4, 4, 8, 8, 4, 8, 5, 4, 12, 12, 8)):
            asked = packet(draw.randbytes(n), {HEADER: "0"}, "same_INT32")
            with Connection(url) as fresh:
                assert warm.ask(asked) == fresh.ask(asked), i
    assert len(n_quick) == 6, "all but the first of each length, the second of the first, and 5 bytes, no tensor"


# ---------------------------------------------------------------------- what is remembered


def test_holes_are_lengths_and_ids() -> None:
    content, told = body(members('"id": "7"'))
    whole = packet(content, {**told, "x-request-id": "r1"})
    headers = {b"host": b"x", JSON_LENGTH: told[HEADER].encode(), REQUEST_ID: b"r1",
               LENGTH: str(len(content)).encode()}  # fmt: skip
    head = head_of(whole, headers)
    assert head is not None and head.holes == (JSON_LENGTH, REQUEST_ID, LENGTH, ID)
    filled = head.fill(whole)
    assert filled is not None and whole[filled.end :] == b"\1\0\0\0" * 32
    assert filled.match(whole) == {REQUEST_ID: b"r1", ID: b"7"}
    alike = whole.replace(b'"7"', b'"~"').replace(b"r1", b"s2")
    assert filled.match(alike) == {REQUEST_ID: b"s2", ID: b"~"}
    for wrong in (b'"7"', b'"\\"', b'"\n"', b'"\xff"'):
        assert filled.match(whole.replace(b'"7"', wrong)) == ({REQUEST_ID: b"r1", ID: b"7"} if b"7" in wrong else None)
    longer, told = body(members('"id": "1234567"'))
    other = packet(longer, {**told, "x-request-id": "r22"})
    assert filled.match(other) is None
    filled = head.fill(other)
    assert filled is not None and other[filled.end :] == b"\1\0\0\0" * 32
    assert filled.match(other) == {REQUEST_ID: b"r22", ID: b"1234567"}
    for wrong in (
        other[:-1], other + b"0", other.replace(b"1234567", b"123456"), other.replace(b"1234567", b'12"4567'),
        other.replace(b"1234567", b"12\\4567"), other.replace(b"1234567", "123é67".encode()),
        other.replace(b"r22", b"r 2"), other.replace(b"host: x", b"host: y"), other.replace(b'"id"', b'"ID"'),
        other.replace(told[HEADER].encode(), b"0" + told[HEADER].encode()), other.replace(b"1234567", b""),
    ):  # fmt: skip
        assert head.fill(wrong) is None and filled.match(wrong) is None, wrong
    assert head_of(whole, {**headers, REQUEST_ID: b"r2"}) is not None, "not as the parser has it: a piece"
    assert head_of(whole, {**headers, LENGTH: b"12"}) is None and head_of(whole, {b"host": b"x"}) is None


@pytest.mark.parametrize(
    "told, place",
    [
        ('{"id":"7","inputs":[]}', "7"), ('{"inputs":[],"id" : "a\\"b"}', 'a\\"b'),
        ('{"inputs":[],"parameters":{"id":"7"}}', None), ('{"inputs":[{"name":"id","shape":[],"datatype":"x"}]}', None),
        ('{"id":"1","inputs":[],"id":"2"}', None), ('{"id":7,"inputs":[]}', None), ('{"inputs":[]}', None),
        ('{"id":"7","inputs":[],"\\u0069d":"8"}', None), ('{"id":"7","inputs":[]', None), ('{"id":"7"}', None),
        ('{"inputs":[],"x":"{\\"id\\":\\"7\\"}"}', None), ('{"inputs":[],"id":"another id"}', None), ("", None),
    ],
)  # fmt: skip
def test_where_an_id_is(told: str, place: str | None) -> None:
    found = id_place(told.encode())
    assert (told[slice(*found)] if found is not None else None) == place
