"""How AIPerf's figures and ours are judged; the runs themselves are a night's."""

import sys
from pathlib import Path

import pytest

from millrace.bench.null_server.ledger import Sent
from tools.beside_aiperf.__main__ import Measured, compared, measured, theirs, true_of

TRUTH = {"ttft_ms": 100.0, "itl_ms": 20.0, "tokens_per_s": 700.0}


def one(ttft_ms: float, valid: bool | None = None, waiting_ms: float | None = None) -> Measured:
    stages = {} if waiting_ms is None else {"http_req_waiting": waiting_ms}
    return Measured({**TRUTH, "ttft_ms": ttft_ms}, TRUTH, stages, valid)


@pytest.mark.parametrize(
    "ours, theirs, valid, wrong",
    [
        (101, 103.9, True, 0), (101, 109, True, 0), (103, 109, True, 1), (103, 105, True, 0), (97, 101, True, 1),
        (103, 109, False, 0), (103, 109, None, 0),
    ],
)  # fmt: skip
def test_they_agree_or_ours_is_what_the_server_did(ours: float, theirs: float, valid: bool | None, wrong: int) -> None:
    figures, found = compared("x", [(one(ours, valid), one(theirs, waiting_ms=104))] * 3)
    assert len(found) == wrong and figures["x_certified"] == (valid is True)
    assert figures["x_ttft_ms_apart_percent"] == pytest.approx(100 * (theirs / ours - 1))
    assert figures["x_ttft_ms_ours_off_percent"] == pytest.approx(ours - 100)
    assert figures["x_itl_ms_apart_percent"] == pytest.approx(0) and figures["x_theirs_http_req_waiting_ms"] == 104


def test_what_the_server_did() -> None:
    """Two requests of 3 and 2 tokens, 100 and 300 ms to the first, 10 and 30 ms a token, within 1.33 s."""
    sent = [
        Sent("a", "chat", 5.0, 9, sent_s=[5.1, 5.11, 5.12], n_tokens=[1, 1, 1]),
        Sent("b", "chat", 6.0, 9, sent_s=[6.3, 6.33], n_tokens=[1, 1]),
    ]
    assert true_of(sent) == pytest.approx({"ttft_ms": 200, "itl_ms": 20, "tokens_per_s": 5 / 1.33})


@pytest.mark.nightly
def test_our_side_of_it_runs(tmp_path: Path) -> None:
    """And tells what the server did with these requests, the two first questions left out."""
    found = measured("ours", 20, (2, 4), tmp_path / "ours", Path(sys.executable).parent)
    assert found.truth["ttft_ms"] == pytest.approx(found.told["ttft_ms"], abs=15) and found.truth["ttft_ms"] >= 20
    assert found.truth["itl_ms"] == pytest.approx(20, rel=0.1) and found.stages == {}
    assert "--use-server-token-count" in theirs("http://x", 1, 1, tmp_path, tmp_path)
