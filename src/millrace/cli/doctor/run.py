"""Runs `millrace doctor`, whose options are in `options.py`: `--help` imports nothing else."""

from typing import Any

import click

from millrace.cli.console import heading, note, pairs, print_json, size, table
from millrace.cli.doctor.gpu import examine_gpu
from millrace.cli.doctor.model import examine_model
from millrace.compile.cache.rooflines import store_roofline
from millrace.engine.cuda.device_lookup import CPU
from millrace.engine.roofline_probe import roofline_here
from millrace.env import Env
from millrace.errors import ConfigError, MachineError
from millrace.kernels.library import usable_isas
from millrace.machine.cpu import (
    affinity_cores,
    caches,
    cpu_flags,
    cpu_model,
    huge_page_share,
    huge_pages,
    load,
    memory,
    quota_cores,
    usable_cores,
)
from millrace.machine.isa_flags import NEEDED
from millrace.machine.roofline import Rate, Roofline

LOW_MEMORY_BYTES = 2 << 30  # below this, doctor warns


def run(
    env: Env, model: str | None, threads: int | None, isa: str | None, device: str | None, as_json: bool
) -> None:  # fmt: skip
    """Run `millrace doctor`."""
    if model is not None:
        of_machine = {"--threads": threads, "--isa": isa, "--device": device}
        if flags := [name for name, value in of_machine.items() if value is not None]:
            raise ConfigError(
                f"{flags[0]} is given beside MODEL", "one of both: that is about a machine", "leave one out"
            )
        examine_model(model, env, as_json)
        return
    if device not in (None, CPU):
        if threads is not None or isa is not None:
            raise ConfigError(f"--{'threads' if isa is None else 'isa'} beside --device {device}",
                              "one of both: that is about a CPU's kernels", "leave one out")  # fmt: skip
        examine_gpu(device, as_json)
        return
    usable = usable_isas()
    if isa is not None and isa not in usable:
        reason = (
            f"it needs {', '.join(NEEDED[isa])}"
            if isa in NEEDED
            else f"this build knows {', '.join(NEEDED)} and scalar"
        )
        raise MachineError(
            f'instruction set "{isa}" cannot run here: {reason}',
            "one of " + ", ".join(usable),
            "leave --isa out, or choose one of them",
        )
    facts = _facts(usable, huge_page_share())
    roofline = roofline_here(isa or usable[0], threads or usable_cores())
    warnings = _warnings(facts)
    saved_in, why_not = _keep(env, isa or usable[0], roofline, facts)
    if as_json:
        print_json(
            {**facts, "measured_with": isa or usable[0], **roofline.as_dict(), "kept": saved_in, "warnings": warnings}
        )
        return
    _show(facts, isa or usable[0], roofline)
    note(f"Kept in {saved_in}: /metrics of `millrace serve` has it." if saved_in else f"Not kept: {why_not}.")
    for message, fix in warnings:
        note(f"{click.style('warning:', fg='yellow', bold=True)} {message}\n  to fix: {fix}")


def _facts(usable: list[str], share: float) -> dict[str, Any]:
    """Collect the facts about this machine as JSON data."""
    flags, here = cpu_flags(), memory()
    return {
        "cpu": cpu_model(),
        "isas": usable,
        "lacking": {isa: [f for f in needed if f not in flags] for isa, needed in NEEDED.items() if isa not in usable},
        "cores": usable_cores(),
        "cores_by_affinity": affinity_cores(),
        "cores_by_quota": quota_cores(),
        "caches": [{"level": c.level, "bytes": c.nbytes, "shared_by": c.shared_by} for c in caches()],
        "memory_bytes": here.total_bytes,
        "memory_available_bytes": here.available_bytes,
        "load": load(),
        "huge_pages": huge_pages(),
        "huge_page_share": round(share, 3),
    }


def _keep(env: Env, isa: str, roofline: Roofline, facts: dict[str, Any]) -> tuple[str | None, str]:
    """Save the roofline; return its path, or the reason why it is not saved."""
    if _is_busy(facts):
        return None, "other processes were busy, so it is no bound"
    try:
        return str(store_roofline(env.cache, isa, roofline)), ""
    except OSError as error:
        return None, f"the cache cannot be written ({error})"


