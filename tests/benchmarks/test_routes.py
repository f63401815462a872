"""What is read from three routes' answers, and how their speeds are held against one another."""

import json
import struct
from pathlib import Path

import pytest

from benchmarks.tensors.routes import GENERATE, GRPC, OPENAI, TEXTS, WITHIN, command, goals, prompts, seconds_of


def test_texts_are_those_of_the_events() -> None:
    def events(of: list[dict[str, object]]) -> bytes:
        return b"".join(b"1f\r\ndata: " + json.dumps(one).encode() + b"\n\n\r\n" for one in of) + b"data: [DONE]\n\n"

    choices: list[dict[str, object]] = [
        {"choices": [{"text": "a mill"}]},
        {"choices": [{"text": "er"}]},
        {"choices": []},
    ]
    assert TEXTS[OPENAI](events(choices)) == "a miller"
    assert TEXTS[GENERATE](events([{"text_output": "a mill"}, {"text_output": "er"}])) == "a miller"


def test_texts_are_those_of_the_messages() -> None:
    from millrace.serve.protocols.kserve.grpc.protobuf_messages import message

    told = b""
    for text in ("a mill", "er"):
        reply = message("ModelStreamInferResponse")()
        for name, raw in (("finish_reason", b""), ("text_output", text.encode())):
            reply.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
            reply.infer_response.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
        content = reply.SerializeToString()
        told += struct.pack("<I", len(content)) + content
    assert TEXTS[GRPC](told) == "a miller"


def test_a_route_is_judged_by_rounds() -> None:
    """Two slow rounds of both are no slow route; a route that is slower in most rounds is."""
    samples = {
        OPENAI: [{"seconds": s} for s in (1.0, 4.0, 1.0)], GENERATE: [{"seconds": s} for s in (1.0, 4.0, 1.1)],
        GRPC: [{"seconds": s} for s in (1.05, 4.2, 1.0)],
    }  # fmt: skip
    even, slower = goals([{"users": 16, "samples": samples}])
    assert even["reached"] == 1 and even["verdict"] == "goal met"
    assert slower["reached"] == round(1 / 1.05, 3) < WITHIN and slower["verdict"] == "missed"


SAID = """
finished in {}, 6.45 req/s, 3.2KB/s
requests: 4 total, 4 started, 4 done, {} succeeded, {} failed, 0 errored, 0 timeout
status codes: 4 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 9.86KB (10100) total, 312B (312) headers (space savings 39.18%), 9.38KB (9600) data
"""


def test_seconds_are_those_of_the_client() -> None:
    for told, seconds in (("612.35ms", 0.61235), ("2.21s", 2.21), ("940us", 0.00094)):
        assert seconds_of(SAID.format(told, 4, 0), 4, 2600) == pytest.approx(seconds)
    with pytest.raises(AssertionError, match="1 failed"):
        seconds_of(SAID.format("2.21s", 3, 1), 4, 2400)
    with pytest.raises(AssertionError):
        seconds_of(SAID.format("2.21s", 4, 0), 16, 600)
    with pytest.raises(AssertionError, match="9600"):  # one of the four was an error, with the status 200
        seconds_of(SAID.format("2.21s", 4, 0), 4, 3200)


def test_every_route_asks_the_same(tmp_path: Path) -> None:
    """One client, as many requests, of the same prompt; gRPC's message has its five bytes in front."""
    asked = {name: command(name, 16, ("127.0.0.1:1", "127.0.0.1:2"), "m", tmp_path) for name in TEXTS}
    assert {(one[0], *(flag for flag in one if flag[:2] in ("-c", "-n", "-m", "-t"))) for one in asked.values()} == {
        ("h2load", "-t1", "-m1", "-c16", "-n16")
    }
    bodies = {name: Path(one[one.index("-d") + 1]).read_bytes() for name, one in asked.items()}
    assert all(prompts(1)[0].encode() in body for body in bodies.values())
    assert struct.unpack(">BI", bodies[GRPC][:5]) == (0, len(bodies[GRPC]) - 5)
    assert command(GENERATE, 1, ("127.0.0.1:1", "127.0.0.1:2"), "m", tmp_path)[3:5] == ["-c1", "-n1"]
