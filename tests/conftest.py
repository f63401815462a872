"""Nothing skips in silence: skips are counted by their reason, and `--skips known` fails on one that nobody explained.

`.ci/run` asks for that; parts of `make nightly` that exist to run what skips elsewhere ask for `--skips none`.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.drawn import register_profiles
from tests.support.shared import NOT_BESIDE, SHARED

# Why a test may be skipped in CI. What runs it elsewhere stands behind it.
KNOWN = {
    "llama-cpp-python is not installed": "`make nightly`, part llama-cpp",
    "extra: peers": "`make nightly`, part llama-cpp",
    "lm-eval is not installed": "`make nightly`, part mmlu",
    "playwright is not installed": "`make nightly`, part playground",
    "tritonclient is not installed": "`make nightly`, part tritonclient",
    "no IPv6 here": "machines with IPv6",
    "no font here": "machines with a font, like fonts-dejavu-core",
    "AVX2 is x86-64's": "x86-64",
    "a score of minus infinity is a weight of 0": "other classes of the same test",
    "needs g++-aarch64-linux-gnu and qemu-user-static": "CI installs them where it may",
    "needs an x86-64 and qemu-user-static": "CI installs it where it may",
    **({} if SHARED.is_dir() else {NOT_BESIDE: "checkouts with ../shared beside them"}),
}
register_profiles()
_REASONS = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skips", choices=("any", "known", "none"), default="any", help="which skips do not fail the run")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REASONS] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    _note(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    _note(collector.config, report)
    return report


def _note(config: pytest.Config, report: object) -> None:
    outcome, longrepr = getattr(report, "outcome", None), getattr(report, "longrepr", None)
    if outcome == "skipped" and isinstance(longrepr, tuple):
        config.stash[_REASONS][str(longrepr[2]).removeprefix("Skipped: ")] += 1


def _unexplained(config: pytest.Config) -> list[str]:
    allowed = {"any": None, "known": KNOWN, "none": {}}[config.getoption("--skips")]
    reasons = config.stash[_REASONS]
    return [] if allowed is None else [r for r in reasons if not any(known in r for known in allowed)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unexplained = _unexplained(config)
    for reason, n in sorted(config.stash[_REASONS].items()):
        terminalreporter.write_line(f"{'NOT ALLOWED, ' if reason in unexplained else ''}skipped {n}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unexplained(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
