"""Settings of `millrace bench infer`: the model, its inputs and the load levels."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.names import GRPC, HTTP, PATTERNS
from millrace.errors import ConfigError
from millrace.settings import Settings, setting

_MANY = 10_000_000
MAX_LEVELS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(Settings):
    model: str = setting("", "model name on the server")
    model_version: str = setting("", "model version; default: chosen by the server")
    protocol: str = setting(HTTP, "KServe protocol", choices=(HTTP, GRPC))
    tensor_format: str = setting("binary", "encoding of tensors over HTTP", choices=("binary", "json"))
    header: tuple[str, ...] = setting((), "header of each request", metavar="NAME:VALUE")
    timeout_s: float = setting(600.0, "timeout of an answer in seconds", low=0.001, high=1e6)
    shape: tuple[str, ...] = setting((), "shape of an input, without the batch dimension", metavar="NAME:DIMS")
    input_data: str = setting(
        "random", "inputs: generated, or a file or folder in perf_analyzer's format", metavar="random|zero|FILE"
    )
    string_length: int = setting(128, "length of random strings", low=0, high=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSettings(Settings):
    batch_size: tuple[str, ...] = setting((), "batch sizes: 1, or 1,8,32, or 1:8; default: 1", metavar="N")
    concurrency: tuple[str, ...] = setting(
        (), "concurrent requests, in the same notation; 1 unless a rate is given", metavar="N"
    )
    request_rate: tuple[str, ...] = setting((), "requests per second, in the same notation", metavar="X")
    arrival_pattern: str = setting("poisson", "arrival pattern of --request-rate", choices=PATTERNS)
    request_count: int | None = setting(None, "number of requests of each level", low=1, high=_MANY)
    duration_s: float | None = setting(
        None, "seconds of each level; 5 unless a count is given", low=0.001, high=1e6, metavar="X"
    )
    warmup_request_count: int | None = setting(
        None,
        "warm-up requests before each level, excluded from the results; default: the concurrency, at least 8",
        low=0,
        high=_MANY,
    )
    random_seed: int = setting(0, "seed of inputs and arrivals", low=0, high=2**63)


# Equivalent flags of perf_analyzer. docs/bench.md lists them.
ALIASES = {
    "-u": "--url", "-m": "--model", "-x": "--model-version", "-i": "--protocol", "-H": "--header", "-b": "--batch-size",
    "--concurrency-range": "--concurrency", "--request-rate-range": "--request-rate",
    "--request-distribution": "--arrival-pattern", "--input-tensor-format": "--tensor-format",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """A load level: either a concurrency, or a rate in requests/s."""

    batch: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def description(self) -> str:
        load = f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g} requests/s"
        return f"batch {self.batch}, {load}"


def levels(settings: LevelSettings) -> list[LoadLevel]:
    """Return the levels by batch size, then from the lightest load. raises ConfigError"""
    sizes = numbers("--batch-size", settings.batch_size or ("1",), 1 << 20)
    if settings.concurrency and settings.request_rate:
        raise ConfigError("--concurrency beside --request-rate", "one of them", "leave one out")
    if settings.request_rate:
        rates = numbers("--request-rate", settings.request_rate, 1e6, integers=False)
        load_levels = [LoadLevel(round(size), rate=rate) for size in sizes for rate in rates]
    else:
        at_a_time = numbers("--concurrency", settings.concurrency or ("1",), 65_536)
        load_levels = [LoadLevel(round(size), round(n)) for size in sizes for n in at_a_time]
    if len(load_levels) > MAX_LEVELS:
        raise ConfigError(f"{len(load_levels)} levels", f"at most {MAX_LEVELS}", "fewer batch sizes, or wider steps")
    return load_levels


def numbers(flag: str, texts: Sequence[str], high: float, integers: bool = True) -> list[float]:
    """`4`, `1,2,4` and perf_analyzer's `START:END[:STEP]`, in their order and each once. raises ConfigError"""
    values: set[float] = set()
    for part in (part for text in texts for part in text.split(",")):
        try:
            bounds = [float(n) for n in part.split(":")]
        except ValueError:
            bounds = []
        usable = 1 <= len(bounds) <= 3 and all(0 < n <= high and (n == round(n) or not integers) for n in bounds)
        first, last, step = (*bounds[:1], *bounds[:2][-1:], *(bounds[2:] or [1.0])) if usable else (1.0, 0.0, 1.0)
        if not 0 <= last - first <= MAX_LEVELS * step:
            expected = f"numbers up to {high:g} like 4, 1,2,4 or START:END:STEP"
            raise ConfigError(f'{flag} is "{part}"', expected, "write it so")
        values |= {first + i * step for i in range(int((last - first) / step + 1e-9) + 1)}
    return sorted(values)
