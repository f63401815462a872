"""What whoever runs Triton suffers from, one test each, with the number that ../shared/anchors/server.md gives it.

Each is short and real; what it is about is tested more widely where it lives.
"""

import importlib.metadata
import os
import re
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from millrace.machine.cpu import usable_cores
from millrace.model_repository.execution import instance_worker
from millrace.serve.http import api_keys
from millrace.serve.http.api_key_file import KeyFile
from millrace.serve.settings import ServerSettings
from tests.e2e import triton_users
from tests.e2e.triton_users import FLOATS, SAME, becomes, children, floats, words
from tests.support.kserve import binary
from tests.support.python_models import ANY, HEAD, OWN, SAY, write
from tests.support.repository import ADD_SUB, in_process, serving, write_models

LOCALHOST = Path(__file__).parents[1] / "serve" / "localhost.pem"  # a certificate for 127.0.0.1, of these tests alone


@pytest.fixture(autouse=True)
def own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look only at processes of this test: one of an earlier test in this process may still be ending."""
    before = triton_users.children()
    monkeypatch.setattr(sys.modules[__name__], "children", lambda: triton_users.children() - before)


@pytest.fixture
def child_free() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before, "a process of a model was left behind"


def test_01_ten_gigabytes_of_image() -> None:
    """What `pip install millrace` brings, all together: no CUDA, no PyTorch, no container."""
    left, seen = ["millrace"], set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for told in importlib.metadata.requires(name) or ():
            needed, _, condition = told.partition(";")
            if "extra" not in condition:
                found = re.split(r"[^\w.-]", needed.strip())[0].lower()
                if list(importlib.metadata.distributions(name=found)):  # others are of other platforms
                    left.append(found)
    assert {"numpy", "uvicorn"} <= seen and not seen & {"torch", "triton", "transformers", "tritonclient"}
    assert not any("cuda" in name or "nvidia" in name for name in seen)
    sizes = [
        Path(str(file.locate())).stat().st_size for name in seen - {"millrace"}
        for file in importlib.metadata.files(name) or () if Path(str(file.locate())).is_file()
    ]  # fmt: skip
    assert sum(sizes) < 300 * 2**20, f"{sum(sizes) / 2**20:.0f} MiB"


def test_02_the_python_backend_wants_dev_shm(tmp_path: Path, child_free: None) -> None:
    """4 MiB there and back through shared memory without a name, so that /dev/shm may have any size."""
    write(tmp_path, "m", SAME, FLOATS % OWN)
    before, array = sorted(Path("/dev/shm").iterdir()), np.arange(1 << 20)
    with serving(tmp_path) as url:
        assert np.array_equal(floats(url, "m", array), array)
        (child,) = children()
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        assert "memfd:millrace" in maps and "/dev/shm" not in maps and sorted(Path("/dev/shm").iterdir()) == before


def test_03_shared_memory_grows_when_a_model_raises(tmp_path: Path, child_free: None) -> None:
    write(tmp_path, "m", HEAD + "    def execute(self, requests):\n        raise ValueError('no')\n", FLOATS % OWN)
    with serving(tmp_path) as url:
        array, raw = np.zeros(1 << 18, np.float32), {"name": "IN", "datatype": "FP32", "shape": [1 << 18]}
        body, headers = binary([{**raw, "parameters": {"binary_data_size": array.nbytes}}], array.tobytes())

        def mapped() -> int:
            lines = [line for line in maps.read_text().splitlines() if "memfd:millrace" in line]
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
            return sum(end - begin for begin, end in ranges)

        sizes = []
        (child,) = children()
        maps = Path(f"/proc/{child.pid}/maps")
        with httpx.Client(base_url=url) as client:
            for _ in range(150):
                said = client.post("/v2/models/m/infer", content=body, headers=headers)
                assert "ValueError: no" in said.json()["error"]
                sizes.append(mapped())
        assert 0 < max(sizes[10:]) == max(sizes[:10]) <= 64 << 20, "of 150 MiB"


def test_04_a_dead_stub_and_health_stays_200(tmp_path: Path, child_free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_worker, "RESTARTS_S", (0.3,))
    write(tmp_path, "m", HEAD + "    def execute(self, requests):\n        return [said('x')]\n" + SAY, ANY % OWN)
    with serving(tmp_path) as url:

        def ready() -> int:
            return httpx.get(f"{url}/v2/health/ready").status_code

        assert words(url, "m", "a").status_code == ready() == 200
        (child,) = children()
        os.kill(child.pid, signal.SIGKILL)
        becomes(lambda: ready() == 400)
        becomes(lambda: ready() == 200)
        assert words(url, "m", "a").status_code == 200 and child not in children()


def test_05_unloading_gives_no_memory_back(tmp_path: Path, child_free: None) -> None:
    """100 MiB that a model has are the system's again once it is unloaded: its process is gone."""
    code = "    def initialize(self, args):\n        self.weights = np.ones(100 << 20, np.uint8)\n"
    write(
        tmp_path, "m", HEAD + code + "    def execute(self, requests):\n        return [said('x')]\n" + SAY, ANY % OWN
    )

    def held() -> int:
        return sum(p.memory_info().rss for p in (psutil.Process(), *children()))

    with serving(tmp_path, model_control_mode="explicit") as url:
        before = held()
        assert httpx.post(f"{url}/v2/repository/models/m/load", timeout=20).status_code == 200
        assert held() - before > 100 << 20
        assert httpx.post(f"{url}/v2/repository/models/m/unload").status_code == 200
        becomes(lambda: not children())
        assert held() - before < 20 << 20


