"""From settings to a run: whom to ask, the load, the sessions; a first question; warm-up; and the run itself."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from millrace.bench.client.client import Client, Target
from millrace.bench.client.endpoints import ENDPOINTS
from millrace.bench.client.request_record import Answer, Failure, Message, Question
from millrace.bench.load.arrivals import Arrivals
from millrace.bench.load.distribution import Spread
from millrace.bench.load.inputs import ConversationShape, Prefixes, Session, Shape, synthetic
from millrace.bench.load.length_histogram import read_histogram
from millrace.bench.load.prompt_text import WORDS, PromptWords
from millrace.bench.load.trace_files import InputRequests, read_requests
from millrace.bench.run.run import BenchClient, Load, Record, Run
from millrace.bench.settings import ISL, InputSettings, LoadSettings, SessionSettings, TargetSettings
from millrace.errors import ConfigError, MachineError

OSL, REQUESTS_EACH, PREPARED = 150, 10, 512
_FEW = WORDS[::8]
_PROBES = (_FEW, (*_FEW, *WORDS))  # so that what tokens a word becomes is the mean of all of them


@dataclass(frozen=True, slots=True)
class Plan:
    """extra: fields of every request; sessions: from what the server makes of words; busiest: of a trace with times,
    what begins with so many seconds in which most requests come, and how many these are; engine: the name of one in
    this process, which is asked in place of the target"""

    target: Target
    load: Load
    warm_up: int
    extra: Mapping[str, object]
    sessions: Callable[[PromptWords], Iterator[Session]]
    busiest: Callable[[float], tuple[Iterator[Session], int]] | None = None
    engine: str = ""


def planned(
    url: str, whom: TargetSettings, load: LoadSettings, what: InputSettings, talk: SessionSettings,
    in_process: bool = False,
) -> Plan:  # fmt: skip
    """in_process: `url` is the name of an engine. raises ConfigError"""
    _agree(load, what, talk)
    headers = parsed_headers(whom.header)
    extra = {key: _value(value) for key, value in (_pair(text, "--extra-inputs") for text in whom.extra_inputs)}
    if whom.ignore_eos:
        extra["ignore_eos"] = True
    osl = None if what.osl is None else round(what.osl)
    # read before anybody is asked: mistakes show at once
    given = None if what.input_file is None else read_requests(Path(what.input_file), osl, load.random_seed)
    comes_by_itself = load.request_rate is not None or (given is not None and given.timed)
    concurrency = load.concurrency or (None if comes_by_itself else 1)
    count = load.request_count
    if count is None and load.duration_s is None and given is None:
        count = REQUESTS_EACH * (concurrency or 10)
    arrivals = None
    if load.request_rate is not None:
        arrivals = Arrivals(load.request_rate, load.arrival_pattern, load.burstiness, load.ramp_s)
    target = Target(
        "" if in_process else url, ENDPOINTS[whom.endpoint], whom.model, whom.streaming, whom.per_chunk_usage,
        headers, whom.timeout_s,
        keep_text=talk.session_turns_mean > 1 or given is not None,
    )  # fmt: skip
    if not in_process:
        target.head()  # complains of an address or header at once
    asked = Load(
        concurrency, arrivals, count, load.duration_s, load.ramp_s, load.request_cancellation_rate / 100,
        load.request_cancellation_delay, load.random_seed,
    )  # fmt: skip
    sessions, busiest = _inputs(given, what, talk, load.random_seed), None
    if given is not None and given.timed and concurrency is None and arrivals is None:
        busiest = partial(_busiest, given, what.replay_speed)
    return Plan(target, asked, load.warmup_request_count, extra, sessions, busiest, url if in_process else "")


def _busiest(given: InputRequests, speed: float, seconds: float) -> tuple[Iterator[Session], int]:
    part, n = given.busiest(seconds, speed)
    return part.sessions(PromptWords(), speed), n


def _agree(load: LoadSettings, what: InputSettings, talk: SessionSettings) -> None:
    if load.arrival_pattern != "gamma" and load.burstiness != 1.0:
        raise ConfigError("--burstiness without --arrival-pattern gamma", "both, or neither", "give the pattern")
    if talk.num_prefix_prompts and not talk.prefix_prompt_length:
        raise ConfigError("--num-prefix-prompts without a length", "--prefix-prompt-length", "give it")
    own_lengths = what.pattern or what.input_histogram
    if talk.prefix_prompt_length and talk.prefix_prompt_length >= what.isl and not own_lengths:
        raise ConfigError(
            f"a shared prefix of {talk.prefix_prompt_length} tokens in prompts of {what.isl:g}", "a shorter one",
            "raise --isl, which counts the prefix",
        )  # fmt: skip
    said = {"--pattern": what.pattern, "--input-file": what.input_file, "--input-histogram": what.input_histogram}
    if len(both := [flag for flag, value in said.items() if value]) > 1:
        raise ConfigError(" beside ".join(both), "one of them: each says its own lengths", "leave one out")
    if what.input_histogram and (what.isl, what.isl_stddev, what.osl, what.osl_stddev) != (ISL, 0.0, None, 0.0):
        raise ConfigError("--isl or --osl beside --input-histogram", "one of them", "leave one out")


def _inputs(
    given: InputRequests | None, what: InputSettings, talk: SessionSettings, seed: int
) -> Callable[[PromptWords], Iterator[Session]]:
    if given is not None:
        return lambda words: given.sessions(words, what.replay_speed)
    lengths = Shape(
        Spread.normal(what.isl, what.isl_stddev), Spread.normal(OSL if what.osl is None else what.osl, what.osl_stddev)
    )
    if what.input_histogram:
        lengths = Shape(Spread(0), pairs=read_histogram(Path(what.input_histogram)))
    shapes = [Shape.parse(text) for text in what.pattern] or [lengths]
    turns = ConversationShape(
        Spread.normal(talk.session_turns_mean, talk.session_turns_stddev),
        Spread.normal(talk.session_turn_delay_mean, talk.session_turn_delay_stddev),
    )
    prefixes = Prefixes(max(talk.num_prefix_prompts, 1 if talk.prefix_prompt_length else 0), talk.prefix_prompt_length)
    return lambda words: synthetic(shapes, words, seed, prefixes, turns)


async def measure(
    plan: Plan, on_run: Callable[[Run], None] = lambda run: None, words: PromptWords | None = None
) -> Run:  # fmt: skip
    """The whole run. on_run: is handed the warm-up's and the run itself before each begins; words: where `reached` has
    asked before. raises MachineError where the server does not answer the first question"""
    async with Client(plan.target) as client:
        return await driven_by(client, plan, plan.sessions(words or await fitted_words(client, plan.extra)), on_run)


async def driven_by(
    client: BenchClient, plan: Plan, sessions: Iterator[Session], on_run: Callable[[Run], None] = lambda run: None
) -> Run:
    """The same, whomever it asks: warm-up, then the run."""
    if plan.warm_up:
        warming = replace(plan.load, n_sessions=plan.warm_up, duration_s=None, cancel_share=0.0)
        before = Run(client, warming, plan.extra)
        on_run(before)
        await before.drive(islice(sessions, plan.warm_up))
        if before.ended:
            return before
    run = Run(client, plan.load, plan.extra)
    on_run(run)
    await run.drive(prepared(sessions, plan.load))
    return run


def prepared(sessions: Iterator[Session], load: Load) -> Iterator[Session]:
    """Texts of the first are written now: a long one takes milliseconds, in which no stamp could be taken."""
    first = list(islice(sessions, min(load.n_sessions or PREPARED, PREPARED)))
    return chain(first, sessions)


async def check_server(plan: Plan) -> PromptWords:
    """raises MachineError where the server does not answer a question"""
    async with Client(plan.target) as client:
        return await fitted_words(client, plan.extra)


async def fitted_words(client: Client, extra: Mapping[str, object]) -> PromptWords:
    """Two small questions: whether the server answers at all, and what tokens words become. raises MachineError"""
    told: list[tuple[int, int]] = []
    for words in _PROBES:
        answer = await client.ask(Question([Message("user", " ".join(words))], 2, extra))
        if answer.failure is Failure.STATUS and answer.status in (400, 413) and told:  # longer than its context
            return PromptWords(max(told[0][1], 1) / told[0][0])
        if answer.failure not in (None, Failure.EMPTY):
            raise _no_answer(client.target, answer)
        told.append((len(words), answer.n_prompt or 0))
    return PromptWords.fitted(told[0], told[1])


def _no_answer(target: Target, answer: Answer) -> MachineError:
    what = f"{target.url} gives no answer to a first question: {answer.failure} ({answer.detail})"
    match answer.failure:
        case Failure.UNREACHABLE:
            return MachineError(what, "a server that listens there", "start it, or correct the URL")
        case Failure.STATUS if answer.status in (401, 403):
            return MachineError(what, "a key that it takes", '-H "authorization:Bearer KEY"')
        case Failure.STATUS if answer.status in (400, 404, 422):
            return MachineError(
                what, f"a model of this name at {target.path}", "correct --model, --endpoint or the URL"
            )
    protocol = "KServe's" if target.path.startswith("/v2/") else "OpenAI's"
    return MachineError(what, f"what {target.path} answers by {protocol} protocol", "its log says more")


def parsed_headers(texts: Sequence[str]) -> dict[str, str]:
    """raises ConfigError"""
    return dict(_pair(text, "--header") for text in texts)


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise ConfigError(f'{flag} is "{text}"', "NAME:VALUE", "write it so")
    return name.strip(), value.strip()


def _value(text: str) -> Any:
    """JSON where it is JSON (0, true, [1]), else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def patterns(records: Sequence[Record]) -> dict[str, list[Record]]:
    """By label, where there is more than one."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record.label, []).append(record)
    return found if len(found) > 1 else {}
