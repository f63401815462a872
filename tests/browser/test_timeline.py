"""The page `/timeline` in Chromium: it draws a run, and it stays what it is when it is saved and the server is gone."""

from pathlib import Path

import httpx
import pytest

from tests.browser.conftest import DESKTOP, PHONE, Open
from tests.browser.looks import CONTRAST, contrasts, nameless, overflow

pytest.importorskip("playwright", reason="playwright is not installed")

BLOCKS = """() => ({
  right: document.querySelector("svg[role=img]").getBoundingClientRect().right,
  labels: [...document.querySelectorAll("svg text")].map((e) => [e.textContent, e.getBoundingClientRect().toJSON()]),
  blocks: [...document.querySelectorAll("rect.block")].map((e) => e.getBoundingClientRect().toJSON()),
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_run_is_drawn(tiny: str, open_page: Open, size: tuple[int, int], scheme: str) -> None:
    name = f"drawn-{size[0]}-{scheme}"
    body = {
        "messages": [{"role": "user", "content": "Tell me of a mill."}],
        "max_tokens": 5,
        "n": 2,
        "ignore_eos": True,
    }
    httpx.post(tiny + "/v1/chat/completions", json=body, headers={"x-request-id": name}, timeout=60)
    seen = open_page(tiny, "/timeline", size, scheme)
    page = seen.page
    assert [r.url for r in seen.requests] == [tiny + "/timeline"]
    labels = page.locator("svg text").all_text_contents()
    assert f"{name} 0" in labels and f"{name} 1" in labels
    drawn = page.evaluate(BLOCKS)
    for row in (0, 1):  # beside each label: five tokens, and before the first of them the prompt
        (label,) = (box for text, box in drawn["labels"] if text == f"{name} {row}")
        beside = [box for box in drawn["blocks"] if abs(box["y"] - label["y"]) < 6]
        assert len(beside) >= 5 and all(box["width"] > 0 and box["x"] > label["x"] + label["width"] for box in beside)
    assert all(box["x"] + box["width"] <= drawn["right"] for _, box in drawn["labels"]), "no label is cut"
    assert nameless(page) == [] and overflow(page) == 0
    assert min(contrasts(page).values()) >= CONTRAST, contrasts(page)


def test_it_can_be_saved(tiny: str, open_page: Open, tmp_path: Path) -> None:
    seen = open_page(tiny, "/timeline")
    page = seen.page
    n = page.locator("rect.block").count()
    fill = page.locator("rect.block").first.evaluate("e => getComputedStyle(e).fill")
    saved = tmp_path / "timeline.html"
    saved.write_text(httpx.get(tiny + "/timeline").text)
    page.context.set_offline(True)
    page.goto(saved.as_uri())
    assert page.locator("rect.block").count() == n > 0
    assert page.locator("rect.block").first.evaluate("e => getComputedStyle(e).fill") == fill != "rgb(0, 0, 0)"
    assert seen.requests.pop().url == saved.as_uri(), "nothing but the file"