def test_06_dependencies_of_another_environment(tmp_path: Path, child_free: None) -> None:
    """A model with a package that the server does not have, of a version of its own, in an environment beside it."""
    code = "    def execute(self, requests):\n        import millwright\n        return [said(millwright.VERSION)]\n"
    where = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env" } }'
    write(tmp_path, "m", HEAD + code + SAY, ANY % where)
    site = tmp_path / "m" / "env" / "site"
    site.mkdir(parents=True)
    (site / "millwright.py").write_text("VERSION = '7.1'\n")
    python = tmp_path / "m" / "env" / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with serving(tmp_path) as url:
        assert words(url, "m", "a").json()["outputs"][0]["data"] == ["7.1"]
    with pytest.raises(ImportError):
        importlib.import_module("millwright")


def test_15_every_instance_takes_all_cores(tmp_path: Path, child_free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of a model has its share of threads, unless whoever started the server said how many."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    tell = "    def execute(self, requests):\n        import os\n" + (
        f"        return [said(' '.join(os.environ[name] for name in {names}))]\n"
    )
    for count in (1, 2 * usable_cores()):
        group = f"instance_group {{ kind: KIND_CPU count: {count} }}"
        write(tmp_path, f"m{count}", HEAD + tell + SAY, ANY % (OWN + group))
    with serving(tmp_path) as url:
        share = {count: max(1, usable_cores() // count) for count in (1, 2 * usable_cores())}
        for count, n in share.items():
            assert words(url, f"m{count}", "a").json()["outputs"][0]["data"] == [f"{n} {n} 7"]


def test_16_keys_are_fixed_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is added answers while the server runs, one that is taken out does not; each has its limits, and
    none is told to whoever listens: the server speaks TLS.
    """
    monkeypatch.setattr(api_keys, "LOOK_S", 0.1)
    path = tmp_path / "keys"
    path.write_text("first\n")
    root, trusted = write_models(tmp_path / "models", {"m": ADD_SUB}), ssl.create_default_context(cafile=str(LOCALHOST))
    settings = ServerSettings(port=0, key_file=KeyFile.read(path), ssl_certfile=str(LOCALHOST))
    with in_process(root, settings) as served, httpx.Client(verify=trusted, timeout=20) as client:
        assert served.url.startswith("https://")

        def status(key: str) -> int:
            return client.get(f"{served.url}/v2/models/m", headers={"authorization": f"Bearer {key}"}).status_code

        assert (status("first"), status("second")) == (200, 401)
        path.write_text("second name=web requests_per_minute=2\n")
        becomes(lambda: status("first") == 401)
        assert [status("second") for _ in range(3)] == [200, 200, 429]
        refused = client.get(f"{served.url}/metrics").text
        assert 'millrace:key_refused_total{key="web",limit="requests_per_minute"} 1.0' in refused
