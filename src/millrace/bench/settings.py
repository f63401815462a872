"""Settings of `millrace bench`: target, load and inputs. `ALIASES` has the equivalent flags of other tools."""

from dataclasses import dataclass

from millrace.bench.names import ENDPOINT_NAMES, PATTERNS
from millrace.settings import Settings, setting

_MANY = 10_000_000
ISL = 550.0
_TIMES_S = {"low": 0, "high": 1e7}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(Settings):
    model: str = setting("", "model name on the server")
    endpoint: str = setting("chat", "endpoint of OpenAI's protocol, or Triton's `generate`", choices=ENDPOINT_NAMES)
    streaming: bool = setting(True, "stream answers; otherwise only the total latency is known")
    per_chunk_usage: bool = setting(False, "request token counts per chunk (supported by millrace, vLLM and SGLang)")
    ignore_eos: bool = setting(
        False, "request answers of exactly the given length (supported by millrace, vLLM and SGLang)"
    )
    extra_inputs: tuple[str, ...] = setting(
        (), "additional field of each request, e.g. temperature:0", metavar="KEY:VALUE"
    )
    header: tuple[str, ...] = setting((), "header of each request", metavar="NAME:VALUE")
    timeout_s: float = setting(600.0, "timeout of a complete answer in seconds", low=0.001, high=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(Settings):
    concurrency: int | None = setting(
        None, "concurrent users, each waiting for its answer; 1 unless a rate is given", low=1, high=65_536
    )
    request_rate: float | None = setting(
        None, "requests per second, sent whether or not earlier ones are answered", low=1e-6, high=1e6, metavar="X"
    )
    arrival_pattern: str = setting("poisson", "arrival pattern of --request-rate", choices=PATTERNS)
    burstiness: float = setting(
        1.0, "shape of --arrival-pattern gamma: 1 is Poisson, below 1 arrivals are bursty", low=0.01, high=1e4
    )
    request_count: int | None = setting(
        None, "number of requests or sessions; 10 for each user unless a duration is given", low=1, high=_MANY
    )
    duration_s: float | None = setting(None, "stop sending after this many seconds", low=0.001, high=1e7)
    ramp_s: float = setting(0.0, "ramp-up time in seconds", **_TIMES_S)
    warmup_request_count: int = setting(0, "warm-up requests, excluded from the results", low=0, high=_MANY)
    request_cancellation_rate: float = setting(0.0, "percent of requests to cancel", low=0, high=100)
    request_cancellation_delay: float = setting(0.0, "seconds after which they are cancelled", **_TIMES_S)
    random_seed: int = setting(0, "seed of texts, lengths and arrivals", low=0, high=2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSettings(Settings):
    isl: float = setting(ISL, "mean tokens of a prompt", low=1, high=_MANY)
    isl_stddev: float = setting(0.0, "standard deviation of prompt tokens", low=0, high=_MANY)
    osl: float | None = setting(None, "maximum tokens of an answer; 150 unless a file gives them", low=1, high=_MANY)
    osl_stddev: float = setting(0.0, "standard deviation of answer tokens", low=0, high=_MANY)
    pattern: tuple[str, ...] = setting(
        (), "lengths instead of --isl and --osl, mixed by weight: short/long, 1000/200:3; results are given for each",
        metavar="IN/OUT[:W]",
    )  # fmt: skip
    input_file: str | None = setting(
        None, "prompts or a trace from a file: JSONL, ShareGPT, Mooncake or Azure", metavar="FILE"
    )
    input_histogram: str | None = setting(
        None, "lengths sampled from a histogram of input x output: of a result, a trace, or your own", metavar="FILE"
    )
    replay_speed: float = setting(
        1.0, "replay speed of a trace; 2 is twice as fast, 0 ignores its timestamps", low=0, high=1e6
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings(Settings):
    session_turns_mean: float = setting(
        1.0, "mean turns of a conversation; each turn includes the earlier answers", low=1, high=1000
    )
    session_turns_stddev: float = setting(0.0, "standard deviation of the turns", low=0, high=1000)
    session_turn_delay_mean: float = setting(0.0, "mean delay before each further turn, in ms", **_TIMES_S)
    session_turn_delay_stddev: float = setting(0.0, "standard deviation of that delay", **_TIMES_S)
    num_prefix_prompts: int = setting(0, "number of distinct shared prefixes", low=0, high=10_000)
    prefix_prompt_length: int = setting(0, "tokens of each shared prefix (counted in the prompt)", low=0, high=_MANY)


# Equivalent flags of GenAI-Perf, AIPerf and `vllm bench serve`. docs/bench.md lists them.
ALIASES = {
    "-u": "--url", "-m": "--model", "--model-names": "--model", "--endpoint-type": "--endpoint",
    "-H": "--header", "--request-timeout-seconds": "--timeout-s",
    "--use-server-token-count": "", "--use-legacy-max-tokens": "",
    "--max-concurrency": "--concurrency", "--vllm-burstiness": "--burstiness", "--arrival-smoothness": "--burstiness",
    "--num-requests": "--request-count", "--num-prompts": "--request-count", "--conversation-num": "--request-count",
    "--num-sessions": "--request-count",
    "--benchmark-duration": "--duration-s", "--concurrency-ramp-duration": "--ramp-s",
    "--request-rate-ramp-duration": "--ramp-s", "--num-warmup-requests": "--warmup-request-count",
    "--seed": "--random-seed",
    "--synthetic-input-tokens-mean": "--isl", "--prompt-input-tokens-mean": "--isl", "--isl-mean": "--isl",
    "--random-input-len": "--isl",
    "--synthetic-input-tokens-stddev": "--isl-stddev", "--prompt-input-tokens-stddev": "--isl-stddev",
    "--output-tokens-mean": "--osl", "--prompt-output-tokens-mean": "--osl", "--osl-mean": "--osl",
    "--random-output-len": "--osl",
    "--output-tokens-stddev": "--osl-stddev", "--prompt-output-tokens-stddev": "--osl-stddev",
    "--conversation-turn-mean": "--session-turns-mean", "--conversation-turn-stddev": "--session-turns-stddev",
    "--conversation-turn-delay-mean": "--session-turn-delay-mean",
    "--conversation-turn-delay-stddev": "--session-turn-delay-stddev",
    "--prompt-prefix-pool-size": "--num-prefix-prompts", "--prompt-prefix-length": "--prefix-prompt-length",
    "--artifact-dir": "--output", "--output-artifact-dir": "--output",
}  # fmt: skip
