"""Grammars are compiled by another process before the server compiles them itself.

llguidance is native code that recurses over what clients send, so a request may end the process that compiles it. That
process is not the server: its death, or its limit of time or memory, is an error 400 of the request. Only what it has
survived is compiled here, in a thread with a larger stack.

Short and long requests have a process each, so that a short one waits for no long one.
"""

import json
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from millrace.errors import MachineError, RequestError
from millrace.machine.worker_process import (
    FrameProcess,
    WorkerDiedError,
    WorkerProcess,
    WorkerTimeoutError,
    unavailable,
)
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output.grammar_limits import limits
from millrace.runtime.structured_output.grammar_worker import MEMORY_BYTES, STACK_BYTES

T = TypeVar("T")
_WORKER = Path(__file__).with_name("grammar_worker.py")
SHORT_CPU_S, LONG_CPU_S = 0.15, 3.0
_TIMEOUT_S = 60.0  # for a machine so busy that the limit of CPU time is not reached earlier
_THREAD_STACK_BYTES = 2 * STACK_BYTES
_stack_size = threading.Lock()  # Python has one setting for all threads


class _SlowError(Exception):
    """A request took more CPU time than its process allows."""


class _Compiler:
    """A process that compiles, with a limit of CPU time for each request."""

    def __init__(self, hello: bytes, cpu_s: float) -> None:
        self.cpu_s, self._hello = cpu_s, hello
        self.worker = WorkerProcess(_WORKER, self._greet)

    def start(self) -> None:
        """raises MachineError"""
        self.worker.exchange(b"{}", _TIMEOUT_S)

    def compile(self, message: Mapping[str, object]) -> Mapping[str, Any]:
        """Return the answer to a request. raises _SlowError, LateError, EndedError, and MachineError"""
        payload = json.dumps({**message, "cpu_s": self.cpu_s}).encode()
        try:
            answer: Mapping[str, Any] = json.loads(self.worker.exchange(payload, _TIMEOUT_S, retry=False))
        except WorkerDiedError as error:
            if error.returncode == -signal.SIGPROF:
                raise _SlowError from None
            raise
        return answer

    def _greet(self, process: FrameProcess) -> None:
        process.exchange(self._hello, _TIMEOUT_S)


class GrammarProcess:
    """Turns requests for structured output into Lark grammars that are safe to compile.

    Safe to use from several threads.

    n_vocab: length of the model's logits; special: its special tokens by id; ends: tokens that end an answer
    """

    def __init__(self, n_vocab: int, special: dict[int, bytes], ends: list[int], bos: int | None) -> None:
        opened = {
            "path": sys.path, "n_vocab": n_vocab, "ends": ends, "bos": bos,
            "special": [[token, text.decode("latin-1")] for token, text in special.items()],
        }  # fmt: skip
        hello = json.dumps(opened).encode()
        self._short, self._long = _Compiler(hello, SHORT_CPU_S), _Compiler(hello, LONG_CPU_S)

    def start(self) -> None:
        """Start the process for short requests, so that the first of them does not wait for it.

        If it cannot start, the first request tries again, and says so.
        """
        with suppress(MachineError, WorkerTimeoutError, WorkerDiedError):
            self._short.start()

    def lark(self, params: StructuredOutputsParams, text: str) -> str:
        """Return the grammar of a request.

        raises RequestError if it cannot be enforced, or ends the process; MachineError if no process can start or stay
        """
        message = {"kind": params.kind, "text": text, "field_name": params.field_name, "limits": limits()}
        try:
            answer = self._compiled(params.is_short, message)
        except _SlowError:
            raise _not_compiled(params, f"it takes more than {LONG_CPU_S:g} s of CPU time") from None
        except WorkerTimeoutError:
            raise _not_compiled(params, f"it took more than {_TIMEOUT_S:g} s") from None
        except WorkerDiedError as ended:
            if ended.is_from_outside:
                raise unavailable("the process that compiles grammars was killed") from None
            raise _not_compiled(
                params, f"the process for it ended (more than {MEMORY_BYTES // 2**20} MB, or nested too deeply)"
            ) from None
        if error := answer.get("error"):
            what, expected, fix = error
            raise RequestError(what, expected, fix, params.field_name)
        return str(answer["lark"])

    def _compiled(self, is_short: bool, message: Mapping[str, object]) -> Mapping[str, Any]:
        """Compile in the matching process; a request that is slow although short is tried again among the long ones."""
        if is_short:
            with suppress(_SlowError):
                return self._short.compile(message)
        return self._long.compile(message)


def _not_compiled(params: StructuredOutputsParams, reason: str) -> RequestError:
    return params.refused(
        f"its {params.kind} cannot be compiled: {reason}", "what can be compiled within these limits",
        f"simplify {params.field_name}",
    )  # fmt: skip


def in_deep_stack(work: Callable[[], T]) -> T:
    """Return the result of `work`, called in a thread with a stack larger than the compiling process has.

    raises what `work` raises, and MachineError if there is no memory for the thread
    """
    with ThreadPoolExecutor(1, "millrace-compile") as pool:
        with _stack_size:
            usual = threading.stack_size(_THREAD_STACK_BYTES)
            try:
                result = pool.submit(work)  # starts the thread
            except RuntimeError:
                raise MachineError(
                    "no memory is left for a thread that compiles grammars", f"{_THREAD_STACK_BYTES // 2**20} MB",
                    "try again later; the server's operator may free memory",
                ) from None  # fmt: skip
            finally:
                threading.stack_size(usual)
        return result.result()
