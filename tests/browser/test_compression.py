"""compression.html in Chromium, from the disk and without a network: it fits a phone, by day and by night."""

import json
from pathlib import Path

import pytest

from millrace.compress.checkpoint.compression_record import RECORD
from millrace.compress.report.page import PAGE, write_page
from tests.browser.conftest import DESKTOP, PHONE, Open
from tests.browser.looks import CONTRAST, contrasts, nameless, overflow
from tests.compress.test_page import WHOLE, WORST

pytest.importorskip("playwright", reason="playwright is not installed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_report_opens_offline(tmp_path: Path, open_page: Open, size: tuple[int, int], scheme: str) -> None:
    (tmp_path / RECORD).write_text(json.dumps(WHOLE))
    write_page(tmp_path)
    seen = open_page((tmp_path / PAGE).as_uri(), "", size, scheme)
    page = seen.page
    assert len(seen.requests) == 1 and page.title() == "mill.gguf, compressed by int4-gptq-clip"
    cells = page.locator("#worst tr:nth-child(2) td").all_inner_texts()
    assert cells[0] == WORST and page.locator("#speed").is_visible()
    page.locator("summary").click()
    assert page.locator("#layers").is_visible()
    assert nameless(page) == [] and overflow(page) == 0
    assert min(contrasts(page).values()) >= CONTRAST, contrasts(page)
