"""Structured output through llguidance: which tokens may come next, as a mask over the vocabulary.

Compiling a grammar takes from a millisecond to some 400. It is done before a request is submitted, in the caller's
thread and never in the engine's: first in another process, which a hostile grammar may crash (`grammar_process.py`),
then here. Compiled grammars are cached by their digest. The engine thread passes the sampled tokens to each answer's
`Matcher`, and requests the masks of all rows of a step in one call: while the step runs, if it leaves cores for that,
otherwise before it.

When an answer can only end, its mask allows the model's end-of-text tokens alone. An answer that cannot continue
(limits, or a vocabulary without a required byte) fails alone: its mask allows nothing, and its `fault` is an error of
the request.

Copies of a compiled grammar share one lexer with a limited number of states. If the lexer gives up on one answer, it
fails for all. Then the compiled grammar is dropped from the cache, and its requests continue with lexers of their own.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from millrace.checkpoint.tokenizer.tokenizer import Tokenizer
from millrace.errors import MachineError, RequestError
from millrace.machine.cpu import usable_cores
from millrace.runtime.request.structured_outputs import StructuredOutputsParams
from millrace.runtime.structured_output.grammar_limits import parser_limits
from millrace.runtime.structured_output.grammar_process import GrammarProcess, in_deep_stack
from millrace.runtime.structured_output.grammar_source import LIMITED, shortened, stopped_because
from millrace.runtime.structured_output.grammar_source import in_one_layout as in_one_layout

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_CACHED = 64  # compiled grammars
MAX_CACHED_CHARACTERS = 2**20  # of their sources; llguidance takes up to 60 bytes for each
MAX_THREADS = 4  # for the masks of a step
ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The tokens that delimit the reasoning before an answer, which no grammar constrains.

    opened: the prompt ends within the reasoning
    gap: white-space tokens that may follow it, with the characters of each; n_gap: limit on these characters
    """

    begin: int
    end: int
    opened: bool
    gap: Mapping[int, int] = field(default_factory=dict)
    n_gap: int = 0


@dataclass(slots=True, eq=False)
class _Compiled:
    """A compiled grammar. Answers use copies of `matcher`, which share its lexer."""

    key: bytes
    source: str  # in llguidance's Lark
    matcher: "LLMatcher"
    is_own: bool = False  # used by one request only: if its lexer gives up, the request is at fault

    @property
    def has_given_up(self) -> bool:
        """Whether not even the beginning of an answer is allowed any more."""
        first = self.matcher.deep_copy()
        first.compute_bitmask()
        return bool(first.is_error())


@dataclass(slots=True, eq=False)
class _MatcherHandle:
    """State shared by the answers of one request. compiled: its grammar, replaced after its lexer has given up"""

    params: StructuredOutputsParams
    compiled: _Compiled