def _is_busy(facts: dict[str, Any]) -> bool:
    return bool(facts["load"] > facts["cores"] / 2)


def _warnings(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (problem, remedy) for everything that slows down this machine."""
    warnings = []
    if facts["huge_pages"] == "never":
        warnings.append(
            (
                "huge pages are switched off: large weights are read more slowly",
                "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            )
        )
    elif facts["huge_page_share"] < 0.5:
        warnings.append(
            (
                f"a test allocation got only {facts['huge_page_share']:.0%} of its memory on huge pages",
                "free memory, or compact it: echo 1 | sudo tee /proc/sys/vm/compact_memory",
            )
        )
    quota = facts["cores_by_quota"]
    if quota is not None and quota < facts["cores_by_affinity"]:
        warnings.append(
            (
                f"the cgroup allows {quota:g} cores' worth of time on {facts['cores_by_affinity']} cores: threads that "
                "run over it are stopped for a while",
                f"raise the container's CPU limit to whole cores, or keep to --threads {max(1, int(quota))}",
            )
        )
    if "avx512" not in facts["isas"]:
        lacking = ", ".join(facts["lacking"].get("avx512", ())) or "support in this build"
        warnings.append(
            (f"no AVX-512 with VNNI and BF16 (lacking: {lacking})", "nothing; a newer CPU is several times faster")
        )
    if _is_busy(facts):
        warnings.append(
            (
                f"other processes are busy here (load {facts['load']:.1f}): the measured rates are too low",
                "stop them, and measure again",
            )
        )
    if facts["memory_available_bytes"] < LOW_MEMORY_BYTES:
        warnings.append((f"only {size(facts['memory_available_bytes'])} of memory are available", "free memory"))
    return warnings


def _show(facts: dict[str, Any], isa: str, roofline: Roofline) -> None:
    quota = facts["cores_by_quota"]
    lacking = "".join(f"; {isa} lacks {', '.join(flags)}" for isa, flags in facts["lacking"].items() if flags)
    cores = f"{facts['cores']} usable: {facts['cores_by_affinity']} by affinity, "
    heading("This machine")
    pairs(
        [
            ("processor", facts["cpu"]),
            ("instructions", ", ".join(facts["isas"]) + lacking),
            ("cores", cores + ("no cgroup limit" if quota is None else f"{quota:g} by cgroup")),
            ("caches", ", ".join(_cache(**c) for c in facts["caches"]) or "unknown"),
            ("memory", f"{size(facts['memory_available_bytes'])} available of {size(facts['memory_bytes'])}"),
            ("huge pages", f"{facts['huge_pages']}; a test allocation got {facts['huge_page_share']:.0%}"),
        ]
    )  # fmt: skip
    click.echo()
    heading(f"Reading, GB/s ({isa})")
    threads = f"{roofline.threads} threads"
    table(
        ("level", "1 thread", threads, "best", "median"),
        [
            (
                x.name,
                _giga(x.one_thread),
                _giga(x.all_threads),
                _best(x.all_threads),
                f"{x.all_threads.median / 1e9:,.0f}",
            )
            for x in roofline.levels
        ],
    )
    click.echo()
    heading(f"Matrix products, Gop/s ({isa})")
    table(
        ("precision", "1 thread", threads, "best", "instruction peak"),
        [
            (
                x.precision,
                _giga(x.one_thread),
                _giga(x.all_threads),
                _best(x.all_threads),
                _giga(x.peak) if x.peak else "-",
            )
            for x in roofline.compute
        ],
    )


def _cache(level: int, bytes: int, shared_by: int) -> str:
    return f"L{level} {size(bytes)}" + (f" shared by {shared_by}" if shared_by > 1 else "")


def _giga(rate: Rate) -> str:
    return f"{rate.usual / 1e9:,.0f}" if rate.usual >= 1e10 else f"{rate.usual / 1e9:.1f}"


def _best(rate: Rate) -> str:
    return f"{rate.best / 1e9:,.0f}"
