"""Nothing skips in silence: skips are counted by their reason, and `--skips known` fails on one that nobody explained.

`.ci/run` asks for that; parts of `make nightly` that exist to run what skips elsewhere ask for `--skips none`.
"""

import gc
import os
import ssl
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.support.drawn import register_profiles
from tests.support.shared import NOT_BESIDE, SHARED

# Why a test may be skipped in CI. What runs it elsewhere stands behind it.
KNOWN = {
    "llama-cpp-python is not installed": "`make nightly`, part llama-cpp",
    "extra: peers": "`make nightly`, part llama-cpp",
    "lm-eval is not installed": "`make nightly`, part mmlu",
    "playwright is not installed": "`make nightly`, part playground",
    "tritonclient is not installed": "`make nightly`, part tritonclient",
    "perf_analyzer is not installed": "`make nightly`, part perf-analyzer",
    "onnxruntime is not installed": "`make nightly`, part onnxruntime",
    "openvino is not installed": "`make nightly`, part openvino",
    "scikit-learn and skops are not installed": "`make nightly`, part sklearn",
    "tensorflow is not installed": "`make nightly`, part tensorflow",
    "xgboost is not installed": "`make nightly`, part xgboost",
    "cv2 is not installed": "`make nightly`, part model-imports",
    "sklearn.linear_model is not installed": "`make nightly`, part model-imports",
    "bitsandbytes is not installed": "`make nightly`, part bitsandbytes",
    "jsonschema is not installed": "`make nightly`, part json-schema",
    "promtool is not installed": "`make nightly`, part promtool",
    "OpenTelemetry's SDK is not installed": "`make nightly`, part opentelemetry",
    "rapidocr-onnxruntime is not installed": "`make nightly`, part ocr",
    "before torch 2.13 a CPU's _scaled_mm takes one scale": "torch 2.13, which is the one for development",
    "no IPv6 here": "machines with IPv6",
    "no font here": "machines with a font, like fonts-dejavu-core",
    "AVX2 is x86-64's": "x86-64",
    "a score of minus infinity is a weight of 0": "other classes of the same test",
    "needs g++-aarch64-linux-gnu and qemu-user-static": "CI installs them where it may",
    "needs an x86-64 and qemu-user-static": "CI installs it where it may",
    **({} if SHARED.is_dir() else {NOT_BESIDE: "checkouts with ../shared beside them"}),
}
register_profiles()
os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton looks at when it is first imported: there is no GPU here
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: threads of NumPy and PyTorch would wait for others'
    for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(_name, "1")
for _phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)  # httpx's 5 s may pass on a machine that is busy with other work
_REASONS = pytest.StashKey[dict[str, Counter[str]]]()  # of tests, and of modules that were not collected


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """Exclude objects of earlier tests from garbage collection, which takes half a second late in a suite."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """httpx reads them for each client, and for every question that is asked without one: 35 ms, hundreds of times."""
    with patch.object(ssl, "create_default_context", cache(ssl.create_default_context)):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skips", choices=("any", "known", "none"), default="any", help="which skips do not fail the run")


def pytest_configure(config: pytest.Config) -> None:
    # Containers often say that nothing compiled is to be kept: each process that a test starts then compiles all of
    # src/ anew, a quarter of a second of a core.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    config.stash[_REASONS] = {"tests": Counter[str](), "modules": Counter[str]()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    _note(item.config, "tests", report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    _note(collector.config, "modules", report)
    return report


def _note(config: pytest.Config, what: str, report: object) -> None:
    outcome, longrepr = getattr(report, "outcome", None), getattr(report, "longrepr", None)
    if outcome == "skipped" and isinstance(longrepr, tuple):
        config.stash[_REASONS][what][str(longrepr[2]).removeprefix("Skipped: ")] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended: each ran its own tests, and all collected the same modules."""
    told, here = getattr(node, "workeroutput", {}).get("skipped", {}), node.config.stash[_REASONS]
    here["tests"].update(told.get("tests", {}))
    here["modules"] |= Counter(told.get("modules", {}))


def _reasons(config: pytest.Config) -> Counter[str]:
    return sum(config.stash[_REASONS].values(), Counter[str]())


def _unexplained(config: pytest.Config) -> list[str]:
    allowed = {"any": None, "known": KNOWN, "none": {}}[config.getoption("--skips")]
    return [] if allowed is None else [r for r in _reasons(config) if not any(known in r for known in allowed)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unexplained = _unexplained(config)
    for reason, n in sorted(_reasons(config).items()):
        terminalreporter.write_line(f"{'NOT ALLOWED, ' if reason in unexplained else ''}skipped {n}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist: the one that started it judges
        session.config.workeroutput["skipped"] = {k: dict(v) for k, v in session.config.stash[_REASONS].items()}
        return
    if _unexplained(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
