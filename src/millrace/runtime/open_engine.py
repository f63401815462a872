"""Open an engine as a running model: plan the memory, load weights, tokenizer and chat template.

RunningModel (language models) and OpenedEncoder name the things that they share alike.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from millrace.checkpoint.chat.chat_template import ChatTemplate
from millrace.checkpoint.checkpoint import CONFIG, open_chat_template
from millrace.checkpoint.config.encoder_config import read_encoder
from millrace.checkpoint.config.generation_config import (
    GENERATION_CONFIG,
    LLAMA_CPP,
    GenerationDefaults,
    read_generation,
)
from millrace.checkpoint.tokenizer.pair_template import PairTemplate
from millrace.checkpoint.tokenizer.tokenizer import VocabularyTokenizer, read_json_object
from millrace.checkpoint.tokenizer.tokenizer_files import open_tokenizer
from millrace.engine.artifact.engine import Engine
from millrace.engine.cuda.engine import GpuEngine
from millrace.engine.executor import Executor
from millrace.engine.native.executor import NativeExecutor, StatelessExecutor
from millrace.engine.transformers.engine import TransformersEngine
from millrace.errors import CheckpointError, ConfigError
from millrace.machine.cpu import memory, usable_cores
from millrace.runtime.encoder_loop import EncoderExecutor, EncoderLimits, EncoderLoop
from millrace.runtime.kv.kv_offload import KvOffloadStore, PageMemory
from millrace.runtime.loop import EngineLoop
from millrace.runtime.memory_plan import RunPlan, capped, plan_encoder, plan_run, with_one_table
from millrace.runtime.scheduling.admission_policy import Policy, fcfs
from millrace.runtime.scheduling.token_budget import TokenBudget
from millrace.runtime.settings import NATIVE, TRANSFORMERS, RunSettings
from millrace.settings import flag_of

TIER_BYTES = 4 * 2**30  # default size of the KV offload store


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A running language model. Close it when the loop has stopped."""

    name: str
    engine: Engine
    plan: RunPlan
    executor: Executor
    tokenizer: VocabularyTokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    prefix_cache: bool = True
    tier: KvOffloadStore | None = None

    def loop(self, budget: TokenBudget | None = None, policy: Policy = fcfs) -> EngineLoop:
        """Return a loop for it. budget: limits the duration of steps while answers run; None: the server's default"""
        return EngineLoop(
            self.executor,
            self.tokenizer,
            self.defaults,
            budget=budget,
            prefix_cache=self.prefix_cache,
            policy=policy,
            tier=self.tier,
        )

    @property
    def native(self) -> NativeExecutor:
        """The executor, if it is not a GPU's."""
        assert isinstance(self.executor, NativeExecutor), "not available for a GPU model"
        return self.executor

    @property
    def isa(self) -> str:
        """The instruction set; on a GPU, its name."""
        if isinstance(self.engine, GpuEngine):
            return self.engine.gpu.name
        return TRANSFORMERS if isinstance(self.engine, TransformersEngine) else self.native.isa

    @property
    def implementation(self) -> str:
        return TRANSFORMERS if isinstance(self.engine, TransformersEngine) else NATIVE

    @property
    def kv_bytes(self) -> int:
        return self.plan.kv_bytes

    def for_throughput(self) -> TokenBudget:
        return TokenBudget.unhurried(self.executor.limits.max_step_tokens)

    def close(self) -> None:
        if self.tier is not None:
            self.tier.close()
        self.executor.close()
        self.engine.close()
        if self.chat_template is not None:
            self.chat_template.close()


def open_engine(
    name: str, engine: Engine, run: RunSettings, sequences: int | None = None, *, one_table: bool = False
) -> RunningModel:
    """Plan the memory, then load the weights.

    raises MachineError before anything large is read, CheckpointError if tokenizer or chat template cannot be used
    sequences: number of full-context sequences that limits the KV pages, unless `run` sets their memory
    one_table: number pages alike in all cache groups, for evaluations, which run steps without a scheduler
    """
    folder, plan, most = engine.folder, _plan(engine, run), sequences if run.kv_memory is None else None
    if one_table:
        plan = with_one_table(engine, plan, most)
    elif most is not None:
        plan = capped(engine, plan, most)
    tokenizer = open_tokenizer(folder, engine.manifest.vocab_size)
    template = open_chat_template(folder, tokenizer)
    fields = read_json_object(folder / GENERATION_CONFIG)
    if not fields and engine.manifest.source.lower().endswith(".gguf"):  # the engine is older than these fields
        fields = dict(LLAMA_CPP)
    generation = read_generation(fields)
    # the end-of-text ids that were resolved when the engine was built
    defaults = replace(generation, eos_token_ids=tuple(engine.manifest.eos_token_ids))
    if isinstance(engine, GpuEngine):
        on_gpu = engine.on_gpu(plan.n_pages, plan.window_pages)
        return RunningModel(name, engine, plan, on_gpu, tokenizer, template, defaults, run.prefix_cache)
    if isinstance(engine, TransformersEngine):
        loaded = engine.load(plan.n_pages, run.threads or usable_cores())
        return RunningModel(name, engine, plan, loaded, tokenizer, template, defaults, prefix_cache=False)
    executor = engine.executor(
        n_pages=plan.n_pages, threads=run.threads or usable_cores(), isa=run.isa, window_pages=plan.window_pages,
        n_slots=plan.n_slots,
    )  # fmt: skip
    try:
        tier = None if run.kv_tier is None else _tier(engine, executor, run, Path(run.kv_tier))
    except ConfigError:
        executor.close()
        raise
    return RunningModel(name, engine, plan, executor, tokenizer, template, defaults, run.prefix_cache, tier)


