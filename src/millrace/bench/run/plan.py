"""Turns settings into a run: target, load and sessions, calibration requests, warm-up, and the run itself."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from millrace.bench.client.client import BenchTarget, Client
from millrace.bench.client.endpoints import ENDPOINTS
from millrace.bench.client.request_record import BenchMessage, BenchRecord, BenchRequest, Failure
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.distribution import Spread
from millrace.bench.load.inputs import ConversationShape, LengthPattern, Prefixes, Session, synthetic
from millrace.bench.load.length_histogram import read_histogram
from millrace.bench.load.prompt_text import WORDS, PromptWords
from millrace.bench.load.trace_files import InputRequests, read_requests
from millrace.bench.run.run import BenchClient, Run, RunLoad, TurnRecord
from millrace.bench.settings import ISL, InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import ConfigError, MachineError

OSL, REQUESTS_EACH, PREPARED = 150, 10, 512
_FEW = WORDS[::8]
_PROBES = (_FEW, (*_FEW, *WORDS))  # tokens per word become the mean over all words


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Everything that defines a run. extra: fields of every request; sessions: created from the fitted words

    busiest: of a timed trace, the sessions from the busiest seconds, and how many fall into these
    engine: name of an engine in this process, used instead of the target
    """

    target: BenchTarget
    load: RunLoad
    warm_up: int
    extra: Mapping[str, object]
    sessions: Callable[[PromptWords], Iterator[Session]]
    busiest: Callable[[float], tuple[Iterator[Session], int]] | None = None
    engine: str = ""


def make_plan(
    url: str, target_settings: TargetSettings, load: LoadSettings, inputs: InputSettings, conversation: SessionSettings,
    in_process: bool = False,
) -> BenchPlan:  # fmt: skip
    """Create a plan from settings. in_process: `url` is the name of an engine. raises ConfigError"""
    _check_settings(load, inputs, conversation)
    headers = parse_headers(target_settings.header)
    extra = {
        key: _value(value) for key, value in (_pair(text, "--extra-inputs") for text in target_settings.extra_inputs)
    }
    if target_settings.ignore_eos:
        extra["ignore_eos"] = True
    osl = None if inputs.osl is None else round(inputs.osl)
    # read before anything is sent, to report mistakes at once
    file_requests = None if inputs.input_file is None else read_requests(Path(inputs.input_file), osl, load.random_seed)
    comes_by_itself = load.request_rate is not None or (file_requests is not None and file_requests.timed)
    concurrency = load.concurrency or (None if comes_by_itself else 1)
    count = load.request_count
    if count is None and load.duration_s is None and file_requests is None:
        count = REQUESTS_EACH * (concurrency or 10)
    arrivals = None
    if load.request_rate is not None:
        arrivals = Arrivals(load.request_rate, load.arrival_pattern, load.burstiness, load.ramp_s)
    target = BenchTarget(
        "" if in_process else url,
        ENDPOINTS[target_settings.endpoint],
        target_settings.model,
        target_settings.streaming,
        target_settings.per_chunk_usage,
        headers,
        target_settings.timeout_s,
        keep_text=conversation.session_turns_mean > 1 or file_requests is not None,
    )
    if not in_process:
        target.head()  # checks URL and headers
    run_load = RunLoad(
        concurrency,
        arrivals,
        count,
        load.duration_s,
        load.ramp_s,
        load.request_cancellation_rate / 100,
        load.request_cancellation_delay,
        load.random_seed,
    )
    sessions, busiest = _inputs(file_requests, inputs, conversation, load.random_seed), None
    if file_requests is not None and file_requests.timed and concurrency is None and arrivals is None:
        busiest = partial(_busiest, file_requests, inputs.replay_speed)
    return BenchPlan(target, run_load, load.warmup_request_count, extra, sessions, busiest, url if in_process else "")


def _busiest(file_requests: InputRequests, speed: float, seconds: float) -> tuple[Iterator[Session], int]:
    part, n = file_requests.busiest(seconds, speed)
    return part.sessions(PromptWords(), speed), n


def _check_settings(load: LoadSettings, inputs: InputSettings, conversation: SessionSettings) -> None:
    if load.arrival_pattern != "gamma" and load.burstiness != 1.0:
        raise ConfigError("--burstiness without --arrival-pattern gamma", "both, or neither", "give the pattern")
    if conversation.num_prefix_prompts and not conversation.prefix_prompt_length:
        raise ConfigError("--num-prefix-prompts without a length", "--prefix-prompt-length", "give it")
    own_lengths = inputs.pattern or inputs.input_histogram
    if conversation.prefix_prompt_length and conversation.prefix_prompt_length >= inputs.isl and not own_lengths:
        raise ConfigError(
            f"a shared prefix of {conversation.prefix_prompt_length} tokens in prompts of {inputs.isl:g}",
            "a shorter one",
            "raise --isl, which counts the prefix",
        )
    sources = {
        "--pattern": inputs.pattern,
        "--input-file": inputs.input_file,
        "--input-histogram": inputs.input_histogram,
    }
    if len(both := [flag for flag, value in sources.items() if value]) > 1:
        raise ConfigError(" beside ".join(both), "one of them: each says its own lengths", "leave one out")
    if inputs.input_histogram and (inputs.isl, inputs.isl_stddev, inputs.osl, inputs.osl_stddev) != (
        ISL,
        0.0,
        None,
        0.0,
    ):
        raise ConfigError("--isl or --osl beside --input-histogram", "one of them", "leave one out")


