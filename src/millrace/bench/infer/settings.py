"""What `millrace bench infer` takes: which model, with what inputs, at which levels of load."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.bench.names import GRPC, HTTP, PATTERNS
from millrace.errors import ConfigError
from millrace.settings import Settings, setting

_MANY = 10_000_000
MOST_LEVELS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(Settings):
    model: str = setting("", "name of the model, as the server knows it")
    model_version: str = setting("", "its version; the server's choice unless said")
    protocol: str = setting(HTTP, "of KServe's two", choices=(HTTP, GRPC))
    tensor_format: str = setting("binary", "tensors over HTTP as bytes, or in the JSON", choices=("binary", "json"))
    header: tuple[str, ...] = setting((), "header of each request", metavar="NAME:VALUE")
    timeout_s: float = setting(600.0, "seconds that an answer may take", low=0.001, high=1e6)
    shape: tuple[str, ...] = setting((), "shape of an input, of one item of a batch", metavar="NAME:DIMS")
    input_data: str = setting(
        "random", "inputs: drawn, or from a file or folder as perf_analyzer has them", metavar="random|zero|FILE"
    )
    string_length: int = setting(128, "letters of random strings", low=0, high=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSettings(Settings):
    batch_size: tuple[str, ...] = setting((), "items of a request: 1, or 1,8,32, or 1:8; 1 unless said", metavar="N")
    concurrency: tuple[str, ...] = setting((), "requests at a time, likewise; 1 unless a rate is given", metavar="N")
    request_rate: tuple[str, ...] = setting((), "requests that arrive a second, likewise", metavar="X")
    arrival_pattern: str = setting("poisson", "of a request rate", choices=PATTERNS)
    request_count: int | None = setting(None, "end each level after so many requests", low=1, high=_MANY)
    duration_s: float | None = setting(
        None, "seconds of each level; 5 unless there is a count", low=0.001, high=1e6, metavar="X"
    )
    warmup_request_count: int | None = setting(
        None,
        "requests before each level, that do not count; as many as are sent at a time, 8 at least",
        low=0,
        high=_MANY,
    )
    random_seed: int = setting(0, "of inputs and arrivals", low=0, high=2**63)


# Flags of perf_analyzer that mean the same here. docs/bench.md lists them.
ALIASES = {
    "-u": "--url", "-m": "--model", "-x": "--model-version", "-i": "--protocol", "-H": "--header", "-b": "--batch-size",
    "--concurrency-range": "--concurrency", "--request-rate-range": "--request-rate",
    "--request-distribution": "--arrival-pattern", "--input-tensor-format": "--tensor-format",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """concurrency: requests at a time; rate: requests that arrive a second; one of them"""

    batch: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def says(self) -> str:
        load = f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g} requests/s"
        return f"batch {self.batch}, {load}"


def levels(settings: LevelSettings) -> list[Level]:
    """By batch size, then from the lightest load. raises ConfigError"""
    sizes = numbers("--batch-size", settings.batch_size or ("1",), 1 << 20)
    if settings.concurrency and settings.request_rate:
        raise ConfigError("--concurrency beside --request-rate", "one of them", "leave one out")
    if settings.request_rate:
        rates = numbers("--request-rate", settings.request_rate, 1e6, whole=False)
        found = [Level(round(size), rate=rate) for size in sizes for rate in rates]
    else:
        at_a_time = numbers("--concurrency", settings.concurrency or ("1",), 65_536)
        found = [Level(round(size), round(n)) for size in sizes for n in at_a_time]
    if len(found) > MOST_LEVELS:
        raise ConfigError(f"{len(found)} levels", f"at most {MOST_LEVELS}", "fewer batch sizes, or wider steps")
    return found


def numbers(flag: str, texts: Sequence[str], high: float, whole: bool = True) -> list[float]:
    """`4`, `1,2,4` and perf_analyzer's `START:END[:STEP]`, in their order and each once. raises ConfigError"""
    found: set[float] = set()
    for part in (part for text in texts for part in text.split(",")):
        try:
            given = [float(n) for n in part.split(":")]
        except ValueError:
            given = []
        usable = 1 <= len(given) <= 3 and all(0 < n <= high and (n == round(n) or not whole) for n in given)
        first, last, step = (*given[:1], *given[:2][-1:], *(given[2:] or [1.0])) if usable else (1.0, 0.0, 1.0)
        if not 0 <= last - first <= MOST_LEVELS * step:
            expected = f"numbers up to {high:g} like 4, 1,2,4 or START:END:STEP"
            raise ConfigError(f'{flag} is "{part}"', expected, "write it so")
        found |= {first + i * step for i in range(int((last - first) / step + 1e-9) + 1)}
    return sorted(found)
