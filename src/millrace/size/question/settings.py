"""Settings of `millrace size`: its flags, the keys of a YAML file and the arguments of `plan`."""

from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.settings import Settings, setting


@dataclass(frozen=True, slots=True)
class DefaultValue:
    """Preset lengths of requests. tokens: input, output; whose: their source"""

    tokens: tuple[int, int]
    whose: str


LENGTHS = {
    "rag": DefaultValue((3500, 500), "documents that are looked up: the course's usual case"),
    "chat": DefaultValue((1155, 211), "mean of Azure's conversations of 2023"),
    "code": DefaultValue((2048, 28), "mean of Azure's completions of code of 2023"),
}
SEARCH_S = 120.0
READING = {"read": 0.200, "skim": 0.090}  # seconds a token, at 230 words a minute and at about 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings(Settings):
    """Model and request lengths."""

    model: str | None = setting(None, "model: a preset such as llama-3-8b, or the path of a config.json")
    isl: int | None = setting(None, "tokens of a prompt", low=1, high=1 << 24)
    osl: int | None = setting(None, "tokens of an answer", low=1, high=1 << 24)
    input: str | None = setting(None, "prompt length with its unit: '3500 words', '900 tokens'", metavar="LENGTH")
    output: str | None = setting(None, "answer length with its unit", metavar="LENGTH")
    preset: str | None = setting(None, "typical lengths in tokens: rag is 3,500 and 500", choices=tuple(LENGTHS))
    system: str | None = setting(None, "length of the system prompt, as a part of the prompt", metavar="LENGTH")
    documents: str | None = setting(
        None, "length of retrieved documents, as a part of the prompt: '5 x 400 words'", metavar="LENGTH"
    )
    history: str | None = setting(None, "length of earlier turns, as a part of the prompt", metavar="LENGTH")
    question: str | None = setting(None, "length of the question itself, as a part of the prompt", metavar="LENGTH")
    words_a_token: float = setting(0.75, "words per token, used to convert lengths given in words", low=0.05, high=5)
    pipeline: str | None = setting(
        None, "sequential calls of one request, 'guard>rag>answer', with tokens if known: 'guard:300/10'",
        metavar="CALLS",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSettings(Settings):
    """Load."""

    rate: float | None = setting(None, "requests per second at the peak", low=1e-9, high=1e9)
    average: float | None = setting(None, "requests per second on average", low=1e-9, high=1e9)
    users: float | None = setting(None, "number of users", low=1e-3, high=1e12)
    calls: str | None = setting(None, "calls per period: '30M/year', '5000/day'", metavar="N/PERIOD")
    requests_each: float | None = setting(
        None, "requests per user and day (default 3), or per call (default 1)", low=1e-6, high=1e6
    )
    hours: float | None = setting(None, "hours of the day in which all requests arrive; default: 24", low=0.1, high=24)
    daily: str | None = setting(None, "relative load of each of the 24 hours: '1,1,2,...'", metavar="N,...")
    burst: float = setting(1.0, "peak-to-average ratio of the load", low=1, high=1e4)
    percentile: float = setting(
        95.0, "percent of time windows that the peak covers, for Poisson arrivals; 0: the average of the busiest hours",
        low=0, high=99.9999,
    )  # fmt: skip
    window_s: float = setting(1.0, "length of a time window in seconds, over which a peak is counted",
                              low=1e-3, high=86_400)  # fmt: skip
    split: int = setting(1, "replicas with random routing; 1: any replica takes any request", low=1, high=100_000)
    trace: str | None = setting(None, "recorded requests: the peak is measured, not Poisson", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings(Settings):
    """Latency limits."""

    mode: str = setting(
        "streaming",
        "how answers are used: streamed to a person, by a program when complete, or without anyone waiting",
        choices=("streaming", "sequential", "offline"),
    )
    ttft_ms: float | None = setting(None, "limit on the time to the first token, in ms", low=0.001, high=1e9)
    itl_ms: float | None = setting(None, "limit on the time between tokens, in ms", low=0.001, high=1e9)
    e2e_ms: float | None = setting(None, "limit on the time to the last token, in ms", low=0.001, high=1e9)
    reading: str | None = setting(
        None, "limit on the time between tokens by reading speed: 200 ms to read, 90 ms to skim", choices=tuple(READING)
    )
    of: str = setting("mean", "statistic that the limits apply to", choices=("mean", "p95"))
    arrivals: str = setting(
        "poisson", "arrivals in the simulation: random, bursty (gamma), or a constant number in flight (closed), as "
        "in most benchmarks", choices=("poisson", "gamma", "closed"),
    )  # fmt: skip
    burstiness: float = setting(
        1.0, "shape of --arrivals gamma: 1 is Poisson, below 1 arrivals are bursty", low=0.01, high=1e4
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSettings(Settings):
    """Hardware."""

    hardware: tuple[str, ...] = setting(
        (), "devices to choose from, such as H100, L40S, 'H100 3g' (a MIG slice), this or all", metavar="NAME"
    )
    precision: tuple[str, ...] = setting(
        (),
        "precisions to choose from, of fp16, bf16, fp8, int8, fp4 and int4; default: fp16 and fp8 if the device has "
        "them, or that of --stack",
    )
    tp: int | None = setting(
        None, "devices that share each layer of an instance; default: the highest throughput", low=1, high=8
    )
    pp: int | None = setting(
        None, "pipeline stages of an instance (1 to 16), which may span several systems; default: 1",
        low=1, high=16,
    )  # fmt: skip
    factor: float = setting(
        1.0, "time of your software relative to the computed time; 0.5 is twice as fast", low=0.01, high=100
    )
    stack: str | None = setting(None, "serving overhead of your server, from `millrace size fit -o`", metavar="FILE")
    profile: str | None = setting(
        None, "measured steps of your server, from `millrace size verify -o`; with --hardware this",
        metavar="FILE",
    )  # fmt: skip
    measured: str | None = setting(None, "your measurements (CSV), used instead of computed points", metavar="FILE")
    utilisation: float = setting(1.0, "target utilisation (0-1)", low=0.01, high=1)
    spare: int = setting(0, "spare systems in addition: 1 is N+1", low=0, high=1000)
    systems: str | None = setting(
        None, "existing systems, '4' or '2 x A100, 1 x L40S': what they serve, or what a load needs in addition",
        metavar="N,...",
    )  # fmt: skip
    system_size: int = setting(8, "devices per system; 1: single cards", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings(Settings):
    """Search."""

    simulate: bool = setting(True, "simulate the server's scheduler to find capacities, which takes some seconds")
    search_s: float = setting(
        SEARCH_S, "time limit of the simulation in seconds; then the best result so far is returned, marked as cut",
        low=0.01, high=86_400,
    )  # fmt: skip
    routing: str = setting(
        "blind",
        "router in front of the instances: at random, to the fewest requests in flight, or to the cached prefix "
        "(needs --trace with hash_ids, or --system)",
        choices=("blind", "least-loaded", "prefix-aware"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoneySettings(Settings):
    """Costs."""

    prices: str | None = setting(None, "your prices (TOML), which override the bundled ones", metavar="FILE")
    tier: str | None = setting(
        None, "rent from this kind of provider only", choices=("hyperscaler", "neocloud", "marketplace")
    )


GROUPS = (RequestSettings, DemandSettings, LimitSettings, HardwareSettings, SearchSettings, MoneySettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings(Settings):
    """Load of the server."""

    isl: int = setting(128, "tokens of a prompt", low=1, high=1 << 20)
    osl: int = setting(64, "tokens of an answer", low=2, high=1 << 20)
    loads: str = setting("0.2,0.4,0.6,0.8,0.95", "loads as shares of the predicted capacity", metavar="SHARE,...")
    rounds: int = setting(3, "rounds over all loads", low=1, high=100)
    each_s: float = setting(
        10.0, "seconds of each load in a round, extended to at least eight requests", low=0.1, high=86_400
    )
    probe_s: float = setting(
        2.0, "seconds of each probe: one between two loads, three before the first", low=0.1, high=3600
    )
    header: tuple[str, ...] = setting((), "header of each request", metavar="NAME:VALUE")
    random_seed: int = setting(0, "seed of texts and arrivals", low=0, high=2**62)

    @property
    def shares(self) -> tuple[float, ...]:
        """Parse --loads. raises ConfigError"""
        try:
            shares = tuple(float(part) for part in self.loads.split(","))
        except ValueError:
            shares = ()
        if not 1 <= len(shares) <= 20 or not all(0.01 <= share <= 1.5 for share in shares):
            raise ConfigError(f'--loads is "{self.loads:.80}"', "1 to 20 shares of 0.01 to 1.5", "write 0.2,0.5,0.8")
        return shares
