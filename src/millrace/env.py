"""Environment variables: locations, and the permitted instruction sets. No other module reads them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.errors import ConfigError

# Thread-count variables of OpenMP (also PyTorch), MKL and OpenBLAS, each of which uses all cores by default.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Env:
    cache: Path  # $XDG_CACHE_HOME/millrace: built engines
    hf_home: Path | None  # HF_HOME: where huggingface_hub keeps its downloads
    hf_token: str | None  # HF_TOKEN
    hf_offline: bool  # HF_HUB_OFFLINE
    plain_terminal: bool  # NO_COLOR, or TERM=dumb: no colours, nothing that moves the cursor


def read_env(variables: Mapping[str, str] | None = None) -> Env:
    """Read the environment variables. raises ConfigError for an invalid value"""
    v = os.environ if variables is None else variables
    cache = Path(v["XDG_CACHE_HOME"]) if v.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    return Env(
        cache=cache / "millrace",
        hf_home=Path(v["HF_HOME"]) if v.get("HF_HOME") else None,
        hf_token=v.get("HF_TOKEN") or None,
        hf_offline=_flag(v, "HF_HUB_OFFLINE"),
        plain_terminal=is_plain_terminal(v),
    )


def widest_isa(variables: Mapping[str, str] | None = None) -> str | None:
    """Return MILLRACE_ISA: the widest instruction set that may be used (amx, avx512, avx2, scalar). None: the CPU's."""
    return (os.environ if variables is None else variables).get("MILLRACE_ISA") or None


def for_process(threads: int) -> dict[str, str]:
    """Return this process's environment for a child that shares the cores: `threads` threads unless already set."""
    return {**dict.fromkeys(_THREADS, str(threads)), **os.environ}


def is_plain_terminal(variables: Mapping[str, str] | None = None) -> bool:
    """Return whether to avoid colours. source: https://no-color.org, "present and not an empty string" """
    v = os.environ if variables is None else variables
    return bool(v.get("NO_COLOR")) or v.get("TERM") == "dumb"


def _flag(variables: Mapping[str, str], name: str) -> bool:
    value = variables.get(name, "").lower()
    if value not in _TRUE + _FALSE:
        raise ConfigError(f"{name} is {value!r}", "1 or 0", f"set {name} to 1 or 0, or unset it")
    return value in _TRUE
