"""A server of a built engine has loaded no framework when it has answered (its time: tests/cli/test_start.py)."""

from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from millrace.bench.run.server_process import ServerProcess

FRAMEWORKS = {"torch", "transformers", "huggingface_hub", "rich", "scipy", "pandas"}  # folders of site-packages


def test_a_server_that_has_answered_holds_no_framework(tiny_engine: Path, cache: Path) -> None:
    before = set(psutil.Process().children())
    with ServerProcess(tiny_engine, ("--log-level", "error")) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        assert httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30).status_code == 200
        (process,) = set(psutil.Process().children()) - before
        mapped = [Path(m.path) for m in process.memory_maps()]
        assert "libmillrace.so" in {path.name for path in mapped}, "the check sees no library at all"
        assert not [path for path in mapped if set(path.parts) & FRAMEWORKS]
        assert process.memory_info().rss < 400 * 2**20
        server.terminate()
        server.wait()
