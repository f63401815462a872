"""What is read from three routes' answers, and how their speeds are held against one another."""

import json
import struct

from benchmarks.tensors.routes import GENERATE, GRPC, OPENAI, TEXTS, WITHIN, goals


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
    from millrace.serve.kserve.messages import message

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