class Matcher:
    """The position of one answer in its grammar. Belongs to one thread at a time."""

    __slots__ = (
        "_accepted",
        "_failed_because",
        "_handle",
        "_is_free",
        "_may_think",
        "_n_gap",
        "_reasoning",
        "compiled",
        "guide",
    )

    def __init__(self, handle: _MatcherHandle, reasoning: ReasoningSpan | None = None) -> None:
        self._handle, self._reasoning = handle, reasoning
        self.compiled, self.guide = handle.compiled, handle.compiled.matcher.deep_copy()
        self._accepted: list[int] = []  # by `guide`
        self._is_free = reasoning is not None and reasoning.opened
        self._may_think = reasoning is not None and not reasoning.opened
        self._n_gap = 0  # characters of the gap that may still follow
        self._failed_because = ""  # the server's fault

    def accept(self, token: int) -> None:
        """Accept the next token of the answer."""
        reasoning, may_think, self._may_think = self._reasoning, self._may_think, False
        n_gap, self._n_gap = self._n_gap, 0
        if reasoning is not None and self._is_free:
            self._is_free = token != reasoning.end
            self._n_gap = 0 if self._is_free else reasoning.n_gap
        elif reasoning is not None and token in self._gap(n_gap) and not self.guide.validate_tokens([token]):
            self._n_gap = n_gap - reasoning.gap[token]  # white space that the grammar accepts belongs to the answer
        elif reasoning is not None and may_think and token == reasoning.begin:
            self._is_free = True
        else:
            self._accepted.append(token)
            self.guide.consume_token(token)  # a refused token is an error of the matcher, reported by `error`

    def _gap(self, n_most: int) -> list[int]:
        """Return the tokens of the gap with at most `n_most` characters."""
        return [] if self._reasoning is None else [i for i, n in self._reasoning.gap.items() if n <= n_most]

    def restart(self, compiled: Callable[[str], "LLMatcher"]) -> None:
        """Restore the position with a lexer that only this request uses."""
        handle = self._handle
        if not handle.compiled.is_own:  # no other answer of the request has done so
            source = handle.compiled.source
            handle.compiled = _Compiled(handle.compiled.key, source, compiled(source), is_own=True)
        self.compiled, self.guide = handle.compiled, handle.compiled.matcher.deep_copy()
        self.guide.consume_tokens(self._accepted)

    def fail(self, reason: str) -> None:
        """End the answer because of a failure of the server, not of the request."""
        self._failed_because = reason

    @property
    def error(self) -> str:
        """Why the answer cannot continue; "" if it can, or is complete."""
        return self._failed_because or stopped_because(self.guide)

    @property
    def fault(self) -> RequestError | None:
        """The request's error, if its answer cannot continue."""
        if self._failed_because or not (error := self.error):
            return None
        params = self._handle.params
        what = f"its {params.kind} cannot be enforced any more in the middle of the answer: {error}"
        return params.refused(what, LIMITED, f"bound what {params.field_name} repeats, or simplify it")

    def finish(self, mask: NDArray[np.uint32], ends: Sequence[int]) -> None:
        """Complete the grammar's mask. ends: tokens that end an answer, but not its reasoning"""
        if self._is_free:
            mask[:] = ALL
            for token in ends:
                mask[token // 32] &= ~np.uint32(1 << token % 32)
        elif self.error:
            mask[:] = 0
        elif self._reasoning is not None:
            begin = [self._reasoning.begin] if self._may_think else []
            for token in (*begin, *self._gap(self._n_gap)):
                mask[token // 32] |= np.uint32(1 << token % 32)


class GrammarCompiler:
    """Compiles the grammars of one model's requests. Safe to use from several threads.

    vocab_size: of the model's logits; eos_token_ids: those that end an answer
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = [i for i in eos_token_ids if i < vocab_size]
        self._cache: OrderedDict[bytes, _Compiled] = OrderedDict()  # guarded by _lock
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._process: GrammarProcess | None = None
        self._unavailable_because = ""  # why there is no vocabulary
        self._mask_thread = ThreadPoolExecutor(1, "millrace-masks")  # starts its thread with the first masks
        self._filling = Future[None]()  # the last call in the mask thread
        self._filling.set_result(None)

    def matchers(
        self, params: StructuredOutputsParams | None, n: int, reasoning: ReasoningSpan | None = None
    ) -> list[Matcher]:
        """Return matchers for `n` answers, none without `params`. Compiles a grammar that is not cached.

        reasoning: the reasoning that may precede each answer, unconstrained
        raises RequestError if the grammar cannot be compiled or is too large; MachineError if memory is short
        """
        if params is None:
            return []
        text = params.text()
        key = hashlib.blake2b(f"{params.kind} {text}".encode("utf-8", "surrogatepass"), digest_size=32).digest()
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
        if compiled is None:
            compiled = _Compiled(key, *self._checked(params, text))
            with self._lock:
                self._cache[key] = compiled
                self._forget()
        handle = _MatcherHandle(params, compiled)
        return [Matcher(handle, reasoning) for _ in range(n)]

    def _forget(self) -> None:
        """Drop the least recently used grammars beyond the limits of the cache."""
        n = sum(len(compiled.source) for compiled in self._cache.values())
        while len(self._cache) > MAX_CACHED or (n > MAX_CACHED_CHARACTERS and len(self._cache) > 1):
            _, compiled = self._cache.popitem(last=False)
            n -= len(compiled.source)

    def masks(self, matchers: Sequence[Matcher]) -> NDArray[np.uint32]:
        """Return the masks (M, ceil(V / 32)) of what may come next; empty for an answer that cannot continue.

        matchers: made by this object
        """
        masks = np.empty((len(matchers), -(-self._vocab_size // 32)), np.uint32)
        self._fill(masks, matchers)
        return masks

    def masks_in_background(self, matchers: Sequence[Matcher]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """Start to fill the masks in another thread. Return them, and a flag (1,) that is 0 until they are filled.

        Until then the matchers belong to that thread. If it fails, which is a defect, the masks allow nothing and the
        next call
        raises the error.
        """
        self._filling.result()
        masks = np.zeros((len(matchers), -(-self._vocab_size // 32)), np.uint32)
        ready = np.zeros(1, np.int32)

        def work() -> None:
            try:
                self._fill(masks, matchers)
            except BaseException:
                masks[:] = 0
                raise
            finally:
                ready[0] = 1

        self._filling = self._mask_thread.submit(work)
        return masks, ready

    def _fill(self, masks: NDArray[np.uint32], matchers: Sequence[Matcher]) -> None:
        self._compute(range(len(matchers)), matchers, masks)
        restarted = []
        for row in self._lexer_failures(matchers):
            try:
                matchers[row].restart(self._compiled)
            except MachineError as error:  # the other answers of the step continue
                matchers[row].fail(error.what)
            else:
                restarted.append(row)
        if restarted:
            self._compute(restarted, matchers, masks)
        for mask, matcher in zip(masks, matchers, strict=True):
            matcher.finish(mask, self._ends)

    def revive(self, matcher: Matcher) -> None:
        """Restart a matcher whose lexer has given up, perhaps on another answer. raises MachineError"""
        if self._lexer_failures([matcher]):
            matcher.restart(self._compiled)

    def _compute(self, rows: Sequence[int], matchers: Sequence[Matcher], masks: NDArray[np.uint32]) -> None:
        assert self._executor is not None, "a matcher before its library"
        numbered = [(matchers[row].guide, row) for row in rows]
        self._executor.unsafe_compute_mask_ptr(numbered, masks.ctypes.data, masks.strides[0], len(masks))

    def _lexer_failures(self, matchers: Sequence[Matcher]) -> list[int]:
        """Return the rows whose lexer has given up, perhaps because of another answer, and drop their grammars.

        Such answers may continue after a restart, which compiles the grammar again and delays the step by some 2 ms, up
        to 60.
        """
        failed = {m.compiled for m in matchers if m.error and not m.compiled.is_own}
        given_up = {compiled for compiled in failed if compiled.has_given_up}
        with self._lock:
            for compiled in given_up:
                if self._cache.get(compiled.key) is compiled:
                    del self._cache[compiled.key]
        return [row for row, matcher in enumerate(matchers) if matcher.compiled in given_up]

    def _compiled(self, source: str) -> "LLMatcher":
        """Compile a grammar that the other process has compiled without crashing."""
        from llguidance import LLMatcher

        vocabulary = self._vocabulary
        assert vocabulary is not None, "a grammar before its vocabulary"
        return in_deep_stack(lambda: LLMatcher(vocabulary, source, log_level=0, limits=parser_limits()))

    def _checked(self, params: StructuredOutputsParams, text: str) -> tuple[str, "LLMatcher"]:
        """Return the Lark grammar of a request, and its compiled matcher. raises RequestError"""
        process = self._opened(params)
        source = process.lark(params, text)
        matcher = self._compiled(source)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # refuse what cannot begin before any step is computed for it
        if stop_reason := stopped_because(first):
            raise params.refused(f"its {params.kind} cannot be enforced: {stop_reason}", LIMITED)
        return source, matcher

    def prepare(self) -> None:
        """Build llguidance's vocabulary, some 0.2 s for a large one, and start the compiling process."""
        with self._opening:
            if self._vocabulary is not None or self._unavailable_because or not self._ends:
                return
            from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

            vocabulary = _TokenizerAdapter(self._tokenizer, self._vocab_size, self._ends)
            try:
                ready = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=self._ends)
            except ValueError as error:
                self._unavailable_because = shortened(str(error))
                return
            self._executor = LLExecutor(num_threads=min(MAX_THREADS, usable_cores()))
            if self._process is None:
                special = {token: vocabulary.tokens[token] for token in vocabulary.special_token_ids}
                self._process = GrammarProcess(self._vocab_size, special, self._ends, vocabulary.bos_token_id)
            self._process.start()
            self._vocabulary = ready

    def _opened(self, params: StructuredOutputsParams) -> GrammarProcess:
        """Return the compiling process. raises RequestError if the model cannot have structured output"""
        self.prepare()
        if self._process is not None:
            return self._process
        if not self._ends:
            what = "this model has no end-of-text token, so that such an answer could not end"
            raise params.refused(what, "a model with one", "choose another model")
        what = f"this model's vocabulary cannot be used for it: {self._unavailable_because}"
        raise params.refused(what, "a vocabulary that llguidance reads", "choose another model")


class _TokenizerAdapter:
    """A tokenizer in the form that llguidance reads: each token's bytes, and which are special."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in {*tokenizer.special_ids, *ends} if i < vocab_size)  # never text
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize forced text; not called, because forcing is off."""
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)
