"""A request and its choices: their tokens, computed positions, pages and text.

A choice is a `Sequence`: prompt, then output. The scheduler moves `n_computed` towards `n_tokens`; when they meet, the
executor draws the next token and `append_token` puts `n_tokens` one ahead again.

An answer ends by end-of-text, stop tokens, stop strings or max_tokens. Stop strings are searched in the detokenized
text by characters, so the answer does not depend on how the text is cut into tokens: the stop string that is complete
first ends it, and of two that end together the longer one. Text that may be the beginning of a stop string is held back
until that is decided. Before `min_tokens`, everything but max_tokens is ignored and stays in the answer; the logits are
not changed, so the same tokens are drawn as without it.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from millrace.checkpoint.tokenizer.tokenizer import Detokenizer, Tokenizer
from millrace.engine.executor import IntArray, SampleError
from millrace.errors import RequestError
from millrace.runtime.kv.cache_groups import NO_CACHES, SequenceCaches
from millrace.runtime.kv.int_buffer import IntBuffer
from millrace.runtime.kv.pages import Key, PageKey, extend_keys, root_key
from millrace.runtime.request.prefix_cache_options import DEFAULT_CACHE_OPTIONS, CacheOptions
from millrace.runtime.request.prompt_embeds import EmbeddedPrompt, Rows
from millrace.runtime.request.queue_options import DEFAULT_QUEUE_OPTIONS, QueueOptions
from millrace.runtime.request.sampling_params import Delta, FinishReason, ResolvedParams, SamplingParams, TokenLogprobs
from millrace.runtime.structured_output.grammar import Matcher


@dataclass(frozen=True, slots=True)
class FinishDetail:
    reason: FinishReason
    stop: int | str | None = None  # the stop token or string; None for end-of-text and lengths


def finish_by_token(token: int, n_output: int, resolved: ResolvedParams) -> FinishDetail | None:
    """Return the finish if `token`, the `n_output`-th of the answer, ends it."""
    if n_output < resolved.min_tokens:
        return None
    if token in resolved.eos_token_ids:
        return FinishDetail(FinishReason.STOP)
    if token in resolved.stop_token_ids:
        return FinishDetail(FinishReason.STOP, token)
    return None


def finish_by_length(n_output: int, resolved: ResolvedParams) -> FinishDetail | None:
    """Return the finish at `max_tokens`, which also covers the context, because `max_tokens` never exceeds it."""
    return FinishDetail(FinishReason.LENGTH) if n_output >= resolved.max_tokens else None


class StopTables:
    """Search tables for the stop strings of a request, shared by its choices."""

    __slots__ = ("borders", "stops")

    def __init__(self, stops: Ordered[str]) -> None:
        self.stops = sorted(set(stops), key=len, reverse=True)  # the longest first wins a tie
        self.borders = [_borders(stop) for stop in self.stops]


class StopStrings:
    """Finds the first of several strings in a stream of text (Knuth, Morris and Pratt, one automaton each)."""

    __slots__ = ("_borders", "_buffered", "_include", "_matched", "_stops")

    def __init__(self, tables: StopTables, include_in_output: bool) -> None:
        self._stops, self._borders = tables.stops, tables.borders
        self._matched = [0] * len(self._stops)  # how many first characters of each stop string the text ends with
        self._include = include_in_output
        self._buffered = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text. Return the text that is certain to be in the answer, and the stop string found or None.

        With `may_stop` False a complete stop string is ignored. Do not call it again after one was found.
        """
        if not self._stops:
            return text, None
        pending = self._buffered + text
        for at in range(len(self._buffered), len(pending)):
            stop = self._advance(pending[at])
            if stop is not None and may_stop:
                self._buffered = ""
                return pending[: at + 1 if self._include else at + 1 - len(stop)], stop
        n_held = max(self._matched)
        self._buffered = pending[len(pending) - n_held :]
        return pending[: len(pending) - n_held], None

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream."""
        buffered, self._buffered = self._buffered, ""
        return buffered

    def _advance(self, char: str) -> str | None:
        result = None
        for i, stop in enumerate(self._stops):
            n, borders = self._matched[i], self._borders[i]
            while n and stop[n] != char:
                n = borders[n - 1]
            n += stop[n] == char
            if n == len(stop):
                result = result or stop
                n = borders[n - 1]
            self._matched[i] = n
        return result


class TextStream(Protocol):
    """The methods of `checkpoint.tokenizer.Detokenizer` that an answer needs."""

    def push(self, ids: Ordered[int]) -> str:
        """Return the complete characters that these tokens add."""
        ...

    def flush(self) -> str:
        """Return what is left of an unfinished character."""
        ...


class AnswerText:
    """The text of one answer, token by token, up to a stop string."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, detokenizer: TextStream, tables: StopTables, include_stop: bool) -> None:
        """tables: those of the request's `stop`, shared by its choices"""
        self._detokenizer, self._stops = detokenizer, StopStrings(tables, include_stop)

    @classmethod
    def for_choice(
        cls, tokenizer: Tokenizer, prompt: Ordered[int] | None, params: SamplingParams, tables: StopTables
    ) -> "AnswerText":
        """Return the text of a choice. prompt: token ids; None: it is embedding rows"""
        shown = Detokenizer(tokenizer, params.skip_special_tokens, prompt)
        return cls(shown, tables, params.include_stop_str_in_output)

    def push(self, tokens: Ordered[int], may_stop: bool) -> tuple[str, str | None]:
        """Return the text that these tokens add, as `StopStrings.push`."""
        return self._stops.push(self._detokenizer.push(tokens), may_stop)

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the answer."""
        text, stop = self._stops.push(self._detokenizer.flush(), may_stop=False)
        assert stop is None
        return text + self._stops.flush()


def _borders(stop: str) -> list[int]:
    """Return, for each prefix of `stop`, the length of its longest proper suffix that is also a prefix."""
    borders, n = [0], 0
    for char in stop[1:]:
        while n and stop[n] != char:
            n = borders[n - 1]
        n += stop[n] == char
        borders.append(n)
    return borders


Deliver = Callable[[list[Delta]], None]  # called in the engine thread, at most once per step and request


def _no_receiver(deltas: list[Delta]) -> None:
    raise AssertionError("a request that has ended has nothing to say")


@dataclass(slots=True)
class Timings:
    """Times by the engine's clock, in seconds; None: not reached yet. Written by the engine thread only."""

    queued_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    n_preemptions: int = 0
    n_output_tokens: int = 0  # of all choices
    received_s: float | None = None  # by a server, as the next two: when the first byte of the request arrived,
    first_read_s: float | None = None  # when a token was first read,
    last_read_s: float | None = None  # and last read

    def running_s(self, now_s: float) -> float:
        """Return the seconds since the first step; 0 before it."""
        return 0.0 if self.first_scheduled_s is None else now_s - self.first_scheduled_s


