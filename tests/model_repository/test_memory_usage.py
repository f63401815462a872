"""What a model's instances say that they hold of the machine's memory, in its statistics."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.model_repository import backends
from millrace.model_repository.backends.backend import Instance, InstanceContext, ModelBackend
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.serve.protocols.kserve.metadata import statistics
from tests.support.kserve_grpc import connected
from tests.support.loaded import becomes
from tests.support.python_models import ANY, HEAD, OWN, SAY, asked, loaded, text, write
from tests.support.repository import identity, in_process, write_models

HOLDS = """
    def initialize(self, args):
        self.held = np.ones(%d << 20, np.uint8)

    def execute(self, requests):
        import os
        return [said(str(os.getpid())) for _ in requests]
"""


def usage(repository: ModelRepository, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = repository.get(name).statistics_dict()["memory_usage"]
    return found


def test_a_process_of_its_own_tells_what_it_holds(tmp_path: Path) -> None:
    """Beside /proc, with what a model holds, before and after it is unloaded; of a process that died nothing."""
    for name, n_mib in (("small", 1), ("large", 64)):
        write(tmp_path, name, HEAD + HOLDS % n_mib + SAY, ANY % OWN)
    write(tmp_path, "here", HEAD + HOLDS % 1 + SAY, ANY % "")

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in ("small", "large", "here"):
                await repository.load(name)
            assert usage(repository, "here") == [], "what of this process is a model's nobody knows"
            ((small,), (large,)) = usage(repository, "small"), usage(repository, "large")
            assert (small["type"], small["id"]) == (large["type"], large["id"]) == ("CPU", 0)
            assert 60 << 20 < large["byte_size"] - small["byte_size"] < 90 << 20
            model = repository.get("large")
            pid = int((await model.infer(asked(model, IN=text("x")))).outputs["OUT"][0])
            status = Path(f"/proc/{pid}/status").read_text()
            (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
            (large,) = usage(repository, "large")
            assert large["byte_size"] == pytest.approx(int(line.split()[1]) << 10, rel=0.05)
            os.kill(pid, signal.SIGKILL)
            await becomes(lambda: usage(repository, "large") == [])
            await becomes(lambda: bool(usage(repository, "large")))
            anew = int((await model.infer(asked(model, IN=text("x")))).outputs["OUT"][0])
            await repository.unload("large")
            await becomes(lambda: not Path(f"/proc/{anew}").exists())

    asyncio.run(run())


class Known(Instance):
    def __init__(self, n_bytes: int | None) -> None:
        self._n_bytes = n_bytes

    def execute(self, requests: Any) -> None:
        raise NotImplementedError

    def memory_bytes(self) -> int | None:
        return self._n_bytes


class KnownBackend(ModelBackend):
    def instance(self, given: InstanceContext) -> Instance:
        return Known(None if given.name.endswith("_2") else 1 << 40)


def test_a_backend_tells_it_over_both_protocols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "known", KnownBackend)
    config = identity("FP32", "4", "instance_group { kind: KIND_CPU count: 3 }")

    write_models(tmp_path, {"k": config.replace('"identity"', '"known"'), "silent": config})
    with in_process(tmp_path, grpc_port=0) as served, connected(served.grpc_url) as client:
        everybody = httpx.get(f"{served.url}/v2/models/stats").json()["model_stats"]
        told = {one["name"]: one["memory_usage"] for one in everybody}
        assert told == {"k": [{"type": "CPU", "id": 0, "byte_size": 2 << 40}], "silent": []}
        (found,) = client.call("ModelStatistics", name="k").model_stats
        assert [(one.type, one.id, one.byte_size) for one in found.memory_usage] == [("CPU", 0, 2 << 40)]


def raises() -> Any:
    raise RuntimeError("the driver is away")


class Faulty(Known):
    """Its first instance says something else."""

    says: Callable[[], Any]

    def memory_bytes(self) -> int | None:
        return super().memory_bytes() if self._n_bytes is not None else self.says()


class FaultyBackend(ModelBackend):
    def __init__(self, says: Callable[[], Any]) -> None:
        self._says = says

    def instance(self, given: InstanceContext) -> Instance:
        made = Faulty(None if given.name.endswith("_0") else 1 << 20)
        made.says = self._says
        return made


FAULTS = [(raises, "RuntimeError: the driver is away"), (sys.exit, "SystemExit"), (lambda: "9", "TypeError"),
          (lambda: -1, "ValueError: -1 is no number"), (lambda: 1 << 57, "ValueError: 144115188075855872")]  # fmt: skip


@pytest.mark.parametrize(("says", "why"), FAULTS, ids=["raises", "exits", "text", "negative", "beyond"])
def test_a_backend_that_fails_to_tell_it_keeps_no_other_model_from_telling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, says: Callable[[], Any], why: str
) -> None:
    """What one instance says alone is not told either: it would pass for the whole."""
    monkeypatch.setitem(backends.BACKENDS, "known", KnownBackend)
    monkeypatch.setitem(backends.BACKENDS, "faulty", lambda: FaultyBackend(says))
    config = identity("FP32", "4", "instance_group { kind: KIND_CPU count: 2 }")
    names = {"a": "known", "b": "faulty", "c": "known"}
    write_models(tmp_path, {name: config.replace("identity", backend) for name, backend in names.items()})

    async def run() -> None:
        async with loaded(tmp_path) as repository:
            for name in names:
                await repository.load(name)
            for _ in range(2):
                stats = statistics(repository)
                held = {one["name"]: one["memory_usage"] for one in stats}
                whole = [{"type": "CPU", "id": 0, "byte_size": 2 << 40}]
                assert held == {"a": whole, "b": [], "c": whole}
            assert all(one["inference_count"] == 0 for one in stats), "all else is told of each"

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    (line,) = (record for record in caplog.records if "memory" in record.getMessage())
    assert line.getMessage() == "b version 1: its memory usage is unknown" and why in caplog.text
