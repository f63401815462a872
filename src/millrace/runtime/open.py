"""MODEL, as every command and `LLM` take it: a folder (engine or checkpoint), a GGUF file, a hub id, a cached name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.checkpoint.chat import ChatTemplate
from millrace.checkpoint.checkpoint import Checkpoint, open_chat_template
from millrace.checkpoint.generation import GenerationDefaults, read_generation
from millrace.checkpoint.gguf.reader import is_gguf
from millrace.checkpoint.tokenizer import VocabularyTokenizer, open_tokenizer, read_json_object
from millrace.compile.precision import PrecisionMap, precision_map
from millrace.engine.engine import Engine
from millrace.engine.kv import KV_CACHE_DTYPES, KvFormat
from millrace.engine.manifest import FORMAT, MANIFEST
from millrace.engine.native_step import NativeExecutor
from millrace.env import Env
from millrace.errors import CheckpointError, ConfigError, nearest
from millrace.kernels.identity import kernels_digest
from millrace.machine.cpu import memory, usable_cores
from millrace.model.families import HEAD
from millrace.runtime.budget import TokenBudget
from millrace.runtime.loop import EngineLoop
from millrace.runtime.plan import RunPlan, plan_run
from millrace.settings import Settings, flag_of, setting

if TYPE_CHECKING:
    from millrace.compile.build import BuildOptions
    from millrace.compile.source import Source
    from millrace.compile.tune import Tuning

BUNDLED = Path(__file__).parent.parent / "bundled"
Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Settings):
    """How an engine is built from a checkpoint."""

    precision: str | None = setting(
        None, "fp32, bf16, w8a8, w8a16, w4a8 or w4a16; default: the checkpoint's own (float16 runs as fp32)"
    )
    head: str | None = setting(
        None,
        "precision of the head; default: with w4a8 a 4-bit pass and the best 256 tokens again in 8 bits",
        choices=("fp32", "bf16", "w8a8", "w8a16", "w4a8", "w4a16"),
    )
    kv_cache_dtype: str | None = setting(
        None,
        "how keys and values are kept: fp32, bf16 or int8 (half the memory of bf16); default: bf16, with fp32 fp32",
        choices=tuple(KV_CACHE_DTYPES),
    )
    max_context: int | None = setting(None, "longest sequence in tokens; default: the model's own, at most 8192", low=1)
    max_batch: int = setting(16, "sequences that run at the same time", low=1, high=1024)
    group: int | None = setting(
        None,
        "inputs that share one scale in quantised weights, a multiple of 4; default: 32 for a quantised GGUF, else 128",
        low=4,
        high=4096,
    )
    tune: float = setting(
        2.0,
        "about how many seconds a build times kernels on this machine; 0: they go by their own rules",
        low=0,
        high=3600,
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """How a built engine runs on this machine."""

    kv_memory: int | None = setting(
        None,
        "memory for KV pages, like 2G; default: as many full contexts as run at a time, or 60 % of what is free",
        size=True,
        low=1,
    )
    threads: int | None = setting(
        None, "compute threads; default: the cores that this process may use", low=1, high=1024
    )
    isa: str | None = setting(
        None, "force an instruction set: avx512, avx2 or scalar", choices=("avx512", "avx2", "scalar")
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that runs: close the executor when done."""

    name: str
    engine: Engine
    plan: RunPlan
    executor: NativeExecutor
    tokenizer: VocabularyTokenizer
    tokenizer_folder: Path
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults

    def loop(self, *, throughput: bool = False) -> EngineLoop:
        """`throughput`: prompts are never cut short for the sake of running answers; nobody watches them grow."""
        size = self.executor.limits.max_step_tokens
        budget = TokenBudget(size, chunk_low=size) if throughput else None
        return EngineLoop(self.executor, self.tokenizer, self.defaults, budget=budget)

    def close(self) -> None:
        self.executor.close()
        self.engine.close()
        if self.chat_template is not None:
            self.chat_template.close()


