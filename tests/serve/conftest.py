"""One server for all tests that only ask it things, and a quick broom for those that wait for it."""

from collections.abc import Iterator

import pytest

from millrace.serve import connections
from millrace.serve import server as server_module
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, Running, running
from tests.serve.thinkers import KINDS, SPELLED, Thinker, thinker_of


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with running(Fake(aliases=("org/alias",)), ServerSettings(port=0, max_body_bytes=2**20)) as started:
        yield started


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SWEEP_TICKS", 1)
    monkeypatch.setattr(connections, "LINGER_S", 0.2)


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def thinker(request: pytest.FixtureRequest) -> Iterator[Thinker]:
    yield from thinker_of(request.param)


@pytest.fixture(scope="module", params=list(SPELLED.values()), ids=list(SPELLED))
def speller(request: pytest.FixtureRequest) -> Iterator[Thinker]:
    """Whose end of a thought is no token of its own."""
    yield from thinker_of(request.param)
