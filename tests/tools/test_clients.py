"""What a client's report means: gaps that are expected, and those that are not."""

from pathlib import Path

from tools.clients.__main__ import judged
from tools.clients.catalogue import CLIENTS
from tools.nightly.parts import CLIENTS as NIGHTLY

SCRIPTS = Path(__file__).parents[2] / "tools" / "clients" / "scripts"


def test_every_client_of_the_nights_has_a_script_that_tries_its_gaps() -> None:
    assert set(CLIENTS) == set(NIGHTLY)
    for name, client in CLIENTS.items():
        script = (SCRIPTS / f"{name.replace('-', '_')}_client.py").read_text()
        assert all(f'@check("{gap}")' in script for gap in client.gaps), name
        assert all("==" in package for package in client.packages), "pinned: a night compares with yesterday"


def test_a_gap_is_expected_or_an_error() -> None:
    works, fails = {"check": "chat", "ok": True}, {"check": "tools", "ok": False, "why": "refused"}
    assert judged([works, fails], {"tools": "not yet"}) == []
    assert judged([works, fails], {}) == ["tools: refused"]
    assert judged([works, {**fails, "ok": True}], {"tools": "not yet"}) == [
        "tools works: take the gap out of the catalogue"
    ]
    assert judged([works], {"tools": "not yet"}) == ["tools: the catalogue expects it, and nothing tried it"]
    assert judged([], {}) == ["nothing was tried"]
