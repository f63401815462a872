"""What a server's /metrics say, as Prometheus stores it: names as they are written, each with its labels."""

import re
from typing import NamedTuple

import httpx

_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"(?:,|$)')


class Series(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def series(url: str) -> list[Series]:
    """Of every line. raises ValueError where one is none of Prometheus' text format"""
    found = []
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(line)
        labels = {m[1]: m[2] for m in _LABEL.finditer(match[2] or "")}
        if _LABEL.sub("", match[2] or ""):
            raise ValueError(line)
        found.append(Series(match[1], labels, float(match[3])))
    return found
