"""The structure of JSON by NumPy, against a reader of one byte after the other."""

import json
import random

import numpy as np
import pytest

from millrace.serve.http import json_scan
from millrace.serve.http.errors import HttpError
from millrace.serve.http.json_scan import count_values, scan_pieces
from millrace.serve.llm.request_decoding import MAX_CONTAINERS, MAX_VALUES, decode
from millrace.serve.llm.request_types import CompletionRequest


def plainly(text: bytes) -> tuple[list[bool], list[int]]:
    """Which bytes lie outside of strings, and the depth after each."""
    plain, depths, depth, inside, escaped = list[bool](), list[int](), 0, False, False
    for byte in text:
        if byte == ord('"') and not escaped:
            inside = not inside
            plain.append(False)
        else:
            plain.append(not inside)
            depth += not inside and byte in b"[{"
            depth -= not inside and byte in b"]}"
        escaped = byte == ord("\\") and not escaped
        depths.append(depth)
    return plain, depths


WEIGHTS = [3, 3, 1, 1, 4, 1, 4, 1, 4, 2, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_structure_of_whatever_text(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        monkeypatch.setattr(json_scan, "PIECE", draw.choice((1, 2, 3, 7, 64)))
        text = bytes(draw.choices(b'[]{},:" \\a1\n', weights=WEIGHTS, k=draw.randrange(1, 200)))
        plain, depths = plainly(text)
        found = list(scan_pieces(text))
        assert np.concatenate([p.plain for p in found]).tolist() == plain, text
        assert np.concatenate([p.depth for p in found]).tolist() == depths, text
        commas = [p and byte == ord(",") for p, byte in zip(plain, text, strict=True)]
        assert np.concatenate([p.commas for p in found]).tolist() == commas, text


def test_counts_leave_strings_out() -> None:
    text = json.dumps({"text": 'a, [b], {c} \\" , ' * 20_000, "list": [[1, 2], {}, [], "x"]}).encode()
    assert count_values(text) == json_scan.JsonCounts(values=1 + 5 + 5, containers=5)
    assert count_values(b"[1, 2]") == json_scan.JsonCounts(values=3, containers=1)


@pytest.mark.parametrize("item", ["[]", "{}", "[[1]]", "1"])
def test_a_body_of_very_many_values_is_refused_before_it_is_decoded(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = MAX_CONTAINERS + 1 if item != "1" else MAX_VALUES + 1
    body = f'{{"model": "m", "prompt": "x", "metadata": [{",".join([item] * n)}]}}'.encode()
    monkeypatch.setattr("millrace.serve.llm.request_decoding.wire", lambda kind: pytest.fail("it was decoded"))
    with pytest.raises(HttpError, match="lists and objects, at most") as caught:
        decode(body, CompletionRequest)
    assert caught.value.status == 400


def test_a_long_text_full_of_commas_is_no_such_body() -> None:
    asked = decode(json.dumps({"model": "m", "prompt": "a,[b]{c}" * 400_000}).encode(), CompletionRequest)
    assert asked.prompt == "a,[b]{c}" * 400_000
