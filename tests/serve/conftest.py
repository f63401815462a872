"""One server for all tests that only ask it things, and a quick broom for those that wait for it."""

import json
from collections.abc import Iterator

import pytest

from millrace.engine.artifact.engine import Engine
from millrace.runtime.open_engine import OpenedEncoder, open_encoder
from millrace.runtime.settings import RunSettings
from millrace.serve.http import connection
from millrace.serve.http import uvicorn_server as web_module
from millrace.serve.settings import ServerSettings
from tests.serve.support import Fake, Running, running
from tests.serve.thinkers import ALL, DAY, KINDS, SPELLED, Ask, Thinker, streamed, thinker_of, whole
from tests.support.checkpoints import random_encoder
from tests.support.engines import build


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    with running(Fake(aliases=("org/alias",)), ServerSettings(port=0, max_body_bytes=2**20)) as started:
        yield started


@pytest.fixture(scope="package")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedEncoder]:
    """Of random weights, with vectors of 96 numbers; its config.json has shorter ones."""
    folder = tmp_path_factory.mktemp("encoder")
    checkpoint = random_encoder(folder / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [32, 64]}))
    build(checkpoint, folder / "engine", "fp32").close()
    opened = open_encoder("encoder", Engine.open(folder / "engine"), RunSettings())
    yield opened
    opened.close()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "SWEEP_TICKS", 1)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)


@pytest.fixture(
    scope="module", params=[*DAY, *(pytest.param(name, marks=pytest.mark.nightly) for name in KINDS if name not in DAY)]
)
def thinker(request: pytest.FixtureRequest) -> Iterator[Thinker]:
    yield from thinker_of(request.param)


@pytest.fixture(params=ALL)
def path(request: pytest.FixtureRequest) -> str:
    """Of each protocol."""
    return str(request.param)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "the other way"])
def ask(request: pytest.FixtureRequest, thinker: Thinker, path: str) -> Ask:
    """By day each model is asked by each protocol, which asks one whole and one streamed; at night all of them so."""
    return (whole, streamed)[(thinker.index + ALL.index(path) + request.param) % 2]


@pytest.fixture(scope="module", params=list(SPELLED))
def speller(request: pytest.FixtureRequest) -> Iterator[Thinker]:
    """Whose end of a thought is no token of its own."""
    yield from thinker_of(request.param)
