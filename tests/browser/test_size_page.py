"""The page of `millrace size --report` in Chromium, from its file: drawn, readable, and it asks for nothing."""

from pathlib import Path

import pytest

from tests.browser.conftest import DESKTOP, PHONE, Open
from tests.browser.looks import CONTRAST, contrasts, nameless, overflow
from tests.support.command_line import run_process

pytest.importorskip("playwright", reason="playwright is not installed")
ASKED = ("--model", "llama-3-8b", "--isl", "500", "--osl", "50", "--ttft-ms", "500", "--hardware", "H100",
         "--precision", "fp8", "--tp", "1", "--search-s", "20")  # fmt: skip
# Of each page: its questions, how many drawings it has, headings, and bars at least.
PAGES: dict[str, tuple[tuple[str, ...], int, int, int]] = {
    "day": (("--average", "100", "--hours", "8", "--burst", "2"), 6, 9, 40),
    "peak": (("--rate", "500", "--no-simulate"), 4, 7, 8),
    "there": (("--systems", "2"), 3, 5, 4),
}


@pytest.fixture(scope="module")
def page_files(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    files = {name: tmp_path_factory.mktemp("size") / f"{name}.html" for name in PAGES}
    for name, (asked, *_) in PAGES.items():
        result = run_process(["size", *ASKED, *asked, "--report", str(files[name])], cache)
        assert result.code == 0, result.err
    return files


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_drawn(
    page_files: dict[str, Path], open_page: Open, name: str, size: tuple[int, int], scheme: str
) -> None:
    page_file, (_, n_drawings, n_headings, n_bars) = page_files[name], PAGES[name]
    seen = open_page(page_file.as_uri(), "", size, scheme)
    page = seen.page
    assert [r.url for r in seen.requests] == [page_file.as_uri()] and seen.errors == []
    drawings, headings = page.locator("svg[role=img]").count(), page.locator("h2").count()
    assert (drawings, headings) == (n_drawings, n_headings)
    boxes = page.evaluate(
        "() => [...document.querySelectorAll('rect, circle')].map((e) => e.getBoundingClientRect().toJSON())"
    )
    assert len(boxes) >= n_bars and all(box["width"] > 0 for box in boxes)
    assert nameless(page) == [] and overflow(page) == 0
    assert min(contrasts(page).values()) >= CONTRAST, contrasts(page)
