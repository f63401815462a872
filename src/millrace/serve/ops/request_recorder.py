"""`--record`: what a server was asked, without any text, as a trace that `millrace bench --input-file` replays.

A line for each request that ended, in Mooncake's format: when it came (ms since 1970, UTC), how long prompt and
answer were, and for each 512 tokens of the prompt a number, which is the same where prompts have begun alike so far.
The numbers count up in the order in which beginnings were first seen: nothing can be computed back from them.
Beside that what `millrace build --traffic` chooses by: how long it was there ("duration", ms), how long of that before
its first step ("waited", ms), how many "choices" it had, up to how many tokens each where it said so ("max_tokens").
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

MAX_BYTES, MAX_BLOCKS = 1 << 30, 1 << 20  # of a file; of beginnings, of which the oldest are forgotten
log = logging.getLogger(__name__)


class Recorder:
    """A file that grows by a line for each request, up to MOST_BYTES."""

    def __init__(self, path: Path) -> None:
        """raises ConfigError where there is such a file, or cannot be one"""
        try:
            self._file: FileIO | None = path.open("xb", buffering=0)  # a buffer would fail once more when it is closed
        except FileExistsError:
            raise ConfigError(f"--record {path} exists", "a file that is not there yet", "name another") from None
        except OSError as error:
            what = f"--record {path} cannot be written: {error.strerror}"
            raise ConfigError(what, "a file in a folder that exists", "correct the path") from None
        self._salt = secrets.token_bytes(32)  # digests in memory are of no use elsewhere
        self._block_numbers: OrderedDict[bytes, int] = OrderedDict()
        self._n_numbers, self._n_bytes = 0, 0

    def write(self, arrived_s: float, prompt: IntArray, n_output: int, **fields: float) -> None:
        """prompt: (N,) token ids; stay: what else its line says"""
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
        """raises OSError; the file has whole lines then, too: one that is torn would not be replayed"""
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
        """Of each block, the last shorter one included, the number of all up to its end."""
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
    """Tells a recorder of each request when its last answer has come, cancelled ones included."""

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
    """Return the tokens of a prompt; for embedding rows, numbers that are equal only where rows are."""
    if request.rows is None:
        return request.prompt
    digests = [hashlib.blake2b(row.tobytes(), digest_size=4).digest() for row in request.rows]
    return np.frombuffer(b"".join(digests), np.int32)


def timing_fields(request: Request, context: int) -> dict[str, float]:
    """What the line of a request that ended says of its stay; a limit that is the rest of the context is nobody's."""
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
