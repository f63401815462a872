"""The page of `millrace size --report` in Chromium, from its file: drawn, readable, and it asks for nothing."""

from pathlib import Path

import pytest

from tests.browser.conftest import DESKTOP, PHONE, Open
from tests.browser.looks import CONTRAST, contrasts, nameless, overflow
from tests.support.command_line import run_process

pytest.importorskip("playwright", reason="playwright is not installed")
ASKED = ("--model", "llama-3-8b", "--isl", "500", "--osl", "50", "--ttft-ms", "500", "--hardware", "H100",
         "--precision", "fp8", "--tp", "1")  # fmt: skip
# Of each page: its questions, how many drawings it has, and bars at least.
PAGES: dict[str, tuple[tuple[str, ...], int, int]] = {
    "day": (("--average", "100", "--hours", "8", "--burst", "2", "--search-s", "20"), 6, 40),
    "peak": (("--rate", "500", "--no-simulate"), 4, 8),
    "there": (("--systems", "2", "--search-s", "20"), 3, 4),
}
PLOTS = ["Throughput against latency", "Time to the first token against load"]


@pytest.fixture(scope="module")
def pages(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """Each page's file, and the titles of the tables on the screen."""
    made = {}
    for name, (asked, *_) in PAGES.items():
        file = tmp_path_factory.mktemp("size") / f"{name}.html"
        result = run_process(["size", *ASKED, *asked, "--report", str(file)], cache)
        assert result.code == 0, result.err
        made[name] = file, [line for line in result.out.splitlines() if line[:1].isupper()]
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_drawn(
    pages: dict[str, tuple[Path, list[str]]], open_page: Open, name: str, size: tuple[int, int], scheme: str
) -> None:
    (page_file, tables), (_, n_drawings, n_bars) = pages[name], PAGES[name]
    seen = open_page(page_file.as_uri(), "", size, scheme)
    page = seen.page
    assert [r.url for r in seen.requests] == [page_file.as_uri()] and seen.errors == []
    assert page.locator("svg[role=img]").count() == n_drawings
    headings = page.locator("h2").all_inner_texts()
    assert headings[: len(PLOTS)] == PLOTS and len(headings) - len(PLOTS) == len(tables) > 5
    assert all(map(str.startswith, tables, headings[len(PLOTS) :])), "every table of the screen, in its order"
    boxes = page.evaluate(
        "() => [...document.querySelectorAll('rect, circle')].map((e) => e.getBoundingClientRect().toJSON())"
    )
    assert len(boxes) >= n_bars and all(box["width"] > 0 for box in boxes)
    assert nameless(page) == [] and overflow(page) == 0
    assert min(contrasts(page).values()) >= CONTRAST, contrasts(page)
