"""What the kernel's files say of this machine, read from files that a test wrote."""

from pathlib import Path

import pytest

from millrace.machine import cgroup as cgroups
from millrace.machine import cpu, process_info

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trees of control groups, empty; `tmp_path / "self"` says in which of them this process is."""
    monkeypatch.setattr(cgroups, "_TREES", tmp_path / "trees")
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", tmp_path / "self")
    (tmp_path / "trees").mkdir()
    return tmp_path / "trees"


def member(cgroup: Path, *lines: str) -> None:
    (cgroup.parent / "self").write_text("".join(f"{line}\n" for line in lines))


def limited(group: Path, limit: str, used: int, cache: int = 0, version: int = 2) -> None:
    group.mkdir(parents=True, exist_ok=True)
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        (group / f"memory.{name}").write_text(f"{value}\n")
    stat = "inactive_file" if version == 2 else "total_inactive_file"
    (group / "memory.stat").write_text(f"anon 1\nfile 2\n{stat} {cache}\nslab 3\n")


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


def test_the_least_quota_of_all_groups_counts(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member(cgroup, "0::/system.slice/millrace.service")
    (cgroup / "system.slice" / "millrace.service").mkdir(parents=True)
    (cgroup / "system.slice" / "cpu.max").write_text("300000 100000\n")
    (cgroup / "system.slice" / "millrace.service" / "cpu.max").write_text("max 100000\n")
    assert cpu.quota_cores() == 3.0
    member(cgroup, "3:cpu,cpuacct:/docker/abc", "0::/")
    group = cgroup / "cpu" / "docker" / "abc"
    group.mkdir(parents=True)
    for folder, quota in ((cgroup / "cpu", "-1"), (group, "150000")):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu.quota_cores() == 1.5


def test_memory_is_what_the_cgroup_leaves(cgroup: Path) -> None:
    whole = cpu.memory()
    assert 0 < whole.available_bytes <= whole.total_bytes
    limited(cgroup, str(64 * MIB), 24 * MIB, cache=8 * MIB)
    assert cpu.memory() == cpu.Memory(64 * MIB, 48 * MIB)
    limited(cgroup, "max", 24 * MIB)
    assert cpu.memory().total_bytes == whole.total_bytes
    limited(cgroup, str(64 * MIB), 65 * MIB)
    assert cpu.memory() == cpu.Memory(64 * MIB, 0)


def test_memory_is_what_the_tightest_group_leaves(cgroup: Path) -> None:
    """systemd's MemoryMax stands in a group above the process's own; what its other children use counts there."""
    member(cgroup, "0::/app.slice/app.service/worker")
    outer, middle = cgroup / "app.slice", cgroup / "app.slice" / "app.service"
    limited(middle / "worker", "max", 5 * MIB)
    limited(middle, str(40 * MIB), 10 * MIB)
    limited(outer, str(60 * MIB), 50 * MIB, cache=2 * MIB)
    assert cpu.memory() == cpu.Memory(40 * MIB, 12 * MIB)
    (middle / "memory.high").write_text(f"{20 * MIB}\n")  # MemoryHigh
    assert cpu.memory() == cpu.Memory(20 * MIB, 10 * MIB)
    member(cgroup, "0::/another.slice")
    assert cpu.memory().total_bytes > 1 << 30


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../host", "/not/here"])
@pytest.mark.parametrize("unified", ["", "unified"])
def test_a_container_sees_its_own_group_as_the_tree(cgroup: Path, path: str, unified: str) -> None:
    member(cgroup, "7:pids:/x", f"0::{path}")
    limited(cgroup / unified, str(64 * MIB), 24 * MIB)
    assert cpu.memory() == cpu.Memory(64 * MIB, 40 * MIB)


@pytest.mark.parametrize("at", ["memory", "memory/docker", "memory/docker/abc:1"])
def test_memory_of_version_1(cgroup: Path, at: str) -> None:
    member(cgroup, "9:name=systemd:/", "4:memory:/docker/abc:1", "0::/")
    limited(cgroup / "memory" / "docker" / "abc:1", "9223372036854771712", 10 * MIB, version=1)
    assert cpu.memory().total_bytes > 1 << 30
    limited(cgroup / at, str(64 * MIB), 24 * MIB, cache=8 * MIB, version=1)
    assert cpu.memory() == cpu.Memory(64 * MIB, 48 * MIB)


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
    share = cpu.huge_page_share(8 << 20)
    assert 0 <= share <= 1
    if cpu.huge_pages() == "never":
        assert share == 0


def test_this_process() -> None:
    first = process_info.age_s()
    assert 0 < first < 24 * 3600 and first <= process_info.age_s()
    assert 1 << 20 < process_info.resident_bytes() < cpu.memory().total_bytes
