"""What `millrace bench` takes: whom it asks, how often, and what. Names of other tools' flags: `ALIASES`."""

from dataclasses import dataclass

from millrace.bench.names import ENDPOINT_NAMES, PATTERNS
from millrace.settings import Settings, setting

_MANY = 10_000_000
ISL = 550.0
_TIMES_S = {"low": 0, "high": 1e7}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings(Settings):
    model: str = setting("", "name of the model, as the server knows it")
    endpoint: str = setting("chat", "endpoint of OpenAI's protocol, or Triton's `generate`", choices=ENDPOINT_NAMES)
    streaming: bool = setting(True, "streamed answers; without, only whole latencies are known")
    per_chunk_usage: bool = setting(False, "ask for the tokens of each chunk (millrace, vLLM and SGLang tell them)")
    ignore_eos: bool = setting(False, "ask for answers of exactly their length (millrace, vLLM and SGLang do)")
    extra_inputs: tuple[str, ...] = setting(
        (), "further field of each request, e.g. temperature:0", metavar="KEY:VALUE"
    )
    header: tuple[str, ...] = setting((), "header of each request", metavar="NAME:VALUE")
    timeout_s: float = setting(600.0, "seconds that a whole answer may take", low=0.001, high=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings(Settings):
    concurrency: int | None = setting(
        None, "so many users at a time, each waiting for its answer; 1 unless a rate is given", low=1, high=65_536
    )
    request_rate: float | None = setting(
        None, "requests that arrive a second, answered or not", low=1e-6, high=1e6, metavar="X"
    )
    arrival_pattern: str = setting("poisson", "of a request rate", choices=PATTERNS)
    burstiness: float = setting(1.0, "of --arrival-pattern gamma: 1 is poisson, below 1 in bursts", low=0.01, high=1e4)
    request_count: int | None = setting(
        None, "end after so many requests or sessions; 10 for each user unless a duration is given", low=1, high=_MANY
    )
    duration_s: float | None = setting(None, "send nothing after so many seconds", low=0.001, high=1e7)
    ramp_s: float = setting(0.0, "seconds in which users or the rate grow to their number", **_TIMES_S)
    warmup_request_count: int = setting(0, "requests before, that do not count", low=0, high=_MANY)
    request_cancellation_rate: float = setting(0.0, "percent of requests that are cancelled", low=0, high=100)
    request_cancellation_delay: float = setting(0.0, "seconds after which they are", **_TIMES_S)
    random_seed: int = setting(0, "of texts, lengths and arrivals", low=0, high=2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSettings(Settings):
    isl: float = setting(ISL, "tokens of a prompt", low=1, high=_MANY)
    isl_stddev: float = setting(0.0, "their standard deviation", low=0, high=_MANY)
    osl: float | None = setting(None, "tokens of an answer at most; 150 unless a file says so", low=1, high=_MANY)
    osl_stddev: float = setting(0.0, "their standard deviation", low=0, high=_MANY)
    pattern: tuple[str, ...] = setting(
        (), "lengths in place of these, mixed by weight: short/long, 1000/200:3; results are told for each",
        metavar="IN/OUT[:W]",
    )  # fmt: skip
    input_file: str | None = setting(
        None, "prompts or a trace instead: JSONL, ShareGPT, Mooncake or Azure", metavar="FILE"
    )
    input_histogram: str | None = setting(
        None, "lengths drawn from counts of input x output: of a result, of a trace, or your own", metavar="FILE"
    )
    replay_speed: float = setting(1.0, "times as fast as a trace's own times; 0: they do not matter", low=0, high=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings(Settings):
    session_turns_mean: float = setting(1.0, "turns of a conversation; each goes on from its answers", low=1, high=1000)
    session_turns_stddev: float = setting(0.0, "their standard deviation", low=0, high=1000)
    session_turn_delay_mean: float = setting(0.0, "milliseconds before each further turn", **_TIMES_S)
    session_turn_delay_stddev: float = setting(0.0, "their standard deviation", **_TIMES_S)
    num_prefix_prompts: int = setting(0, "different beginnings that prompts share", low=0, high=10_000)
    prefix_prompt_length: int = setting(0, "tokens of each, of the prompt's", low=0, high=_MANY)


# Flags of GenAI-Perf, AIPerf and `vllm bench serve` that mean the same here. docs/bench.md lists them.
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
