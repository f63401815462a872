"""A built engine: opened from its folder, checked, and turned into an executor on this machine."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.engine.artifact.folder_lock import FolderLock, hold
from millrace.engine.artifact.manifest import (
    MANIFEST,
    PROGRAM,
    WEIGHTS,
    Manifest,
    SlotEntry,
    check_files,
    checksum_text,
    damaged,
    dims_of,
    not_an_engine,
    read_manifest,
)
from millrace.engine.artifact.tactics import damaged_tactics, read_tables, table_for
from millrace.engine.cache_specs import (
    PAGE_TOKENS,
    SLOTS_PER_SEQUENCE,
    CacheSpec,
    StateSpec,
    max_window_pages,
    page_bytes,
    slot_bytes,
    windows_of,
)
from millrace.engine.io_slots import Slot
from millrace.engine.native.executor import LoadedProgram, NativeExecutor, NativeProgram, StatelessExecutor
from millrace.errors import CheckpointError, EngineError
from millrace.graph.types import Symbol
from millrace.machine.cpu import fingerprint

CALL_BYTES = 4  # least bytes of a call in a program: the kernel's number


def _slot(entry: SlotEntry) -> Slot:
    return Slot(entry.name, dims_of(entry), entry.dtype, entry.offset)


@dataclass(frozen=True, slots=True)
class Engine:
    """A built engine. Its folder is not removed before `close`, or the end of this object."""

    folder: Path
    manifest: Manifest
    lock: FolderLock = field(compare=False, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> "Engine":
        """Open an engine. raises EngineError if anything is missing, unreadable, damaged or of another version"""
        folder = Path(folder)
        try:
            lock = hold(folder)
            if lock is None:
                raise not_an_engine(folder)
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except OSError as error:
            raise EngineError(f"{folder} cannot be read: {error}", "files that may be read", "check them") from error
        return cls(folder, manifest, lock)

    def close(self) -> None:
        """Allow the folder to be removed. Executors continue, because everything is in memory."""
        self.lock.release()

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return tuple(entry.spec() for entry in self.manifest.cpu.caches)

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return tuple(entry.spec() for entry in self.manifest.cpu.states)

    @property
    def n_slots(self) -> int:
        """State slots for a whole batch; 0: the model has no states."""
        return SLOTS_PER_SEQUENCE * self.manifest.max_sequences if self.states else 0

    @property
    def states_bytes(self) -> int:
        """Bytes of these slots."""
        return self.n_slots * slot_bytes(self.states)

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of the kept caches, each once."""
        return windows_of(self.caches)

    def window_page_bytes(self, window: int) -> int:
        """Return the bytes of one KV page in the caches of this window; 0: full attention."""
        return page_bytes(self.caches, window)

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page, over all layers."""
        return page_bytes(self.caches)

    def sequence_pages(self, window: int, n_tokens: int | None = None) -> int:
        """Return the most KV pages of one sequence in the caches of this window; 0: full attention.

        n_tokens: length of the sequence; None: the full context
        """
        m = self.manifest
        length = m.max_context if n_tokens is None else n_tokens
        return max_window_pages(window, length, m.max_step_tokens) if window else -(-length // PAGE_TOKENS)

    def sequence_bytes(self, n_tokens: int | None = None) -> int:
        """Return the bytes of one sequence's KV pages. n_tokens: as in `sequence_pages`"""
        return sum(self.window_page_bytes(w) * self.sequence_pages(w, n_tokens) for w in (0, *self.windows))

    def longest_sequence(self, kv_bytes: int) -> int:
        """Return the length of the longest sequence whose KV pages fit into `kv_bytes`, at most the context."""
        most = -(-self.manifest.max_context // PAGE_TOKENS)
        n = bisect_right(range(1, most + 1), kv_bytes, key=lambda pages: self.sequence_bytes(pages * PAGE_TOKENS))
        return min(n * PAGE_TOKENS, self.manifest.max_context)

    def executor(
        self, *, n_pages: int, threads: int | None = None, isa: str | None = None, tuned: bool = True,
        window_pages: Sequence[int] | None = None, n_slots: int | None = None,
    ) -> NativeExecutor:  # fmt: skip
        """Load the weights, with the engine's tactics if they were made for this machine and number of threads.

        window_pages: pages of the caches of each window; None: as many as of full attention
        n_slots: slots for states; None: as many as all sequences of a step can use
        raises MachineError if this CPU lacks the instruction set
        """
        self.check_language_model()
        executor = NativeExecutor(
            self._program(), n_pages=n_pages, max_context=self.manifest.max_context,
            vocab_size=self.manifest.vocab_size, threads=threads, isa=isa, window_pages=window_pages,
            n_slots=n_slots,
        )  # fmt: skip
        self._check_weights(executor)
        self._tune(executor, tuned)
        return executor

    def stateless_executor(
        self, *, threads: int | None = None, isa: str | None = None, tuned: bool = True
    ) -> StatelessExecutor:
        """Load an engine that is not a language model's, with its tactics if they were made for this machine.

        raises MachineError if this CPU lacks the instruction set, EngineError for a language model's engine
        """
        if self.manifest.is_language_model:
            raise EngineError(
                f"{self.folder} is the engine of a language model", "a network that keeps nothing between its runs",
                "generate with it, or chat",
            )  # fmt: skip
        network = StatelessExecutor(self._program(), threads=threads, isa=isa)
        self._check_weights(network)
        self._tune(network, tuned)
        return network

    def check_language_model(self) -> None:
        """Check that it is a language model. raises CheckpointError for an encoder, EngineError for another model"""
        if self.manifest.is_encoder:
            raise CheckpointError(
                f"{self.manifest.model_name} is an encoder: it gives a vector for each text, and no next token",
                "a model that generates text",
                "ask it for embeddings: LLM(model).embed(texts), or millrace serve and /v1/embeddings",
            )  # fmt: skip
        if not self.manifest.is_language_model:
            gives = ", ".join(self.manifest.gives)
            raise EngineError(
                f"{self.folder} is no language model's engine: it gives {gives}", "a model that gives logits",
                "run it from Python: Engine.open(folder).stateless_executor()",
            )  # fmt: skip

    def _program(self) -> NativeProgram:
        m = self.manifest
        symbols = {Symbol(s.name): s.high for s in m.symbols}
        calls = (self.folder / PROGRAM).read_bytes()
        if m.cpu.n_calls > len(calls) // CALL_BYTES:
            raise damaged(self.folder, f"{MANIFEST} lists {m.cpu.n_calls} calls, but {PROGRAM} has {len(calls)} bytes")
        return NativeProgram(
            calls=calls, n_calls=m.cpu.n_calls, weights=self.folder / WEIGHTS,
            weights_bytes=m.cpu.weights_bytes, activation_bytes=m.cpu.activation_bytes, symbols=symbols,
            inputs=tuple(map(_slot, m.cpu.inputs)), outputs=tuple(map(_slot, m.cpu.outputs)), caches=self.caches,
            states=self.states, sizes=tuple(entry.size() for entry in m.cpu.sizes),
        )  # fmt: skip

    def _check_weights(self, loaded: LoadedProgram) -> None:
        if checksum_text(loaded.weights_checksum()) != self.manifest.files[WEIGHTS].checksum:
            loaded.close()
            raise damaged(self.folder, f"{WEIGHTS} is damaged: its checksum differs")

    def _tune(self, loaded: LoadedProgram, tuned: bool) -> None:
        """Apply the tactics for this machine and number of threads, if there are any."""
        table = table_for(read_tables(self.folder) if tuned else [], fingerprint(loaded.isa), loaded.threads)
        if table is None:
            return
        try:
            loaded.set_tactics(table.entries())
        except EngineError as error:
            loaded.close()
            raise damaged_tactics(self.folder, error.what) from error

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.manifest.max_context // PAGE_TOKENS)
