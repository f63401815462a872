"""The page of `millrace bench` in Chromium, from its file: drawn, readable, and it asks for nothing."""

from pathlib import Path

import pytest

from millrace.bench.null_ledger import NullTiming
from millrace.bench.null_process import NullProcess
from tests.browser.conftest import DESKTOP, PHONE, Open
from tests.browser.looks import CONTRAST, contrasts, nameless, overflow
from tests.support.command_line import run_process

pytest.importorskip("playwright", reason="playwright is not installed")


@pytest.fixture(scope="module")
def page_file(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    with NullProcess(NullTiming(ttft_ms="normal:30,5", itl_ms="4", fault="break", fault_every=9)) as server:
        flags = ["--concurrency", "4", "--request-count", "40", "--pattern", "20/8", "--pattern", "90/14"]
        result = run_process(["bench", server.url, *flags, "-o", str(folder), "--goodput", "ttft:500"], cache)
    assert result.code == 0, result.err
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_is_drawn(page_file: Path, open_page: Open, size: tuple[int, int], scheme: str) -> None:
    seen = open_page(page_file.as_uri(), "", size, scheme)
    page = seen.page
    assert [r.url for r in seen.requests] == [page_file.as_uri()] and seen.errors == []
    assert page.locator("svg[role=img]").count() == 6 and page.locator("h2").count() == 7
    boxes = page.evaluate(
        "() => [...document.querySelectorAll('rect, circle')].map((e) => e.getBoundingClientRect().toJSON())"
    )
    assert len(boxes) > 100 and all(box["width"] > 0 for box in boxes)
    assert nameless(page) == [] and overflow(page) == 0
    assert min(contrasts(page).values()) >= CONTRAST, contrasts(page)
