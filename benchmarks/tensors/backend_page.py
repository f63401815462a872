"""The table of what a request costs, in docs/repository.md: `python -m benchmarks.tensors.backend_page`.

It has every function and protocol that the newest run measured, each beside its peer.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.runs import Result, file_of, host, of_kind
from benchmarks.tables import table
from benchmarks.tensors.backend_models import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "repository.md"
BEGIN, END = "<!-- backends: written by python -m benchmarks.tensors.backend_page -->", "<!-- end of backends -->"
HEADER = ("Function", "Protocol", "Millrace, us", "peer, us", "ratio", "p99 of Millrace, ms", "p99 of the peer, ms")
_NAMES = {
    "python": "`model.py` that adds two vectors", "python-own-process": "the same in a process of its own",
    "ensemble": "ensemble of two `model.py`", "onnxruntime": "small network by ONNX Runtime",
    "openvino": "small network by OpenVINO", "llm": "language model (`tiny`), 16 tokens",
}  # fmt: skip
_PROTOCOLS = {"http": ("HTTP, JSON", "fastapi"), "grpc": ("gRPC, raw", "grpcio")}
Samples = Mapping[str, Sequence[Mapping[str, float]]]


def newest() -> Result:
    *_, (_, result) = of_kind("tensors.backends")
    return result


def text() -> str:
    """The table, its machine and its file."""
    result = newest()
    rounds = len(next(iter(next(iter(result["samples"].values())).values())))
    connections = " / ".join(result["samples"])
    label = (
        f"{host(result)}; {result['date']}, commit {result['commit']}; {connections} connections; medians of {rounds} "
        f"rounds, ratios within a round. `{file_of(result).strip('`')}`."
    )
    return f"{table(HEADER, rows(result))}\n\n{label}"


def rows(result: Result) -> Iterator[list[str]]:
    samples: Mapping[str, Samples] = result["samples"]
    for model, function in MODELS.items():
        for protocol, (name, family) in _PROTOCOLS.items():
            ours = [of_n.get(f"{model}, {protocol}") for of_n in samples.values()]
            if not all(ours):
                continue
            peers = [_best_peer(of_n, family, function) for of_n in samples.values()]
            pairs = [(one, peer) for one, peer in zip(ours, peers, strict=True) if one is not None]
            yield [
                _NAMES.get(model, model), name,
                _cell(f"{_median(one, 'cpu_us'):,.0f}" for one, _ in pairs),
                _cell("" if peer is None else f"{_median(peer, 'cpu_us'):,.0f}" for _, peer in pairs),
                _cell("" if peer is None else f"{_ratio(one, peer):.2f}" for one, peer in pairs),
                _cell(f"{_median(one, 'p99_ms'):.1f}" for one, _ in pairs),
                _cell("" if peer is None else f"{_median(peer, 'p99_ms'):.1f}" for _, peer in pairs),
            ]  # fmt: skip


def _best_peer(of_n: Samples, family: str, function: str) -> Sequence[Mapping[str, float]] | None:
    """Return the samples of the peer's route with the least CPU."""
    found = [of_n[name] for name in of_n if name.startswith(family) and name.endswith(f", {function}")]
    return min(found, key=lambda one: _median(one, "cpu_us"), default=None)


def _median(samples: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in samples)


def _ratio(ours: Sequence[Mapping[str, float]], peer: Sequence[Mapping[str, float]]) -> float:
    return statistics.median(a["cpu_us"] / b["cpu_us"] for a, b in zip(ours, peer, strict=True))


def _cell(parts: Iterator[str]) -> str:
    found = [*parts]
    return " / ".join(found) if any(found) else ""


def written(page: str) -> str:
    """Return the page with the table of the newest run between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