def _plan(engine: Engine, run: RunSettings) -> RunPlan:
    if not isinstance(engine, GpuEngine):
        return plan_run(engine, memory(), run.kv_memory)
    result = engine.plan(run.kv_memory)
    needs, n, windows = result.needs, result.n_pages, result.window_pages
    computed = needs.step_bytes + needs.graphs_bytes
    kv_bytes = needs.kv_bytes(n, windows)
    return RunPlan(n, needs.weights_bytes, computed, kv_bytes, windows, engine.n_slots, needs.states_bytes)


def _tier(engine: Engine, executor: NativeExecutor, run: RunSettings, path: Path) -> KvOffloadStore:
    if not run.prefix_cache:
        what = "--kv-tier and --no-prefix-cache are both given"
        raise ConfigError(what, "a prefix cache, whose pages go there", "leave one out")
    if engine.windows or engine.states:
        what = f"--kv-tier is given, and {engine.manifest.model_name} has layers with a window or a state"
        raise ConfigError(what, "a model whose layers all attend to every token", "leave --kv-tier out")
    caches = msgspec.json.encode(engine.manifest.cpu.caches).decode()
    return KvOffloadStore(
        path, f"{engine.manifest.identity} {caches}", PageMemory(executor.kv_pages()), run.kv_tier_size or TIER_BYTES
    )


@dataclass(frozen=True, slots=True)
class OpenedEncoder:
    """A running encoder. Close it when the loop has stopped."""

    name: str
    engine: Engine
    network: EncoderExecutor
    tokenizer: VocabularyTokenizer
    limits: EncoderLimits
    pairs: PairTemplate | None = None  # of a cross-encoder, which reads two texts at once
    chat_template: None = None
    kv_bytes: int = 0
    implementation: str = NATIVE

    def loop(self) -> EncoderLoop:
        return EncoderLoop(self.network, self.limits)

    @property
    def isa(self) -> str:
        """The instruction set; on a GPU, its name."""
        if isinstance(self.engine, GpuEngine):
            return self.engine.gpu.name
        assert isinstance(self.network, StatelessExecutor), "asked of an encoder on a GPU"
        return self.network.isa

    def close(self) -> None:
        self.network.close()
        self.engine.close()


def open_encoder(name: str, engine: Engine, run: RunSettings) -> OpenedEncoder:
    """Open an encoder, as `open_engine`. raises MachineError; ConfigError for --kv-memory and --kv-tier"""
    for pages in ("kv_tier", "kv_memory"):
        if getattr(run, pages) is not None:
            what = f"{flag_of(pages)} is given for an encoder"
            raise ConfigError(what, "nothing: it keeps no keys and values", "leave it out")
    tokenizer, limits = open_tokenizer(engine.folder), EncoderLimits.from_engine(engine)
    pairs = _pair_template(engine, tokenizer) if engine.manifest.is_cross_encoder else None
    if isinstance(engine, GpuEngine):
        return OpenedEncoder(name, engine, engine.encoder_on_gpu(), tokenizer, limits, pairs)
    plan_encoder(engine, memory())
    network = engine.stateless_executor(threads=run.threads or usable_cores(), isa=run.isa)
    return OpenedEncoder(name, engine, network, tokenizer, limits, pairs)


def _pair_template(engine: Engine, tokenizer: VocabularyTokenizer) -> PairTemplate:
    """Return how a cross-encoder's texts are joined. raises CheckpointError for types that the model does not have"""
    pairs = tokenizer.pair_template
    n_types = read_encoder(read_json_object(engine.folder / CONFIG)).n_types
    if pairs.second_type >= n_types:
        raise CheckpointError(
            f"{engine.folder}: the tokenizer gives a second text the type {pairs.second_type}",
            f"types below type_vocab_size {n_types} of config.json", "check that both files belong to the same model",
        )  # fmt: skip
    return pairs


def open_any(name: str, engine: Engine, run: RunSettings) -> RunningModel | OpenedEncoder:
    """Open an engine of either kind."""
    return (open_encoder if engine.manifest.is_encoder else open_engine)(name, engine, run)
