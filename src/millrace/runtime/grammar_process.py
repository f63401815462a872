"""Grammars are compiled by another process before the server compiles them itself.

llguidance is native code that recurses over what clients send, so a request may end the process that compiles it. That
process is not the server: its death, or its limit of time or memory, is an error 400 of the request. Only what it has
survived is compiled here, in a thread with a larger stack.

Short and long requests have a process each, so that a short one waits for no long one.
"""

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from millrace.checkpoint.frames import EndedError, FrameProcess, LateError, Worker
from millrace.checkpoint.grammar_limits import limits
from millrace.errors import BusyError, RequestError
from millrace.runtime.grammar_worker import CPU_S, MEMORY_BYTES, STACK_BYTES
from millrace.runtime.structured import StructuredOutputsParams

T = TypeVar("T")
_WORKER = Path(__file__).with_name("grammar_worker.py")
_TIMEOUT_S = 60.0  # on a machine so busy that the limit of CPU time is not reached before
_THREAD_STACK_BYTES = 2 * STACK_BYTES
_stack_size = threading.Lock()  # Python has one setting for all threads


class GrammarProcess:
    """Turns requests for structured output into Lark grammars that are safe to compile.

    Safe to use from several threads.
    n_vocab: the length of the model's logits; special: its special tokens, by their ids; ends: those that end an answer
    """

    def __init__(self, n_vocab: int, special: dict[int, bytes], ends: list[int], bos: int | None) -> None:
        opened = {
            "path": sys.path, "n_vocab": n_vocab, "ends": ends, "bos": bos,
            "special": [[token, text.decode("latin-1")] for token, text in special.items()],
        }  # fmt: skip
        hello = json.dumps(opened).encode()

        def greet(process: FrameProcess) -> None:
            process.exchange(hello, _TIMEOUT_S)

        self._short, self._long = Worker(_WORKER, greet), Worker(_WORKER, greet)

    def start(self) -> None:
        """Start the process for short requests, so that the first of them does not wait for it.

        If it cannot start, the first request tries again, and says so.
        """
        with suppress(LateError, EndedError):
            self._short.exchange(b"{}", _TIMEOUT_S)

    def lark(self, params: StructuredOutputsParams, text: str) -> str:
        """Return the grammar of a request. raises RequestError if it cannot be enforced, or ends the process"""
        message = {"kind": params.kind, "text": text, "asked_as": params.asked_as, "limits": limits()}
        worker = self._short if params.is_short else self._long
        try:
            answer = json.loads(worker.exchange(json.dumps(message).encode(), _TIMEOUT_S))
        except LateError:
            raise _not_compiled(params, f"it took more than {_TIMEOUT_S:g} s") from None
        except EndedError:
            raise _not_compiled(
                params, f"the process for it ended at its limits ({CPU_S} s, {MEMORY_BYTES // 2**20} MB, its stack)"
            ) from None
        if error := answer.get("error"):
            what, expected, fix = error
            raise RequestError(what, expected, fix, params.asked_as)
        return str(answer["lark"])


def _not_compiled(params: StructuredOutputsParams, why: str) -> RequestError:
    return params.refused(
        f"its {params.kind} cannot be compiled: {why}", "what can be compiled within these limits",
        f"simplify {params.asked_as}",
    )  # fmt: skip


def in_deep_stack(work: Callable[[], T]) -> T:
    """Return the result of `work`, called in a thread with a stack larger than the compiling process has.

    raises what `work` raises, and BusyError if there is no memory for the thread
    """
    with ThreadPoolExecutor(1, "millrace-compile") as pool:
        with _stack_size:
            usual = threading.stack_size(_THREAD_STACK_BYTES)
            try:
                result = pool.submit(work)  # starts the thread
            except RuntimeError:
                raise BusyError("there is no memory for a thread", "memory for its stack", "come back later") from None
            finally:
                threading.stack_size(usual)
        return result.result()
