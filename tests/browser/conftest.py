"""Chromium, as the distribution packages it, and a page in it that keeps what it asked for and complained of."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from millrace.bench.run.server_process import ServerProcess
from tests.support.cache import own_cache

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser")  # of the program, from distribution to distribution
DESKTOP, PHONE = (1280, 800), (360, 740)
KEY = "sesame-open-0123456789"


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail("there is no Chromium; to fix: apt-get install -y chromium, or what your distribution calls it")
    with sync_playwright() as playwright:
        # without its sandbox, which root may not have: it opens pages of ours only
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with own_cache(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="session")
def tiny(cache: Path) -> Iterator[str]:
    """The URL of `millrace serve tiny`."""
    with ServerProcess("tiny", ("--log-level", "warning")) as server:
        yield server.url


@pytest.fixture(scope="session")
def tiny_with_key(cache: Path) -> Iterator[str]:
    keys = cache / "keys.txt"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    with ServerProcess("tiny", ("--log-level", "warning", "--api-key-file", str(keys))) as server:
        yield server.url


@dataclass
class Seen:
    """A page, what it asked for, and what the console was told; `forgive` what a test provokes."""

    page: "Page"
    url: str
    requests: list["Request"] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def forgive(self, fragment: str) -> None:
        """There must be such errors, and they are meant."""
        assert any(fragment in error for error in self.errors), self.errors
        self.errors = [error for error in self.errors if fragment not in error]

    def heard(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):  # a breach of the content security policy is one as well
            self.errors.append(message.text)

    def wait(self, selector: str, pattern: str, within_s: float = 20) -> str:
        """The text of an element, as soon as it matches. The page's policy forbids `wait_for_function`."""
        until_s = time.monotonic() + within_s
        while not re.search(pattern, text := str(self.page.locator(selector).last.text_content())):
            assert time.monotonic() < until_s, f"{selector} says {text!r}, and not {pattern}"
            self.page.wait_for_timeout(50)
        return text

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Of the chats that were asked for."""
        return [r.post_data_json for r in self.requests if r.url.endswith("/v1/chat/completions")]

    @property
    def foreign(self) -> list[str]:
        """Requests that left for another origin than the server's, or the page itself."""
        own = urlsplit(self.url)[:2]
        return [r.url for r in self.requests if urlsplit(r.url.removeprefix("blob:"))[:2] != own]


Open = Callable[..., Seen]


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[Open]:
    """`open_page(url)`; at the end of the test no page may have asked elsewhere, or complained."""
    opened: list[Seen] = []

    def opening(url: str, path: str = "/", size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Seen:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        context.set_default_timeout(20_000)
        seen = Seen(context.new_page(), url)
        opened.append(seen)
        context.on("request", lambda request: seen.requests.append(request))
        context.on("console", lambda message: seen.heard(message))
        context.on("weberror", lambda error: seen.errors.append(str(error.error)))
        seen.page.goto(url + path)
        return seen

    yield opening
    for seen in opened:
        seen.page.context.close()
        assert not seen.errors and not seen.foreign, (seen.errors, seen.foreign)
