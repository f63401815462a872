"""What the kernel's files say of this machine, read from files that a test wrote."""

from pathlib import Path

import pytest

from millrace.machine import cpu, huge_pages, process


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "text, quota, cores",
    [("max 100000", None, 8), ("250000 100000", 2.5, 2), ("50000 100000", 0.5, 1), ("1600000 100000", 16.0, 8)],
)
def test_the_quota_limits_the_cores(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, text: str, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(cpu, "affinity_cores", lambda: 8)
    (cgroup / "cpu.max").write_text(text + "\n")
    assert cpu.quota_cores() == quota and cpu.usable_cores() == cores


def test_without_a_cgroup_all_cores_are_usable(cgroup: Path) -> None:
    assert cpu.quota_cores() is None and cpu.usable_cores() == cpu.affinity_cores() >= 1


def test_memory_is_what_the_cgroup_leaves(cgroup: Path) -> None:
    whole = cpu.memory()
    assert 0 < whole.available_bytes <= whole.total_bytes
    (cgroup / "memory.max").write_text(f"{64 << 20}\n")
    (cgroup / "memory.current").write_text(f"{24 << 20}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {8 << 20}\n")
    limited = cpu.memory()
    assert limited.total_bytes == 64 << 20 and limited.available_bytes == 48 << 20
    (cgroup / "memory.max").write_text("max\n")
    assert cpu.memory().total_bytes == whole.total_bytes


def test_caches_without_those_for_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CPUS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    entries = [("3", "Unified", "32M", "0-7,16-23"), ("1", "Data", "48K", "3"), ("1", "Instruction", "32K", "3"),
               ("2", "Unified", "1024K", "3,11")]  # fmt: skip
    for i, values in enumerate(entries):
        folder = tmp_path / "cpu3" / "cache" / f"index{i}"
        folder.mkdir(parents=True)
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            (folder / name).write_text(value + "\n")
    assert cpu.caches() == (cpu.Cache(1, 48 << 10, 1), cpu.Cache(2, 1 << 20, 2), cpu.Cache(3, 32 << 20, 16))
    monkeypatch.setattr(cpu, "_CPUS", tmp_path / "none")
    assert cpu.caches() == ()


def test_this_machine_is_told() -> None:
    assert cpu.cpu_model() and cpu.huge_pages() in ("always", "madvise", "never", "unknown")
    assert cpu.fingerprint("scalar") == {"cpu": cpu.cpu_model(), "isa": "scalar", "cores": cpu.usable_cores()}
    assert cpu.load() >= 0 and all(isinstance(flag, str) for flag in cpu.cpu_flags())


def test_huge_pages_are_counted() -> None:
    share = huge_pages.huge_page_share(8 << 20)
    assert 0 <= share <= 1
    if cpu.huge_pages() == "never":
        assert share == 0


def test_this_process() -> None:
    first = process.age_s()
    assert 0 < first < 24 * 3600 and first <= process.age_s()
    assert 1 << 20 < process.resident_bytes() < cpu.memory().total_bytes