def _inputs(
    file_requests: InputRequests | None, inputs: InputSettings, conversation: SessionSettings, seed: int
) -> Callable[[PromptWords], Iterator[Session]]:
    if file_requests is not None:
        return lambda words: file_requests.sessions(words, inputs.replay_speed)
    lengths = LengthPattern(
        Spread.normal(inputs.isl, inputs.isl_stddev),
        Spread.normal(OSL if inputs.osl is None else inputs.osl, inputs.osl_stddev),
    )
    if inputs.input_histogram:
        lengths = LengthPattern(Spread(0), pairs=read_histogram(Path(inputs.input_histogram)))
    shapes = [LengthPattern.parse(text) for text in inputs.pattern] or [lengths]
    turns = ConversationShape(
        Spread.normal(conversation.session_turns_mean, conversation.session_turns_stddev),
        Spread.normal(conversation.session_turn_delay_mean, conversation.session_turn_delay_stddev),
    )
    prefixes = Prefixes(
        max(conversation.num_prefix_prompts, 1 if conversation.prefix_prompt_length else 0),
        conversation.prefix_prompt_length,
    )
    return lambda words: synthetic(shapes, words, seed, prefixes, turns)


async def measure(
    plan: BenchPlan, on_run: Callable[[Run], None] = lambda run: None, words: PromptWords | None = None
) -> Run:  # fmt: skip
    """Execute a plan. on_run: called with the warm-up and with the run before each starts; words: if already calibrated

    raises MachineError if the server does not answer the first request
    """
    async with Client(plan.target) as client:
        return await drive(client, plan, plan.sessions(words or await calibrate_words(client, plan.extra)), on_run)


async def drive(
    client: BenchClient, plan: BenchPlan, sessions: Iterator[Session], on_run: Callable[[Run], None] = lambda run: None
) -> Run:
    """Execute a plan with any client: warm-up, then the run."""
    if plan.warm_up:
        warming = replace(plan.load, n_sessions=plan.warm_up, duration_s=None, cancel_share=0.0)
        before = Run(client, warming, plan.extra)
        on_run(before)
        await before.drive(islice(sessions, plan.warm_up))
        if before.ended:
            return before
    run = Run(client, plan.load, plan.extra)
    on_run(run)
    await run.drive(prefetch(sessions, plan.load))
    return run


def prefetch(sessions: Iterator[Session], load: RunLoad) -> Iterator[Session]:
    """Generate the first sessions now: a long text takes milliseconds, which would delay timestamps."""
    first = list(islice(sessions, min(load.n_sessions or PREPARED, PREPARED)))
    return chain(first, sessions)


async def check_server(plan: BenchPlan) -> PromptWords:
    """Check that the server answers, and calibrate the words. raises MachineError"""
    async with Client(plan.target) as client:
        return await calibrate_words(client, plan.extra)


async def calibrate_words(client: Client, extra: Mapping[str, object]) -> PromptWords:
    """Send two small requests to fit the tokens per word. raises MachineError if the server does not answer"""
    probes: list[tuple[int, int]] = []
    for words in _PROBES:
        answer = await client.ask(BenchRequest([BenchMessage("user", " ".join(words))], 2, extra))
        if answer.failure is Failure.STATUS and answer.status in (400, 413) and probes:  # longer than its context
            return PromptWords(max(probes[0][1], 1) / probes[0][0])
        if answer.failure not in (None, Failure.EMPTY):
            raise _no_answer(client.target, answer)
        probes.append((len(words), answer.n_prompt or 0))
    return PromptWords.fit(probes[0], probes[1])


def _no_answer(target: BenchTarget, answer: BenchRecord) -> MachineError:
    message = f"{target.url} gives no answer to a first question: {answer.failure} ({answer.detail})"
    match answer.failure:
        case Failure.UNREACHABLE:
            return MachineError(message, "a server that listens there", "start it, or correct the URL")
        case Failure.STATUS if answer.status in (401, 403):
            return MachineError(message, "a key that it takes", '-H "authorization:Bearer KEY"')
        case Failure.STATUS if answer.status in (400, 404, 422):
            return MachineError(
                message, f"a model of this name at {target.path}", "correct --model, --endpoint or the URL"
            )
    protocol = "KServe's" if target.path.startswith("/v2/") else "OpenAI's"
    return MachineError(message, f"what {target.path} answers by {protocol} protocol", "its log says more")


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """Parse --header values. raises ConfigError"""
    return dict(_pair(text, "--header") for text in texts)


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f'{flag} is "{text}"', "NAME:VALUE", "write it so")
    return name.strip(), value.strip()


def _value(text: str) -> Any:
    """Parse a value as JSON if possible (0, true, [1]), otherwise as a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def patterns(records: Sequence[TurnRecord]) -> dict[str, list[TurnRecord]]:
    """Group records by label; {} if there is only one."""
    by_label: dict[str, list[TurnRecord]] = {}
    for record in records:
        by_label.setdefault(record.label, []).append(record)
    return by_label if len(by_label) > 1 else {}
