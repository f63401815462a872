"""The process that compiles grammars first, because a hostile schema may crash native code.

It is started as a script, and its stdin is a connection to its owner (see `machine/worker_process.py`). The messages
are JSON. First {"path", "n_vocab", "special", "ends", "bos"}, special being [[token id, bytes in Latin-1], ...]; the
answer is {}. Then, any number of times,

    {"kind", "text", "field_name", "limits", "cpu_s"}  ->  {"lark"} or {"error": [what, expected, fix]}
    {}                                               ->  {}

The vocabulary is the model's special tokens and the 256 bytes. A request that takes too much time, memory or stack ends
the process.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from ctypes import addressof, c_uint32
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

STACK_BYTES = 64 * 2**20
MEMORY_BYTES = 512 * 2**20  # address space beyond what the process needs for itself
PRIORITY = 5  # like nice(1): the engine's threads go first
N_STEPS = 8  # steps of an answer whose masks are computed
_STRIDE = 7919  # a prime, to select tokens from the whole vocabulary


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is handled by the parent
    os.nice(PRIORITY)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(0),))
    thread.start()
    thread.join()


def _serve(owner: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):  # the owner is gone
        opened = json.loads(owner.recv_bytes())
        sys.path[:] = opened["path"]  # as the parent sees it: it may run from a source tree
        compiler = _WorkerCompiler(opened)
        _limit_memory()
        owner.send_bytes(b"{}")
        while True:
            request = json.loads(owner.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, request.get("cpu_s", 0.0))  # SIGPROF ends the process
            answer = compiler.answer(request) if request else {}
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            owner.send_bytes(json.dumps(answer).encode())


def _limit_memory() -> None:
    from millrace.machine.address_space import limit_address_space

    limit_address_space(MEMORY_BYTES)


class _Vocabulary:
    """The tokenizer for llguidance: special tokens at their ids, and the 256 bytes after the others."""

    def __init__(self, n_vocab: int, special: list[list[Any]], ends: list[int], bos: int | None) -> None:
        self.tokens = [b""] * n_vocab + [bytes((byte,)) for byte in range(256)]
        for token, text in special:
            self.tokens[token] = text.encode("latin-1")
        self.special_token_ids = sorted({*ends, *(token for token, _ in special)})
        self.eos_token_id, self.bos_token_id = ends[0], bos
        self._n_vocab = n_vocab

    def __call__(self, text: bytes) -> list[int]:
        return [self._n_vocab + byte for byte in text]


class _WorkerCompiler:
    def __init__(self, opened: dict[str, Any]) -> None:
        from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(opened["n_vocab"], opened["special"], opened["ends"], opened["bos"])
        self._n_vocab = len(vocabulary.tokens)
        self._vocabulary = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._n_vocab, eos_token=opened["ends"])
        self._executor = LLExecutor(num_threads=1)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        from llguidance import LLParserLimits

        from millrace.errors import RequestError
        from millrace.runtime.request.structured_outputs import StructuredOutputsParams
        from millrace.runtime.structured_output.grammar_source import compiled

        kind, text = request["kind"], request["text"]
        value: Any = json.loads(text) if kind == "choice" else True if kind == "json_object" else text
        params = StructuredOutputsParams(**{kind: value}, field_name=request["field_name"])
        try:
            lark, matcher = compiled(params, text, self._vocabulary, LLParserLimits(**request["limits"]))
        except RequestError as error:
            return {"error": [error.what, error.expected, error.fix]}
        self._begin_answers(matcher)
        return {"lark": lark}

    def _begin_answers(self, matcher: "LLMatcher") -> None:
        """Compute the first masks of answers as the server will, in pairs, as in a batch."""
        first, second = matcher.deep_copy(), matcher.deep_copy()
        n_words = -(-self._n_vocab // 32)
        masks = (c_uint32 * (2 * n_words))()
        for step in range(N_STEPS):
            if first.is_stopped():
                return
            self._executor.unsafe_compute_mask_ptr([(first, 0), (second, 1)], addressof(masks), 4 * n_words, 2)
            allowed = [i for i in range(self._n_vocab) if masks[i // 32] >> i % 32 & 1]
            if not allowed:
                return
            token = allowed[step * _STRIDE % len(allowed)]
            first.consume_token(token)
            second.consume_token(token)


if __name__ == "__main__":
    main()
