"""Large JSON of inferences: read in pieces as it would be read at once, and refused before it is decoded."""

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from millrace.model_repository.request import request_validation
from millrace.model_repository.request.status_code import StatusError
from millrace.serve.http import json_scan
from millrace.serve.protocols.kserve import repository_backend as kserve_served
from millrace.serve.protocols.kserve.http import infer_request, json_spans
from millrace.serve.protocols.kserve.http.infer_request import read_infer
from millrace.serve.protocols.kserve.http.json_spans import Span
from millrace.serve.protocols.kserve.http.json_values import flat_array, from_json
from tests.support.kserve import one
from tests.support.repository import identity, in_process, write_models
from tests.support.server import Threaded


def nested(draw: random.Random, values: list[Any]) -> Any:
    """In lists of lists, in whatever way, none of them empty."""
    if len(values) < 2 or draw.random() < 0.3:
        return values
    cuts = sorted({0, len(values), *(draw.randrange(1, len(values)) for _ in range(draw.randrange(1, 4)))})
    return [nested(draw, values[a:b]) for a, b in itertools.pairwise(cuts)]


DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "FP32": lambda draw: draw.choice((draw.uniform(-9, 9), draw.randrange(99), 1e30, -0.0)),
    "INT32": lambda draw: draw.randrange(-(2**31), 2**31),
    "UINT64": lambda draw: draw.randrange(2**64),
    "BOOL": lambda draw: draw.random() < 0.5,
    "BYTES": lambda draw: "".join(draw.choices('a,"[]\\{}é☃\n', k=draw.randrange(6))),
}