def model_folder(model: str, env: Env, progress: Progress | None = None) -> tuple[str, Path]:
    """A short name and the local folder or GGUF file of MODEL, downloaded if it is a hub id.

    raises CheckpointError, HubError
    """
    if not model:
        raise ConfigError("MODEL is empty", "a folder, a GGUF file, a hub id or `tiny`", "name one")
    bundled = BUNDLED / model
    if model.isidentifier() and bundled.is_dir():
        return model, bundled
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if is_gguf(path):
        return path.stem, path
    if "/" not in model and not path.exists():  # neither a path that anybody wrote out, nor a hub id
        return _cached(model, env)
    from millrace.checkpoint.hub import resolve

    def downloading(done: int, total: int) -> None:
        if progress:
            progress(f"downloading {model}", done, total)

    folder = resolve(model, hf_home=env.hf_home, token=env.hf_token, offline=env.hf_offline, progress=downloading)
    return model.split("@")[0].split("/")[-1], folder


def _cached(model: str, env: Env) -> tuple[str, Path]:
    """By a name that `millrace list` shows. raises CheckpointError, and ConfigError where that is several engines'"""
    from millrace.compile.cache import EngineCache

    cache = EngineCache(env.cache)
    if entry := cache.only(model):
        return entry.model, entry.folder
    models = {folder.name for folder in BUNDLED.iterdir() if folder.is_dir()} | {e.model for e in cache.entries()}
    near = nearest(model, cache.names() | models, models)
    raise CheckpointError(
        f'there is no model "{model}"', f"a folder, a GGUF file, a hub id org/name, or {near}",
        "check the spelling",
    )  # fmt: skip


def find_engine(
    model: str, build: BuildSettings, env: Env, *, progress: Progress | None = None, say: Say | None = None,
    precisions: Mapping[str, str] | None = None,
) -> tuple[str, Engine]:  # fmt: skip
    """MODEL's engine: the folder itself if it is one, else from the cache, else built now.

    precisions: a map by layer patterns, instead of `build.precision`
    """
    name, folder = model_folder(model, env, progress)
    if (folder / MANIFEST).is_file():
        engine = Engine.open(folder)
        _refuse_build_settings(build, folder)
        return engine.manifest.model_name, engine
    checkpoint = Checkpoint.open(folder)
    if folder.is_dir():  # a GGUF file has it inside
        check_tokenizer(folder)
    engine, fresh = _built(name, checkpoint, build, precisions, env, progress)
    if say and fresh:  # later runs would only repeat it; `millrace inspect` shows it again
        for note in engine.manifest.notes:
            say(note)
    if say and not fresh and build.tune not in (0, BuildSettings.tune):
        say(f"this engine is there already, and is not timed again: millrace tune {engine.folder}")
    return name, engine


def _built(
    name: str, checkpoint: Checkpoint, build: BuildSettings, precisions: Mapping[str, str] | None, env: Env,
    progress: Progress | None,
) -> tuple[Engine, bool]:  # fmt: skip
    """The engine, and whether it was built now."""
    from millrace.compile.build import plan_engine, write_engine  # not needed for a built engine
    from millrace.compile.cache import EngineCache
    from millrace.compile.source import Source

    source = Source.from_checkpoint(checkpoint, build.max_context)
    options = build_options(build, source.own_precision, precisions)
    identity = checkpoint_identity(checkpoint, env, progress)
    key = f"{FORMAT} {kernels_digest()} {identity} {_content(source, options)}"

    def write(folder: Path) -> None:
        _ = checkpoint.tokenizer  # an engine whose tokenizer is broken is of no use to anybody
        known = replace(source, identity=lambda: identity)
        plan, tuning = plan_engine(known, options), tuning_of(build, env)
        write_engine(known, plan, folder, name=name, progress=progress, tuning=tuning)

    with EngineCache(env.cache).get_or_build(name, key, write) as (folder, fresh):
        return Engine.open(folder), fresh


def _content(source: "Source", options: "BuildOptions") -> str:
    """What an engine is built as, however it was asked for: what is left out is what the model has of its own.

    How long its kernels are timed is no part of it: that changes no answer, and `millrace tune` does it again.
    """
    from millrace.compile.precision import plain_format

    chosen = options.precision or source.own_precision
    head = chosen.of(HEAD, is_head=True)
    layers = [("", chosen.default), *(pattern for pattern in chosen.patterns if pattern[0] != HEAD)]
    group = chosen.group if head.quantised or any(p.quantised for _, p in layers) else None
    kv = KvFormat[plain_format(chosen.default).upper()] if options.kv_format is None else options.kv_format
    return f"{layers} {group} {head} {chosen.rescores(HEAD)} {kv!r} {source.max_context} {options.max_batch}"


