"""`--record`: what a server was asked, without any text, as a trace that `millrace bench --input-file` replays.

A line for each request that ended, in Mooncake's format: when it came (ms of the engine's clock), how long prompt and
answer were, and for each 512 tokens of the prompt a number, which is the same where prompts have begun alike so far.
The numbers count up in the order in which beginnings were first seen: nothing can be computed back from them.
"""

import hashlib
import json
import logging
import secrets
from collections import OrderedDict
from pathlib import Path
from typing import IO

from millrace.engine.executor import IntArray
from millrace.errors import ConfigError
from millrace.runtime.loop import EngineLoop
from millrace.runtime.service import STOP_S, AsyncEngine, ServiceOptions

BLOCK = 512  # tokens, as in Mooncake's traces
MOST_BYTES, MOST_KNOWN = 1 << 30, 1 << 20  # of a file; of beginnings, of which the oldest are forgotten
log = logging.getLogger(__name__)


class Recorder:
    """A file that grows by a line for each request, up to MOST_BYTES."""

    def __init__(self, path: Path) -> None:
        """raises ConfigError where there is such a file, or cannot be one"""
        try:
            self._file: IO[str] | None = path.open("x", encoding="utf-8", buffering=1)
        except FileExistsError:
            raise ConfigError(f"--record {path} exists", "a file that is not there yet", "name another") from None
        except OSError as error:
            what = f"--record {path} cannot be written: {error.strerror}"
            raise ConfigError(what, "a file in a folder that exists", "correct the path") from None
        self._salt = secrets.token_bytes(32)  # digests in memory are of no use elsewhere
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._n_numbers, self._n_bytes = 0, 0

    def write(self, queued_s: float, prompt: IntArray, n_output: int) -> None:
        """prompt: (N,) token ids"""
        if self._file is None:
            return
        line = json.dumps(
            {
                "timestamp": round(1e3 * queued_s, 3),
                "input_length": len(prompt),
                "output_length": n_output,
                "hash_ids": self._beginnings(prompt),
            }
        )
        self._n_bytes += len(line) + 1
        try:
            self._file.write(line + "\n")
        except OSError as error:
            self._end(f"the file cannot be written ({error.strerror})")
        if self._n_bytes > MOST_BYTES:
            self._end(f"it has {MOST_BYTES} bytes")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end(self, why: str) -> None:
        log.warning("nothing more is recorded: %s", why)
        self.close()

    def _beginnings(self, prompt: IntArray) -> list[int]:
        """Of each block, the last shorter one included, the number of all up to its end."""
        found, digest = [], b""
        for start in range(0, len(prompt), BLOCK):
            block = prompt[start : start + BLOCK]
            digest = hashlib.blake2b(digest + block.tobytes(), key=self._salt, digest_size=16).digest()
            if digest not in self._known:
                self._known[digest] = self._n_numbers
                self._n_numbers += 1
                if len(self._known) > MOST_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(digest)
            found.append(self._known[digest])
        return found


class RecordedEngine(AsyncEngine):
    """Tells a recorder of each request when its last answer has come, cancelled ones included."""

    def __init__(self, loop: EngineLoop, options: ServiceOptions, recorder: Recorder) -> None:
        super().__init__(loop, options)
        self._recorder = recorder

    def _flush(self) -> None:
        before = list(self._live)
        super()._flush()
        for handle in before:
            if handle not in self._live:
                for request in handle.requests:
                    timings = request.timings
                    self._recorder.write(timings.queued_s, request.prompt, timings.n_output_tokens)

    async def close(self, within_s: float = STOP_S) -> None:
        await super().close(within_s)
        self._recorder.close()