@pytest.mark.parametrize("datatype", DRAWN)
@pytest.mark.parametrize("seed", range(3))
def test_in_pieces_as_at_once(datatype: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(infer_request, "_LARGE", 0)
    monkeypatch.setattr(json_spans, "_MIN_SPAN_BYTES", 8)
    for _ in range(20):
        monkeypatch.setattr(json_scan, "PIECE", draw.choice((3, 16, 50, 4096)))
        data = nested(draw, [DRAWN[datatype](draw) for _ in range(draw.randrange(1, 40))])
        other = one("FP32", [1], [7], id="x,[")
        asked = {"inputs": [one(datatype, [1], data), {**other, "name": "B"}], "id": '"[,"'}
        spaces = draw.choice(((",", ":"), (" , ", " : ")))
        text = json.dumps(asked, ensure_ascii=draw.random() < 0.5, separators=spaces)
        cut = json_spans.JsonWithSpans(memoryview(text.encode()))
        told = msgspec.json.decode(cut.rest)
        mine = json_spans.span_or_value(told["inputs"][0]["data"], cut.spans)
        assert told["id"] == '"[,"' and told["inputs"][1]["name"] == "B"
        if not isinstance(mine, Span):
            assert len(json.dumps(data)) < 40
            continue
        right = from_json("x", datatype, json.loads(json.dumps(data)), mine.n)
        assert mine.array("x", datatype, mine.n).tolist() == right.tolist()


def spans(text: str) -> Any:
    """What the data of such a request becomes."""
    cut = json_spans.JsonWithSpans(memoryview(b'{"inputs":[{"name":"a","data":%b}]}' % text.encode()))
    msgspec.json.decode(cut.rest)
    (span,) = cut.spans
    return span.array("a", "FP32", span.n)


FILL = ",".join(["1"] * 2000)
BROKEN = [
    f"[{FILL},]", f"[,{FILL}]", f"[{FILL}][1]", f"[[{FILL}][1]]", f"[[{FILL},],1]", f"[{FILL} 1]", f"[{FILL}}}",
    f"[{FILL},[1}}]", f"[{FILL},]]", f"[{FILL}", f'["a",{FILL}]', f"[null,{FILL}]", f"[{FILL},{{}}]", f"[{FILL},[]]",
    f"[[],{FILL}]", f"[{FILL},-]", f"[{FILL},tru]", f"[{FILL},[ \n ]]",
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: f"{text[:6]}..{text[-6:]}")
@pytest.mark.parametrize("size", [5, 1 << 18])
def test_what_is_no_json_is_refused(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_scan, "PIECE", size)
    with pytest.raises((StatusError, msgspec.DecodeError, ValueError)):
        spans(text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Threaded]:
    models = {"floats": identity("FP32", "-1"), "strings": identity("STRING", "-1"), "four": identity("FP32", "4")}
    root = write_models(tmp_path_factory.mktemp("models"), models)
    with in_process(root, allow_client_shm=True, grpc_port=0) as found:
        yield found


def ask(served: Threaded, model: str, body: bytes, path: str = "infer") -> httpx.Response:
    return httpx.post(f"{served.url}/v2/models/{model}/{path}", content=body, timeout=30)


def filled(item: str, n: int, shape: int, datatype: str = "FP32", name: str = "INPUT0") -> bytes:
    head = f'{{"inputs":[{{"name":"{name}","shape":[{shape}],"datatype":"{datatype}","data":['
    return f"{head}{','.join([item] * n)}]}}]}}".encode()


N = 300_000


def test_large_tensors_come_back(served: Threaded) -> None:
    values = (np.arange(N) % 977 / 8).tolist()
    told = ask(served, "floats", json.dumps({"inputs": [one("FP32", [N], values)]}).encode()).json()
    assert told["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [N], "data": values}]
    texts = [f'{i},["é' for i in range(N // 3)]
    told = ask(served, "strings", json.dumps({"inputs": [one("BYTES", [len(texts)], texts)]}).encode()).json()
    assert told["outputs"][0]["data"] == texts


HOSTILE = {
    "empty lists": ("floats", filled("[]", N, N), "lists without elements"),
    "another shape": ("floats", filled("0.5", N, N + 1), "Shape does not match true shape of 'data' field"),
    "another input": ("floats", filled("0.5", N, N, name="OTHER"), "unexpected inference input 'OTHER'"),
    "another datatype": ("floats", filled('"a"', N, N, "BYTES"), "inference input 'INPUT0' data-type is 'BYTES'"),
    "more than it takes": ("four", filled("0.5", N, N), "unexpected shape for input 'INPUT0'"),
    "objects": ("floats", b'{"inputs":[' + b",".join([b"{}"] * N) + b"]}", "values beside the data"),
    "parameters": ("floats", b'{"parameters":{"x":[' + b",".join([b"0"] * N) + b']},"inputs":[]}', "values beside"),
    "a list": ("floats", b"[" + b",".join([b"[]"] * N) + b"]", "values beside the data"),
    "depth": ("floats", b"[" * N, "JSON nesting depth exceeds maximum allowed limit (100)"),
    "cut off": ("floats", filled("0.5", N, N)[:-4], "failed to parse the request JSON buffer"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_does_not_fit_is_refused_without_decoding_its_data(
    served: Threaded, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, body, words = HOSTILE[what]
    sizes, decoded = list[int](), flat_array

    def watched(name: str, datatype: str, data: Any) -> Any:
        sizes.append(len(data))
        return decoded(name, datatype, data)

    monkeypatch.setattr(json_spans, "flat_array", watched)
    reply = ask(served, model, body)
    assert reply.status_code in (400, 500) and words in reply.json()["error"], reply.text[:300]
    assert not sizes


def test_nothing_is_decoded_in_larger_pieces(served: Threaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the interpreter, for which the event loop waits."""
    sizes, decode, encode = list[int](), msgspec.json.decode, msgspec.json.encode

    def decoding(text: Any, **more: Any) -> Any:
        sizes.append(len(text))
        return decode(text, **more)

    def encoding(value: Any) -> bytes:
        sizes.append(len(value) if isinstance(value, list) else 1)
        return encode(value)

    monkeypatch.setattr(msgspec.json, "decode", decoding)
    monkeypatch.setattr(msgspec.json, "encode", encoding)
    assert ask(served, "floats", filled("0.12345", N, N)).status_code == 200
    assert sizes and max(sizes) <= json_scan.PIECE + 16


def test_too_many_strings(served: Threaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_validation, "MAX_STRINGS", 1000)
    for n, is_right in ((1000, True), (1001, False)):
        raw, head = bytes(4 * n), json.dumps({"inputs": [one("BYTES", [n], parameters={"binary_data_size": 4 * n})]})
        lengths = {"Inference-Header-Content-Length": str(len(head))}
        url = f"{served.url}/v2/models/strings/infer"
        replies = [ask(served, "strings", filled('""', n, n, "BYTES")),
                   httpx.post(url, content=head.encode() + raw, headers=lengths)]  # fmt: skip
        for reply in replies:
            if is_right:
                assert reply.status_code == 200
            else:
                what = "input 'INPUT0' has 1001 strings, at most 1000 are supported"
                assert reply.status_code == 400 and what in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("trace/setting", "at most 1048576 are supported here"), ("logging", "at most 1048576 are supported here"),
        ("systemsharedmemory/region/a/register", "at most 1048576 are supported here"),
        ("repository/index", "at most 1048576 are supported here"),
        ("repository/models/floats/unload", "at most 65536 are supported here"),
        ("repository/models/floats/load", "at most 65536 are supported here"),
        ("models/floats/generate", "send larger tensors to /infer"),
    ],
)  # fmt: skip
def test_other_bodies_of_very_many_values(served: Threaded, path: str, words: str) -> None:
    body = b'{"x":[' + b",".join([b"[]"] * 400_000) + b"]}"
    reply = httpx.post(f"{served.url}/v2/{path}", content=body, timeout=30)
    assert reply.status_code == 400 and words in reply.json()["error"]


def test_others_are_answered_beside_a_large_request(served: Threaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the event loop nor smaller bodies wait for it, whatever their lane."""
    assert len(filled("0.5", N, N)) > 1_000_000
    monkeypatch.setattr(kserve_served, "_LANE_BYTES", (400_000, 1_000_000))
    begun, resume, array = threading.Event(), threading.Event(), Span.array

    def slow(span: Span, name: str, datatype: str, n: int) -> Any:
        if n == N:
            begun.set()
            assert resume.wait(20)
        return array(span, name, datatype, n)

    monkeypatch.setattr(Span, "array", slow)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(ask, served, "floats", filled("0.5", N, N))
        try:
            assert begun.wait(20)
            assert httpx.get(f"{served.url}/health").status_code == 200
            for n in (4, 30_000, 150_000):
                assert ask(served, "floats", filled("0.5", n, n)).status_code == 200
            assert not large.done()
        finally:
            resume.set()
        assert large.result(30).status_code == 200


def test_a_mark_cannot_be_written_by_a_client(tmp_path: Path) -> None:
    text = b'{"inputs":[{"name":"a","data":"millrace:0"}]}'
    assert json_spans.span_or_value(msgspec.json.decode(text)["inputs"][0]["data"], []) == "millrace:0"
    with pytest.raises(StatusError):
        read_infer(b"[" * 100_000, None, "m", None)  # type: ignore[arg-type]
