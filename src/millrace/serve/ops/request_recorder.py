"""`--record`: a trace of a server's requests, without any text, which `millrace bench --input-file` replays.

One line for each request that ended, in Mooncake's format: arrival time (ms since 1970, UTC), lengths of prompt and
answer, and a number for each 512 tokens of the prompt, which is equal for prompts with the same prefix up to there.
The numbers count up in the order in which prefixes first occur, so nothing can be computed back from them.
In addition, what `millrace build --traffic` uses: "duration" (ms), "waited" before its first step (ms), the number of
"choices", and "max_tokens" if the request set it.
"""

import hashlib
import json
import logging
import secrets
import time
from collections import OrderedDict
from io import FileIO
from pathlib import Path

import numpy as np

from millrace.engine.executor import IntArray
from millrace.errors import ConfigError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.request.request import Request
from millrace.runtime.service import STOP_S, AsyncEngine, ServiceOptions
from millrace.tune.trace_formats import BLOCK

MAX_BYTES, MAX_BLOCKS = 1 << 30, 1 << 20  # bytes of a file; remembered prefixes, of which the oldest are dropped
log = logging.getLogger(__name__)


class Recorder:
    """A file that grows by one line for each request, up to MAX_BYTES."""

    def __init__(self, path: Path) -> None:
        """Create the file. raises ConfigError if it exists or cannot be created"""
        try:
            self._file: FileIO | None = path.open("xb", buffering=0)  # a buffer would fail once more when it is closed
        except FileExistsError:
            raise ConfigError(f"--record {path} exists", "a file that is not there yet", "name another") from None
        except OSError as error:
            message = f"--record {path} cannot be written: {error.strerror}"
            raise ConfigError(message, "a file in a folder that exists", "correct the path") from None
        self._salt = secrets.token_bytes(32)  # digests in memory are of no use elsewhere
        self._block_numbers: OrderedDict[bytes, int] = OrderedDict()
        self._n_numbers, self._n_bytes = 0, 0

    def write(self, arrived_s: float, prompt: IntArray, n_output: int, **fields: float) -> None:
        """prompt: (N,) token ids; fields: further fields of the line"""
        if self._file is None:
            return
        line = json.dumps(
            {
                "timestamp": round(1e3 * arrived_s, 3),
                "input_length": len(prompt),
                "output_length": n_output,
                "hash_ids": self._beginnings(prompt),
                **fields,
            }
        )
        try:
            self._append(self._file, f"{line}\n".encode())
        except OSError as error:
            self._end(f"the file cannot be written ({error.strerror})")
        if self._n_bytes > MAX_BYTES:
            self._end(f"it has {MAX_BYTES} bytes")

    def _append(self, file: FileIO, data: bytes) -> None:
        """Append a line. raises OSError, and then removes the partial line, which could not be replayed"""
        n_written = 0
        try:
            while n_written < len(data):  # a disk that gets full takes what it has room for
                n_written += file.write(data[n_written:])
        except OSError:
            file.truncate(self._n_bytes)
            raise
        self._n_bytes += n_written

    def close(self) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:  # some disks tell only now that they were full
            log.warning("the end of the recording may be missing: %s", error.strerror)

    def _end(self, reason: str) -> None:
        log.warning("nothing more is recorded: %s", reason)
        self.close()

    def _beginnings(self, prompt: IntArray) -> list[int]:
        """Return for each block, including a shorter last one, the number of the prefix up to its end."""
        numbers, digest = [], b""
        for start in range(0, len(prompt), BLOCK):
            block = prompt[start : start + BLOCK]
            digest = hashlib.blake2b(digest + block.tobytes(), key=self._salt, digest_size=16).digest()
            if digest not in self._block_numbers:
                self._block_numbers[digest] = self._n_numbers
                self._n_numbers += 1
                if len(self._block_numbers) > MAX_BLOCKS:
                    self._block_numbers.popitem(last=False)
            self._block_numbers.move_to_end(digest)
            numbers.append(self._block_numbers[digest])
        return numbers


class RecordedEngine(AsyncEngine):
    """Engine that records each request once its last answer has ended, including cancelled ones."""

    def __init__(self, loop: EngineLoop, options: ServiceOptions, recorder: Recorder) -> None:
        super().__init__(loop, options)
        self._recorder = recorder
        self._epoch_s = time.time() - loop.thread.clock()  # of the engine's clock, which begins anywhere

    def _flush(self) -> None:
        before = list(self._live)
        super()._flush()
        for handle in before:
            if handle not in self._live:
                for request in handle.requests:
                    came_s, n_output = self._epoch_s + request.timings.queued_s, request.timings.n_output_tokens
                    stay = timing_fields(request, self.limits.context_tokens)
                    self._recorder.write(came_s, content_of(request), n_output, **stay)

    async def close(self, within_s: float = STOP_S) -> None:
        await super().close(within_s)
        self._recorder.close()


def content_of(request: Request) -> IntArray:
    """Return the tokens of a prompt; for embedding rows, numbers that are equal if the rows are."""
    if request.rows is None:
        return request.prompt
    digests = [hashlib.blake2b(row.tobytes(), digest_size=4).digest() for row in request.rows]
    return np.frombuffer(b"".join(digests), np.int32)


def timing_fields(request: Request, context: int) -> dict[str, float]:
    """Return the timing fields of a finished request's line; max_tokens only if it is not the rest of the context."""
    timings, resolved = request.timings, request.resolved
    ended_s = timings.queued_s if timings.finished_s is None else timings.finished_s
    began_s = ended_s if timings.first_scheduled_s is None else timings.first_scheduled_s
    fields = {
        "duration": round(1e3 * (ended_s - timings.queued_s), 3),
        "waited": round(1e3 * (began_s - timings.queued_s), 3),
    }
    if resolved.n > 1:
        fields["choices"] = resolved.n
    if len(request.prompt) + resolved.max_tokens < context:
        fields["max_tokens"] = resolved.max_tokens
    return fields
