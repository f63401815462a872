"""Runs `millrace serve`: opens the model and the repository, checks ports, and serves until SIGTERM."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from millrace.cli.console import heading, note, pairs, print_line, size
from millrace.cli.engine_tables import precision_text
from millrace.cli.open_model import opened_to_serve
from millrace.cli.options import make_settings
from millrace.cli.serve.flags import ListenFlags, ProfileFlags, QueueFlags, ServeFlags
from millrace.cli.serve.repository import repository_model
from millrace.compile.cache.rooflines import load_roofline
from millrace.compile.settings import BuildSettings
from millrace.engine.decode_roofline import DecodeWork
from millrace.engine.native.executor import NativeExecutor
from millrace.env import Env
from millrace.errors import ConfigError
from millrace.machine.cpu import machine_name
from millrace.machine.process_info import age_s
from millrace.model_repository.lifecycle.operation_flags import OperationFlags
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.tracing.trace_flags import FLAG, TraceFlags
from millrace.runtime.loop import EngineLoop
from millrace.runtime.open_engine import OpenedEncoder, RunningModel
from millrace.runtime.scheduling.admission_policy import policy_named
from millrace.runtime.scheduling.step_cost_model import StepProfile, read_profile
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.runtime.service import AsyncEngine, ServiceOptions
from millrace.runtime.settings import RunSettings
from millrace.serve.backend import ServedModel
from millrace.serve.http.sockets import bind, check_tls, unix_socket
from millrace.serve.llm.embeddings import EncoderModel
from millrace.serve.llm.language_model import DecodeRoofline, TextModel
from millrace.serve.llm.matryoshka import Matryoshka
from millrace.serve.llm.prompt_warmup import WarmPrompt, read_warm_prompts
from millrace.serve.ops.request_recorder import RecordedEngine, Recorder
from millrace.serve.protocols.kserve.repository_backend import RepositoryModel
from millrace.serve.protocols.kserve.restricted_apis import RestrictionFlags
from millrace.serve.server import Announce, serve
from millrace.serve.settings import ServerSettings

_NO_TEMPLATE = "no chat template: /v1/completions answers, chat requests are refused"
_DOORS = {"grpc_url": "gRPC", "metrics_url": "metrics"}


def run(env: Env, model: str | None, as_json: bool, options: Mapping[str, Any]) -> None:
    """Serve MODEL, a model repository, or both. options: the flags. raises ConfigError"""
    flags = make_settings(ServeFlags, options)
    traces = TraceFlags.from_flags(flags.trace_config)  # so that a mistake is said before a model is looked at
    repository = _repository(options)
    if model is None and repository is None:
        raise ConfigError("there is nothing to serve", "MODEL, --model-repository DIR, or both", "name one")
    settings = flags.server(make_settings(ListenFlags, options))
    _check_traces(traces, settings, repository)
    _check_ports(settings, repository)
    logging.getLogger("millrace").setLevel(flags.log_level.upper())
    if model is None:
        assert repository is not None
        _check_model_is_there(flags, options)
        serve([repository], settings, _announcer(as_json, repository), last=True)
        return
    queue_flags, build, run = (
        make_settings(QueueFlags, options),
        make_settings(BuildSettings, options),
        make_settings(RunSettings, options),
    )
    warm, profile = _warm_prompts(flags.warm_prompts, run), _profile(make_settings(ProfileFlags, options))
    with opened_to_serve(model, build, run, env, quiet=as_json) as opened:
        served = _to_serve(opened, flags, queue_flags, warm, profile, env)
        if not as_json:
            _introduce(opened, served)
        announce = _announcer(as_json, served, opened, and_tensors=repository is not None)
        serve([served, repository] if repository else [served], settings, announce, last=True)


def _profile(flags: ProfileFlags) -> StepProfile | None:
    """Read the profile, if any. raises ConfigError"""
    return None if flags.profile is None else read_profile(Path(flags.profile))


def _repository(options: Mapping[str, Any]) -> RepositoryModel | None:
    return repository_model(
        make_settings(RepositoryFlags, options),
        make_settings(RestrictionFlags, options),
        make_settings(OperationFlags, options),
    )


def _check_traces(traces: TraceFlags, settings: ServerSettings, repository: RepositoryModel | None) -> None:
    """Refuse trace settings that have no effect. raises ConfigError"""
    if traces.settings and traces.otlp is None and repository is None:
        message = f"{FLAG} {settings.trace_config[0]} writes files of tensor models' requests, and there are no such"
        raise ConfigError(message, "mode=opentelemetry, or --model-repository DIR", f"add it, or leave {FLAG} out")


def _check_ports(settings: ServerSettings, repository: RepositoryModel | None) -> None:
    """Check that all ports are free before the model is loaded. raises ConfigError"""
    check_tls(settings)
    if settings.reuse_port and repository is not None and repository.flags.model_control_mode == "explicit":
        message, fix = "--reuse-port with --model-control-mode explicit", "leave one out"
        raise ConfigError(message, "poll: a client's load would reach one of the servers only", fix)
    if settings.uds is not None:
        with unix_socket(Path(settings.uds)):
            pass
    ports = {
        "--port": settings.port if settings.uds is None else None,
        "--grpc-port": repository.flags.grpc_port if repository is not None else None,
        "--metrics-port": settings.metrics_port,
    }
    flag_by_port: dict[int, str] = {}
    for flag, port in ports.items():
        if port in flag_by_port:
            raise ConfigError(f"{flag_by_port[port]} and {flag} are both {port}", "a port for each", "choose another")
        if port is not None:
            bind(settings.host, port, flag, shared=settings.reuse_port and flag != "--metrics-port").close()
        if port:
            flag_by_port[port] = flag


def _check_model_is_there(flags: ServeFlags, options: Mapping[str, Any]) -> None:
    """Refuse flags that need MODEL. raises ConfigError"""
    about = {"--record": flags.record, "--warm-prompts": flags.warm_prompts, "--profile": options["profile"],
             "--served-model-name": flags.served_model_name}  # fmt: skip
    if unmeant := [name for name, value in about.items() if value not in (None, ())]:
        raise ConfigError(f"{unmeant[0]} is given, and MODEL is not", "a model that it is about", "leave it out")


def _to_serve(
    opened: RunningModel | OpenedEncoder, flags: ServeFlags, queue_flags: QueueFlags, warm: tuple[WarmPrompt, ...],
    profile: StepProfile | None, env: Env,
) -> ServedModel:  # fmt: skip
    if isinstance(opened, OpenedEncoder):
        for name, value in (("--record", flags.record), ("--profile", profile)):
            if value is not None:
                message = f"{name} is given for {opened.name}, which is an encoder"
                raise ConfigError(message, "a language model", "leave it out")
        if warm:
            raise ConfigError(
                f"--warm-prompts is given for {opened.name}, which is an encoder", "a language model",
                "leave it out: an encoder keeps nothing of a text",
            )  # fmt: skip
        common, loop = _common_fields(opened, flags.served_model_name), opened.loop()
        return EncoderModel(
            **common,
            loop=loop,
            pairs=opened.pairs,
            max_queued=queue_flags.max_queued,
            matryoshka=Matryoshka.from_folder(opened.engine.folder),
        )
    if profile is not None:
        profile.check(opened.engine.manifest.identity, machine_name())
    budget = TokenBudget(opened.executor.limits.max_step_tokens, gap_limit_s=queue_flags.itl_ms / 1e3)
    loop_ = opened.loop(budget, policy_named(queue_flags.schedule))
    engine = _engine(loop_, ServiceOptions(max_queued=queue_flags.max_queued), flags.record)
    clock = _decode_clock(opened, budget, env)
    return replace(_text_model(opened, engine, flags.served_model_name, clock), warm_prompts=warm, profile=profile)


def _announcer(
    as_json: bool, served: ServedModel, opened: RunningModel | OpenedEncoder | None = None, *, and_tensors: bool = False
) -> Announce:
    """opened: a model of text; None where there are tensor models alone, of which /docs says nothing"""

    def ready(url: str, **also: str) -> None:
        seconds, memory = age_s(), _memory(opened) if opened else {}
        if as_json:
            print_line(json.dumps({"url": url, **also, "model": served.name, "ready_s": seconds, **memory}))
        else:
            is_unix = url.startswith("unix:")
            base = url if is_unix else url + ("/v1" if opened else "/v2")
            doors = {"tensor models": f"{url}/v2"} if and_tensors and not is_unix else {}
            doors |= {_DOORS[door]: place for door, place in also.items()}
            more = "".join(f", {door} at {click.style(place, bold=True)}" for door, place in doors.items())
            docs = f"   (docs: {url}/docs)" if opened and not is_unix else ""
            note(f"Ready after {seconds:.1f} s: {click.style(base, bold=True)}{more}{docs}")

    return ready


def _engine(loop: EngineLoop, options: ServiceOptions, record: str | None) -> AsyncEngine:
    return AsyncEngine(loop, options) if record is None else RecordedEngine(loop, options, Recorder(Path(record)))


def _warm_prompts(file: str | None, run: RunSettings) -> tuple[WarmPrompt, ...]:
    if file is not None and not run.prefix_cache:
        message, fix = "--warm-prompts and --no-prefix-cache are both given", "leave one out"
        raise ConfigError(message, "a cache to keep the prompts in", fix)
    return () if file is None else read_warm_prompts(Path(file))


def _decode_clock(model: RunningModel, budget: TokenBudget, env: Env) -> DecodeRoofline | None:
    """Return the expected decode times; None if `millrace doctor` has not measured this machine, or for a GPU."""
    if not isinstance(model.executor, NativeExecutor):
        return None
    roofline = load_roofline(env.cache, model.isa, model.native.threads)
    return None if roofline is None else DecodeRoofline(DecodeWork.from_engine(model.engine), roofline, budget)


def _text_model(
    model: RunningModel, engine: AsyncEngine, names: tuple[str, ...], clock: DecodeRoofline | None = None
) -> TextModel:
    return TextModel(
        **_common_fields(model, names), engine=engine, chat_template=model.chat_template, decode_clock=clock
    )


def _common_fields(model: RunningModel | OpenedEncoder, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that language models and encoders share."""
    m = model.engine.manifest
    own = next((name for name in names if "*" not in name), model.name)
    return {
        "name": own, "aliases": tuple(name for name in dict.fromkeys(names) if name != own),
        "tokenizer": model.tokenizer, "tokenizer_folder": model.engine.folder,
        "created": int(time.time()), "max_context": m.max_context,
        "metadata": {
            "source": m.source, "engine": m.identity, "architecture": m.architecture, "precision": m.precision,
            "isa": model.isa, "implementation": model.implementation, "parameters": m.n_parameters,
            "weights_bytes": m.cpu.weights_bytes,
        },
    }  # fmt: skip