def checkpoint_identity(checkpoint: Checkpoint, env: Env, progress: Progress | None = None) -> str:
    """Of the checkpoint's whole content; what was read before, and is as it was then, is not read again."""
    from millrace.compile.digests import FileDigests

    done, total = 0, sum(file.stat().st_size for file in checkpoint.tensors.files)

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress("reading the checkpoint", done, total)

    return checkpoint.identity(FileDigests(env.cache / "digests.json").digest, read)


def build_options(
    build: BuildSettings, own: PrecisionMap, precisions: Mapping[str, str] | None = None
) -> "BuildOptions":
    """What the user asked for, as the compiler takes it. own: the model's precision, for what is not asked."""
    from millrace.compile.build import BuildOptions

    return BuildOptions(
        precision=asked_precision(build, own, precisions),
        max_batch=build.max_batch,
        kv_format=KV_CACHE_DTYPES[build.kv_cache_dtype] if build.kv_cache_dtype else None,
    )


def tuning_of(build: BuildSettings, env: Env) -> "Tuning | None":
    """For all cores of this machine, with its timing cache."""
    from millrace.compile.timings import TimingCache
    from millrace.compile.tune import Tuning

    return Tuning(build.tune, cache=TimingCache(env.cache / "timings.json")) if build.tune else None


def asked_precision(
    build: BuildSettings, own: PrecisionMap, precisions: Mapping[str, str] | None = None
) -> PrecisionMap | None:
    """`precisions` or else `build.precision`, in groups of `build.group` or else the model's own; None: all its own."""
    asked = precisions or build.precision
    if asked is None and (build.group is not None or build.head is not None):
        kept = [(pattern, p) for pattern, p in own.patterns if not build.head or pattern != HEAD]
        asked = {"default": own.default.value, **{pattern: p.value for pattern, p in kept}}
    return None if asked is None else precision_map(asked, build.group or own.group, build.head)


def _refuse_build_settings(build: BuildSettings, folder: Path) -> None:
    """A built engine cannot be changed by flags; saying nothing would be worse."""
    plain = BuildSettings()
    for name in (f.name for f in fields(BuildSettings)):
        if getattr(build, name) != getattr(plain, name):
            raise ConfigError(
                f"{flag_of(name)} is given, but {folder} is already built",
                "a checkpoint, where this is still open", "leave it out, or build the checkpoint again with it",
            )  # fmt: skip


def check_tokenizer(folder: Path) -> None:
    """raises CheckpointError where a checkpoint or an engine has none"""
    if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model")):
        raise CheckpointError(
            f"{folder} has no tokenizer", "tokenizer.json or tokenizer.model beside the weights",
            "add it to the checkpoint, and build again",
        )  # fmt: skip


def open_engine(name: str, engine: Engine, run: RunSettings, sequences: int | None = None) -> Opened:
    """Plans the memory, then loads the weights. raises MachineError before anything large is touched

    sequences: KV pages for no more than these at full context, unless `run` says how much memory they may take
    """
    folder = engine.folder
    check_tokenizer(folder)
    plan = plan_run(engine, memory(), run.kv_memory)
    if sequences is not None and run.kv_memory is None:
        n_pages = min(plan.n_pages, sequences * engine.pages_per_sequence)
        plan = replace(plan, n_pages=n_pages, kv_bytes=n_pages * engine.page_bytes)
    executor = engine.executor(n_pages=plan.n_pages, threads=run.threads or usable_cores(), isa=run.isa)
    tokenizer = open_tokenizer(folder)
    generation = read_generation(read_json_object(folder / "generation_config.json"))
    return Opened(
        name,
        engine,
        plan,
        executor,
        tokenizer,
        folder,
        open_chat_template(folder, tokenizer),
        _with_stops(generation, engine),
    )


def _with_stops(generation: GenerationDefaults, engine: Engine) -> GenerationDefaults:
    """The end-of-text ids that were resolved when the engine was built."""
    return replace(generation, eos_token_ids=tuple(engine.manifest.eos_token_ids))
