"""The six questions, and what helps to answer them: flags, keys of a YAML file and arguments of `plan` alike."""

from dataclasses import dataclass

from millrace.errors import ConfigError
from millrace.settings import Settings, setting


@dataclass(frozen=True, slots=True)
class DefaultValue:
    """Lengths of requests. tokens: in, out; whose: where they come from"""

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
    """What is asked of which model."""

    model: str | None = setting(None, "which model: a preset such as llama-3-8b, or the path of a config.json")
    isl: int | None = setting(None, "tokens of a prompt", low=1, high=1 << 24)
    osl: int | None = setting(None, "tokens of an answer", low=1, high=1 << 24)
    input: str | None = setting(None, "the prompt's length with its unit: '3500 words', '900 tokens'", metavar="LENGTH")
    output: str | None = setting(None, "the answer's length with its unit", metavar="LENGTH")
    preset: str | None = setting(None, "usual lengths, in tokens: rag is 3,500 and 500", choices=tuple(LENGTHS))
    system: str | None = setting(None, "of the prompt: the system prompt's length", metavar="LENGTH")
    documents: str | None = setting(None, "of the prompt: what was looked up, '5 x 400 words'", metavar="LENGTH")
    history: str | None = setting(None, "of the prompt: earlier turns", metavar="LENGTH")
    question: str | None = setting(None, "of the prompt: the question itself", metavar="LENGTH")
    words_a_token: float = setting(0.75, "words in a token, where lengths are in words", low=0.05, high=5)
    pipeline: str | None = setting(
        None, "calls for one request, 'guard>rag>answer'; a call may say its tokens, 'guard:300/10'", metavar="CALLS"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(Settings):
    """How many requests come."""

    rate: float | None = setting(None, "requests a second at the peak", low=1e-9, high=1e9)
    average: float | None = setting(None, "requests a second on average", low=1e-9, high=1e9)
    users: float | None = setting(None, "people who ask", low=1e-3, high=1e12)
    calls: str | None = setting(None, "calls in a period: '30M/year', '5000/day'", metavar="N/PERIOD")
    requests_each: float | None = setting(
        None, "requests of a user a day (default 3), or of a call (default 1)", low=1e-6, high=1e6
    )
    hours: float | None = setting(None, "hours of a day in which all of them come; default: 24", low=0.1, high=24)
    daily: str | None = setting(None, "how busy each of 24 hours is, beside the others: '1,1,2,...'", metavar="N,...")
    burst: float = setting(1.0, "how much more than the average the busiest time has", low=1, high=1e4)
    percentile: float = setting(
        95.0, "percent of windows that the peak covers, where arrivals are Poisson; 0: the busiest time's average",
        low=0, high=99.9999,
    )  # fmt: skip
    window_s: float = setting(1.0, "seconds over which a peak is counted", low=1e-3, high=86_400)
    split: int = setting(1, "replicas among which requests fall blindly; 1: any takes any", low=1, high=100_000)
    trace: str | None = setting(None, "recorded requests: the peak is theirs, not Poisson's", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings(Settings):
    """What users may wait for."""

    mode: str = setting(
        "streaming", "who reads: a person as it is written, a program when it is whole, or nobody who waits",
        choices=("streaming", "sequential", "offline"),
    )  # fmt: skip
    ttft_ms: float | None = setting(None, "at most until the first token, in ms", low=0.001, high=1e9)
    itl_ms: float | None = setting(None, "at most between tokens, in ms", low=0.001, high=1e9)
    e2e_ms: float | None = setting(None, "at most until the last token, in ms", low=0.001, high=1e9)
    reading: str | None = setting(
        None, "between tokens, what people take: 200 ms to read, 90 ms to skim", choices=tuple(READING)
    )
    of: str = setting("mean", "what limits are on", choices=("mean", "p95"))
    arrivals: str = setting(
        "poisson", "how requests come in a simulation: by chance, in bursts (gamma), or a new one when one is answered "
        "(closed), as servers are mostly measured", choices=("poisson", "gamma", "closed"),
    )  # fmt: skip
    burstiness: float = setting(1.0, "of --arrivals gamma: 1 is poisson, below 1 in bursts", low=0.01, high=1e4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSettings(Settings):
    """On what it may run."""

    hardware: tuple[str, ...] = setting(
        (), "devices to choose from, such as H100, L40S, 'H100 3g' (a MIG slice), this or all", metavar="NAME"
    )
    precision: tuple[str, ...] = setting(
        (),
        "precisions to choose from, of fp16, bf16, fp8, int8, fp4 and int4; default: fp16 and fp8, as devices have "
        "them, or that of --stack",
    )
    tp: int | None = setting(
        None, "devices that share each layer of an instance; default: what serves most", low=1, high=8
    )
    pp: int | None = setting(
        None, "stages of an instance, each with a part of the layers (1 to 16), also over several systems; default: 1",
        low=1, high=16,
    )  # fmt: skip
    factor: float = setting(1.0, "how many times as long as computed your software takes", low=0.01, high=100)
    stack: str | None = setting(None, "your own server, as `millrace size fit -o` wrote it", metavar="FILE")
    profile: str | None = setting(
        None, "your own server's measured steps, as `millrace size verify -o` wrote them; with --hardware this",
        metavar="FILE",
    )  # fmt: skip
    measured: str | None = setting(None, "your own measurements instead of a model: CSV", metavar="FILE")
    utilisation: float = setting(1.0, "share of what systems can that is planned with", low=0.01, high=1)
    spare: int = setting(0, "systems beyond that: 1 is N+1", low=0, high=1000)
    systems: str | None = setting(
        None, "systems that are there, '4' or '2 x A100, 1 x L40S': what they serve, or what a load needs beside them",
        metavar="N,...",
    )  # fmt: skip
    system_size: int = setting(8, "devices of a system; 1: single cards", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings(Settings):
    """How the answer is looked for."""

    simulate: bool = setting(True, "find what is chosen by simulation with the scheduler that serves: some seconds")
    search_s: float = setting(
        SEARCH_S, "seconds of simulation at most; then the best so far is the answer, and what is left is told",
        low=0.01, high=86_400,
    )  # fmt: skip
    routing: str = setting(
        "blind", "how a load falls on instances: blindly, each request on the one with the fewest, or on the one that "
        "knows its beginning (of --trace with hash_ids, or --system)",
        choices=("blind", "least-loaded", "prefix-aware"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MoneySettings(Settings):
    """What it costs."""

    prices: str | None = setting(None, "your own prices (TOML) over those that come along", metavar="FILE")
    tier: str | None = setting(
        None, "rent from such providers alone", choices=("hyperscaler", "neocloud", "marketplace")
    )


GROUPS = (RequestSettings, LoadSettings, LimitSettings, HardwareSettings, SearchSettings, MoneySettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings(Settings):
    """What is asked of the server."""

    isl: int = setting(128, "tokens of a prompt", low=1, high=1 << 20)
    osl: int = setting(64, "tokens of an answer", low=2, high=1 << 20)
    loads: str = setting("0.2,0.4,0.6,0.8,0.95", "shares of the predicted capacity", metavar="SHARE,...")
    rounds: int = setting(3, "times that all loads are asked in turn", low=1, high=100)
    each_s: float = setting(10.0, "seconds of each load in a round; eight requests at least", low=0.1, high=86_400)
    probe_s: float = setting(2.0, "seconds of the probe between two loads, and of three before", low=0.1, high=3600)
    header: tuple[str, ...] = setting((), "header of each request", metavar="NAME:VALUE")
    random_seed: int = setting(0, "of texts and arrivals", low=0, high=2**62)

    @property
    def shares(self) -> tuple[float, ...]:
        """raises ConfigError"""
        try:
            found = tuple(float(part) for part in self.loads.split(","))
        except ValueError:
            found = ()
        if not 1 <= len(found) <= 20 or not all(0.01 <= share <= 1.5 for share in found):
            raise ConfigError(f'--loads is "{self.loads:.80}"', "1 to 20 shares of 0.01 to 1.5", "write 0.2,0.5,0.8")
        return found