def _introduce(model: RunningModel | OpenedEncoder, served: ServedModel) -> None:
    m, memory, full = model.engine.manifest, _memory(model), ""
    if isinstance(model, RunningModel):
        n_full = model.plan.full_sequences(model.engine)
        full = f"KV cache {size(memory['kv_bytes'])} ({n_full} full sequences), "
    heading(f"{served.name}", err=True)
    pairs(
        [
            ("model", f"{m.architecture}, {precision_text(model.engine)}, on {model.isa}"),
            *([("sampling", _sampling_text(model))] if isinstance(model, RunningModel) else []),
            *([("chat", _NO_TEMPLATE)] if isinstance(model, RunningModel) and model.chat_template is None else []),
            ("limits", f"{m.max_context:,} tokens a sequence, {m.max_sequences} sequences at a time"),
            ("memory", f"{size(sum(memory.values()))}: weights {size(memory['weights_bytes'])}, {full}"
                       f"activations {size(memory['activation_bytes'])}"),
        ],
        err=True,
    )  # fmt: skip


def _sampling_text(model: RunningModel) -> str:
    """Describe the default sampling parameters."""
    values = model.defaults.sampling
    text = ", ".join(f"{name} {value:g}" for name, value in values.items()) or "temperature 1, of the whole vocabulary"
    origin = model.defaults.origin
    return f"{text} ({origin}'s defaults: the file has none)" if origin else text


def _memory(model: RunningModel | OpenedEncoder) -> dict[str, int]:
    cpu = model.engine.manifest.cpu
    return {
        "weights_bytes": cpu.weights_bytes,
        "kv_bytes": model.kv_bytes,
        "activation_bytes": cpu.activation_bytes,
    }
