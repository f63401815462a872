"""`millrace` runs a command line in this process, with a cache of the test's own; `engine` is a built `tiny`."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from millrace.cli.demo import run as demo
from millrace.cli.doctor import run as doctor
from millrace.cli.main import run
from millrace.compile.builder import build_engine
from millrace.compile.resolve_model import BUNDLED
from millrace.compile.settings import BuildSettings
from millrace.engine.roofline_probe import roofline_here
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import usable_cores
from millrace.machine.roofline import Roofline
from tests.support.command_line import Result

Millrace = Callable[..., Result]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As before: `millrace serve` leaves them ignored, for it ends its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def built_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For reading only."""
    folder = tmp_path_factory.mktemp("built") / "tiny.engine"
    build_engine("tiny", BUNDLED / "tiny", folder, BuildSettings(precision="w4a8", tune=0))
    return folder


@pytest.fixture(scope="session")
def roofline() -> Roofline:
    """This machine's, measured once: that takes seven seconds."""
    return roofline_here(usable_isas()[0], usable_cores())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, roofline: Roofline) -> list[tuple[str, int]]:
    """`demo` and `doctor` get it; gives the instruction sets and threads that they ask for."""
    asked: list[tuple[str, int]] = []

    def measure(isa: str, threads: int) -> Roofline:
        asked.append((isa, threads))
        return roofline

    for module in (demo, doctor):
        monkeypatch.setattr(module, "roofline_here", measure)
    return asked


@pytest.fixture
def engine(built_tiny: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(built_tiny, tmp_path / "tiny.engine"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a null server."""
    with NullProcess(NullTiming(ttft_ms="10", itl_ms="2")) as server:
        yield server.url


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def millrace(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Millrace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run_here(*arguments: str | Path) -> Result:
        capsys.readouterr()
        code = run([str(a) for a in arguments])
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return run_here
