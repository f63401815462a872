"""A built engine: opened from its folder, checked, and turned into an executor on this machine."""

from dataclasses import dataclass, field
from pathlib import Path

from millrace.engine.hold import Hold, hold
from millrace.engine.manifest import PROGRAM, WEIGHTS, Manifest, check_files, damaged, not_an_engine, read_manifest
from millrace.engine.native import PAGE_TOKENS, KvFormat, KvShape, NativeExecutor, NativeProgram
from millrace.engine.tactics import TacticTable, damaged_tactics, read_tables, table_for
from millrace.errors import EngineError
from millrace.machine.cpu import fingerprint


@dataclass(frozen=True, slots=True)
class Engine:
    """Nobody removes its folder before `close`, or the end of this object."""

    folder: Path
    manifest: Manifest
    held: Hold = field(compare=False, repr=False)

    @classmethod
    def open(cls, folder: Path) -> "Engine":
        """raises EngineError for anything missing, unreadable, damaged or of another version"""
        try:
            held = hold(folder)
            if held is None:
                raise not_an_engine(folder)
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except OSError as error:
            raise EngineError(f"{folder} cannot be read: {error}", "files that may be read", "check them") from error
        if manifest.kv.format.upper() not in KvFormat.__members__:
            raise damaged(folder, f"unknown KV format {manifest.kv.format!r}")
        return cls(folder, manifest, held)

    def close(self) -> None:
        """From now on the folder may go; an executor works on, it has all in memory."""
        self.held.release()

    @property
    def kv(self) -> KvShape:
        kv = self.manifest.kv
        return KvShape(layers=kv.layers, heads=kv.heads, head_dim=kv.head_dim, format=KvFormat[kv.format.upper()])

    def pages_for(self, kv_bytes: int) -> int:
        """How many KV pages fit into so many bytes."""
        return kv_bytes // max(self.kv.page_bytes(), 1)

    def executor(
        self, *, n_pages: int, threads: int | None = None, isa: str | None = None, tuned: bool = True
    ) -> NativeExecutor:
        """Loads the weights, and takes the engine's tactics where they were made for this machine and as many threads.

        raises MachineError for an instruction set that this CPU lacks
        """
        m = self.manifest
        program = NativeProgram(
            steps=(self.folder / PROGRAM).read_bytes(), n_steps=m.n_steps, weights=self.folder / WEIGHTS,
            weights_bytes=m.weights_bytes, activation_bytes=m.activation_bytes, logits_offset=m.logits_offset,
            max_step_tokens=m.max_step_tokens, max_sequences=m.max_sequences, max_context=m.max_context,
            vocab_size=m.vocab_size, kv=self.kv,
        )  # fmt: skip
        executor = NativeExecutor(program, n_pages=n_pages, threads=threads, isa=isa)
        if f"{executor.weights_checksum() & (2**64 - 1):016x}" != m.files[WEIGHTS].checksum:
            executor.close()
            raise damaged(self.folder, f"{WEIGHTS} is damaged: its checksum differs")
        tables = read_tables(self.folder) if tuned else []
        if table := table_for(tables, fingerprint(executor.isa), executor.threads):
            self._take(executor, table)
        return executor

    def _take(self, executor: NativeExecutor, table: TacticTable) -> None:
        try:
            executor.set_tactics(table.entries())
        except EngineError as error:
            executor.close()
            raise damaged_tactics(self.folder, error.what) from error

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.manifest.max_context // PAGE_TOKENS)