class Stage(Enum):
    WAITING = auto()  # holds no pages
    RUNNING = auto()
    GONE = auto()  # finished or cancelled; holds no pages


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request besides its sampling parameters. cache: prefix cache; queue_options: queueing

    delivered: output tokens of each choice that the client already has: the answers continue after them
    adapter: its number in the executor; 0: none
    """

    cache: CacheOptions = DEFAULT_CACHE_OPTIONS
    queue_options: QueueOptions = DEFAULT_QUEUE_OPTIONS
    delivered: tuple[tuple[int, ...], ...] = ()
    adapter: int = 0


DEFAULT_OPTIONS = RequestOptions()


@dataclass(slots=True, eq=False)
class Request:
    """A submitted request and its progress. Compared by identity, because ids may come from clients.

    first: the index of its first choice, if one reader has several requests
    matchers: the grammars of its choices; none without structured output
    embedded: the embedding rows that the prompt's numbers refer to; None: the numbers are token ids
    """

    id: str
    prompt: IntArray  # (N,) read-only
    resolved: ResolvedParams
    deliver: Deliver
    timings: Timings
    new_text: Callable[[], AnswerText]  # called for each choice
    first: int = 0
    options: RequestOptions = DEFAULT_OPTIONS
    matchers: Ordered[Matcher] = ()
    embedded: EmbeddedPrompt | None = None
    choices: list["Sequence"] = field(init=False)
    order: int = field(init=False, default=0)  # of arrival at the scheduler
    root: Key = field(init=False)  # of its page keys
    has_retention: bool = field(init=False)  # the retention that `cache` requests is not applied yet
    n_cached: int = field(init=False, default=0)  # prompt tokens found in the prefix cache at its first step
    n_scored: int = field(init=False, default=1)  # prompt tokens whose log probabilities are computed or not needed

    def __post_init__(self) -> None:
        if self.resolved.prompt_top is None:
            self.n_scored = len(self.prompt)
        key_parts = [] if self.embedded is None else [self.embedded.digest]
        if self.options.adapter:
            key_parts.append(b"adapter %d" % self.options.adapter)
        self.root = root_key(self.cache.salt.encode(errors="surrogatepass"), *key_parts)
        self.has_retention = self.cache.pin or self.cache.priority is not None
        self.choices = [Sequence(self, index) for index in range(self.resolved.n)]

    @property
    def rows(self) -> Rows | None:
        """The embedding rows (N, width) of its prompt; None if it is token ids."""
        return None if self.embedded is None else self.embedded.rows

    @property
    def cache(self) -> CacheOptions:
        return self.options.cache

    @property
    def queue_options(self) -> QueueOptions:
        return self.options.queue_options

    @property
    def is_open(self) -> bool:
        return any(seq.stage is not Stage.GONE for seq in self.choices)

    def break_cycles(self) -> None:
        """Drop the references to choices and reader after everything is delivered: they refer to the request.

        Otherwise its tokens stay until the garbage collector runs: under load, for some 2,500 requests.
        """
        self.choices, self.deliver = [], _no_receiver


class Sequence:
    """Choice `index` of a request."""

    __slots__ = (
        *("index", "matcher", "n_computed", "n_prompt", "pages", "request", "row", "stage", "text", "tokens"),
        *(
            "keys",
            "prefix_leader",
            "leader_prefix_key",
            "n_ahead",
            "n_finite",
            "n_indexed",
            "max_computed",
            "source",
            "caches",
        ),
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request, self.index, self.stage = request, index, Stage.WAITING
        self.tokens = IntBuffer(request.prompt)
        self.n_prompt = len(request.prompt)
        self.max_computed = self.n_prompt + request.resolved.max_tokens - 1  # ever computed: the last token is not
        self.n_computed = 0
        self.n_ahead = 0  # tokens that launched steps draw after these: known to the device only
        self.pages = IntBuffer()
        self.caches: SequenceCaches = NO_CACHES  # its window pages and state slots while it runs
        self.keys: list[Key] = []  # of its first full pages, as far as requested
        self.n_finite = 0  # computed tokens from which a finite token was drawn
        self.n_indexed = 0  # number of leading pages already in the prefix index
        self.prefix_leader: Sequence | None = None  # the sequence with the same beginning whose prompt it waits for
        self.source: int | None = None  # a page that the next step copies into the first own one; co-owned until then
        self.leader_prefix_key: Key | None = None  # key of the first page that it computes and others may wait for
        self.text = request.new_text()
        self.matcher = request.matchers[index] if request.matchers else None
        row = request.resolved.row.copy()
        row["choice"] = index
        self.row = row.tobytes()  # its row of SAMPLING; BatchBuilder fills in what changes

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the first-come-first-served queue."""
        return self.request.order, self.index

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens to compute before the next one can be drawn; 0 while the last possible one is being drawn."""
        return min(len(self.tokens) + self.n_ahead, self.max_computed) - self.n_computed

    def page_keys(self, n_pages: int, page_tokens: int) -> list[Key]:
        """Return the keys of its first `n_pages`, which are full."""
        if len(self.keys) < n_pages:
            if not self.keys:  # siblings have the same prompt
                self.keys += self.request.choices[0].keys[: self.n_prompt // page_tokens]
            extend_keys(self.keys, self.request.root, self.tokens.array, n_pages, page_tokens)
        return self.keys[:n_pages]

    def content(self, i: int, page_tokens: int, n_tokens: int | None = None) -> PageKey:
        """Return the content of its page `i`, whose previous pages are full. n_tokens: tokens to consider"""
        after = self.page_keys(i, page_tokens)[-1] if i else self.request.root
        return PageKey(after, self.tokens.array[:n_tokens][i * page_tokens : (i + 1) * page_tokens], page_tokens)

    def is_faster_after_leader(self, leader: "Sequence", n_keys: int, n_indexed: int, page_tokens: int) -> bool:
        """Whether its next token comes sooner if it waits for the leader's prompt and then computes only the rest.

        n_keys: pages that it could share then; n_indexed: pages that it can share now
        """
        own, other = self.keys, leader.keys
        n_common = bisect_left(range(min(n_keys, len(other))), True, key=lambda i: own[i] != other[i])
        n_own, n_saved = self.n_tokens - n_indexed * page_tokens, (n_common - n_indexed) * page_tokens
        # waiting: leader.n_left + n_own - n_saved; side by side, with half of each step: twice n_own
        return leader.n_left <= n_own + n_saved

    def append_token(self, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Append a drawn token. Return the text that it adds, and whether it ends the answer.

        A token that ends the answer counts as its last token. Its text is left out, except for a stop token with
        `include_stop_str_in_output`.
        """
        self.tokens.append(token)
        n_output, resolved = self.n_output, self.request.resolved
        finish = finish_by_token(token, n_output, resolved)
        text, stop = "", None
        if finish is None or (finish.stop is not None and resolved.include_stop):
            text, stop = self.text.push((token,), n_output >= resolved.min_tokens)
        if stop is not None:
            finish = finish or FinishDetail(FinishReason.STOP, stop)
        else:
            finish = finish or finish_by_length(n_output, resolved)
            if finish is not None:
                text += self.text.flush()
        if self.matcher is not None and finish is None:
            self.matcher.accept(token)
        reason, stop_text = (None, None) if finish is None else (finish.reason, finish.stop)
        reported = None if logprobs is None else (logprobs,)
        return Delta(
            self.request.first + self.index, text, (token,), reported, finish_reason=reason, stop_reason=stop_text
        )

    def sampling_failure(self, token: int) -> tuple[str, RequestError | None]:
        """Return why `token`, an error code, was drawn or scored instead, and the request's fault, if any."""
        if token == SampleError.NOTHING_ALLOWED and self.matcher is not None:
            stop_text = f"the grammar cannot be enforced any more: {self.matcher.error or 'nothing is allowed'}"
            return stop_text, self.matcher.fault
        return "the model's output for this request was not finite", None

    def scored(self, logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        """Return a delta with the log probabilities of the next prompt tokens."""
        return Delta(index=self.request.first + self.index, text="", token_ids=(), prompt_logprobs=logprobs)

    def end(self, reason: FinishReason, error: str | None, fault: RequestError | None = None) -> Delta:
        """Return the last delta of an answer that was aborted or failed."""
        index, text = self.request.first + self.index, self.text.flush()
        return Delta(index, text, (), finish_reason=reason, error=error, fault=fault)
