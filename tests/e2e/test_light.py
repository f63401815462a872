"""A server of a built engine brings no framework along, and its first token comes soon after the process's start."""

from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from millrace.bench.server_process import ServerProcess

FRAMEWORKS = {"torch", "transformers", "scipy", "pandas"}  # folders of site-packages


def test_a_server_that_has_answered_holds_no_framework(tiny_engine: Path, cache: Path) -> None:
    spent = []
    for _ in range(3):  # the best of three, for the desk may be busy
        before = set(psutil.Process().children())
        with ServerProcess(tiny_engine, ("--log-level", "error")) as server:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            assert httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30).status_code == 200
            (process,) = set(psutil.Process().children()) - before
            used = process.cpu_times()  # as other tests run beside this one; the clock's: tests/cli/test_start.py
            spent.append(used.user + used.system)
            mapped = [Path(m.path) for m in process.memory_maps()]
            assert "libmillrace.so" in {path.name for path in mapped}, "the check sees no library at all"
            assert not [path for path in mapped if set(path.parts) & FRAMEWORKS]
            assert process.memory_info().rss < 400 * 2**20
            server.terminate()
            server.wait()
    assert min(spent) < 1.5, f"the first token took {min(spent):.2f} s of a core"
