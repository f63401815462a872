"""The pages of `millrace bench` in Chromium, from their files: drawn, readable, and they ask for nothing."""

from pathlib import Path

import pytest

from millrace.bench.null_server.ledger import NullTiming
from millrace.bench.null_server.process import NullProcess
from tests.browser.conftest import DESKTOP, PHONE, Open
from tests.browser.looks import CONTRAST, contrasts, nameless, overflow
from tests.support.command_line import run_process

pytest.importorskip("playwright", reason="playwright is not installed")
# Of each page: how many drawings it has, headings, and shapes at least.
PAGES = {"run": (6, 7, 100), "infer": (1, 3, 4), "sweep": (1, 3, 3)}


@pytest.fixture(scope="module")
def page_files(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bench")
    timing = NullTiming(ttft_ms="normal:30,5", itl_ms="4", fault="break", fault_every=9)
    run = ["--concurrency", "4", "--request-count", "40", "--pattern", "20/8", "--pattern", "90/14"]
    infer = ["--model", "null", "-b", "1,4", "--concurrency", "1,2", "--request-count", "6", "--certify-s", "0"]
    sweep = ["--isl", "9", "--osl", "5", "--request-count", "12", "--most", "4"]
    queue = NullTiming(ttft_ms="20", itl_ms="2", instances=2, kv_tokens=100)
    with NullProcess(timing) as server, NullProcess(queue) as queueing:
        for command in (
            ["bench", server.url, *run, "-o", str(folder / "run"), "--goodput", "ttft:500"],
            ["bench", "infer", queueing.url, *infer, "-o", str(folder / "infer")],
            ["bench", "sweep", queueing.url, *sweep, "-o", str(folder / "sweep.html")],
        ):
            result = run_process(command, cache)
            assert result.code == 0, result.err
    reports = {name: folder / name / "report.html" for name in ("run", "infer")}
    return {**reports, "sweep": folder / "sweep.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_drawn(
    page_files: dict[str, Path], open_page: Open, name: str, size: tuple[int, int], scheme: str
) -> None:
    page_file, (n_drawings, n_headings, n_shapes) = page_files[name], PAGES[name]
    seen = open_page(page_file.as_uri(), "", size, scheme)
    page = seen.page
    assert [r.url for r in seen.requests] == [page_file.as_uri()] and seen.errors == []
    assert page.locator("svg[role=img]").count() == n_drawings and page.locator("h2").count() == n_headings
    boxes = page.evaluate(
        "() => [...document.querySelectorAll('rect, circle')].map((e) => e.getBoundingClientRect().toJSON())"
    )
    assert len(boxes) >= n_shapes and all(box["width"] > 0 for box in boxes)
    assert nameless(page) == [] and overflow(page) == 0
    assert min(contrasts(page).values()) >= CONTRAST, contrasts(page)
