"""What a client's report means: gaps that are expected, and those that are not."""

from pathlib import Path

from tools.clients.__main__ import judged
from tools.clients.catalogue import CLIENTS, Gap
from tools.nightly.parts import CLIENTS as NIGHTLY

SCRIPTS = Path(__file__).parents[2] / "tools" / "clients" / "scripts"


def test_every_client_of_the_nights_has_a_script_that_tries_its_gaps() -> None:
    assert set(CLIENTS) == set(NIGHTLY)
    for name, client in CLIENTS.items():
        script = (SCRIPTS / f"{name.replace('-', '_')}_client.py").read_text()
        assert all(f'@check("{gap}")' in script for gap in client.gaps), name
        assert all("==" in package for package in client.packages), "pinned: a night compares with yesterday"


def test_a_gap_is_expected_or_an_error() -> None:
    works, fails = {"check": "chat", "ok": True}, {"check": "tools", "ok": False, "why": "400: tools are refused"}
    gaps = {"tools": Gap("not yet", "tools are refused")}
    assert judged([works, fails], gaps) == []
    assert judged([works, fails], {}) == ["tools: 400: tools are refused"]
    assert judged([works, {**fails, "ok": True}], gaps) == ["tools works: take the gap out of the catalogue"]
    assert judged([works], gaps) == ["tools: the catalogue expects it, and nothing tried it"]
    assert judged([], {}) == ["nothing was tried"]


def test_a_gap_that_fails_for_another_reason_is_an_error() -> None:
    crashed = {"check": "tools", "ok": False, "why": "APIConnectionError: Connection error."}
    (said,) = judged([crashed], {"tools": Gap("not yet", "tools is not supported yet")})
    assert "tools is not supported yet" in said and "APIConnectionError" in said
