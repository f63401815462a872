"""A request, and its choices: which tokens each has, how many are computed, which pages hold them, what text they are.

A choice is a `Sequence`: prompt, then output. The scheduler moves `n_computed` towards `n_tokens`; when they meet, the
executor draws the next token and `append_token` puts `n_tokens` one ahead again.

When it ends: end-of-text, stop tokens, stop strings, max_tokens. Stop strings are looked for in the detokenised text,
character by character, so the answer does not depend on how the text is cut into tokens: the first stop string to be
complete ends it, of two that end together the longer one. Text that may be the beginning of a stop string is held back
until that is decided. Until `min_tokens` are out, all but the length is passed over and stays in the answer; the logits
are not touched, so what is drawn is what would have been drawn without it.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from millrace.checkpoint.tokenizer.tokenizer import Detokenizer, Tokenizer
from millrace.engine.executor import NOTHING_ALLOWED, IntArray
from millrace.errors import RequestError
from millrace.runtime.kv.cache_groups import NO_CACHES, SequenceCaches
from millrace.runtime.kv.int_buffer import IntBuffer
from millrace.runtime.kv.pages import Key, PageKey, extend_keys, root_key
from millrace.runtime.request.prefix_cache_options import PLAIN, CacheOptions
from millrace.runtime.request.prompt_embeds import EmbeddedPrompt, Rows
from millrace.runtime.request.queue_options import NO_CLAIM, QueueOptions
from millrace.runtime.request.sampling_params import Delta, FinishReason, ResolvedParams, SamplingParams, TokenLogprobs
from millrace.runtime.structured_output.grammar import Matcher


@dataclass(frozen=True, slots=True)
class FinishDetail:
    reason: FinishReason
    stop: int | str | None = None  # the stop token or string; None for end-of-text and lengths


def finish_by_token(token: int, n_output: int, resolved: ResolvedParams) -> FinishDetail | None:
    """Whether `token`, the `n_output`-th of the answer, is one that ends it."""
    if n_output < resolved.min_tokens:
        return None
    if token in resolved.eos_token_ids:
        return FinishDetail(FinishReason.STOP)
    if token in resolved.stop_token_ids:
        return FinishDetail(FinishReason.STOP, token)
    return None


def finish_by_length(n_output: int, resolved: ResolvedParams) -> FinishDetail | None:
    """`max_tokens` is never beyond the context, so this is the end of the context, too."""
    return FinishDetail(FinishReason.LENGTH) if n_output >= resolved.max_tokens else None


class StopTables:
    """What the search for some stop strings needs beforehand: made once a request, shared by its choices."""

    __slots__ = ("borders", "stops")

    def __init__(self, stops: Ordered[str]) -> None:
        self.stops = sorted(set(stops), key=len, reverse=True)  # the longest first wins a tie
        self.borders = [_borders(stop) for stop in self.stops]


class StopStrings:
    """Finds the first of some strings in a stream of text (Knuth, Morris and Pratt, one automaton each)."""

    __slots__ = ("_borders", "_buffered", "_include", "_matched", "_stops")

    def __init__(self, tables: StopTables, include_in_output: bool) -> None:
        self._stops, self._borders = tables.stops, tables.borders
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._include = include_in_output
        self._buffered = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text that is certain to be in the answer, the stop string found or None).

        With `may_stop` False a complete stop string is passed over. After one was found, push no more.
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
        """The text still held back: no more is coming."""
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
    """What an answer needs of `checkpoint.tokenizer.Detokenizer`."""

    def push(self, ids: Ordered[int]) -> str:
        """The complete characters that these tokens add."""
        ...

    def flush(self) -> str:
        """What an unfinished character leaves."""
        ...


class AnswerText:
    """The text of one answer, token by token, up to a stop string."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, detokenizer: TextStream, tables: StopTables, include_stop: bool) -> None:
        """tables: of the request's `stop`, one for all of its choices"""
        self._detokenizer, self._stops = detokenizer, StopStrings(tables, include_stop)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, prompt: Ordered[int] | None, params: SamplingParams, tables: StopTables
    ) -> "AnswerText":
        """prompt: token ids; None: it is embedding rows"""
        shown = Detokenizer(tokenizer, params.skip_special_tokens, prompt)
        return cls(shown, tables, params.include_stop_str_in_output)

    def push(self, tokens: Ordered[int], may_stop: bool) -> tuple[str, str | None]:
        """As `StopStrings.push`, of what these tokens add."""
        return self._stops.push(self._detokenizer.push(tokens), may_stop)

    def flush(self) -> str:
        """What is still held back: no token is coming."""
        text, stop = self._stops.push(self._detokenizer.flush(), may_stop=False)
        assert stop is None
        return text + self._stops.flush()


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix again."""
    borders, n = [0], 0
    for char in stop[1:]:
        while n and stop[n] != char:
            n = borders[n - 1]
        n += stop[n] == char
        borders.append(n)
    return borders


Deliver = Callable[[list[Delta]], None]  # called in the engine thread, at most once a step per request


def _no_receiver(deltas: list[Delta]) -> None:
    raise AssertionError("a request that has ended has nothing to say")


@dataclass(slots=True)
class Timings:
    """Readings of the engine's clock in seconds; None: not yet. Written by the engine thread only."""

    queued_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    n_preemptions: int = 0
    n_output_tokens: int = 0  # of all choices
    received_s: float | None = None  # by a server, which writes this and the next two: its request's first byte,
    first_told_s: float | None = None  # and when a token was first read
    told_s: float | None = None  # and the last one

    def held_s(self, now_s: float) -> float:
        """Since the first step; 0 before."""
        return 0.0 if self.first_scheduled_s is None else now_s - self.first_scheduled_s


class Stage(Enum):
    WAITING = auto()  # holds no pages
    RUNNING = auto()
    GONE = auto()  # finished or cancelled; holds no pages


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a request asks beside its answer. cache: of the prefix cache; claim: of its turn

    delivered: output tokens of each choice that its client already has: the answers continue behind them
    adapter: of the executor's, by number; 0: the model as it is
    """

    cache: CacheOptions = PLAIN
    claim: QueueOptions = NO_CLAIM
    delivered: tuple[tuple[int, ...], ...] = ()
    adapter: int = 0


FREELY = RequestOptions()


@dataclass(slots=True, eq=False)
class Request:
    """What was submitted, and how far it is. Known by identity, since ids may come from clients.

    first: the index of its first choice in what its reader gets, where one reader has several requests
    terms: what it asks beside its answer; matchers: what each choice is held to; none where nothing is
    embedded: embedding rows that the prompt's numbers stand for; None: they are token ids
    """

    id: str
    prompt: IntArray  # (N,) read-only
    resolved: ResolvedParams
    deliver: Deliver
    timings: Timings
    new_text: Callable[[], AnswerText]  # of each choice
    first: int = 0
    terms: RequestOptions = FREELY
    matchers: Ordered[Matcher] = ()
    embedded: EmbeddedPrompt | None = None
    choices: list["Sequence"] = field(init=False)
    order: int = field(init=False, default=0)  # of arrival at the scheduler
    root: Key = field(init=False)  # what the keys of its pages begin with
    to_keep: bool = field(init=False)  # as `cache` says; not done yet
    n_cached: int = field(init=False, default=0)  # tokens of its prompt that were known when it began
    n_scored: int = field(init=False, default=1)  # tokens of the prompt whose log probabilities need no more computing

    def __post_init__(self) -> None:
        if self.resolved.prompt_top is None:
            self.n_scored = len(self.prompt)
        key_parts = [] if self.embedded is None else [self.embedded.digest]
        if self.terms.adapter:
            key_parts.append(b"adapter %d" % self.terms.adapter)
        self.root = root_key(self.cache.salt.encode(errors="surrogatepass"), *key_parts)
        self.to_keep = self.cache.pin or self.cache.priority is not None
        self.choices = [Sequence(self, index) for index in range(self.resolved.n)]

    @property
    def rows(self) -> Rows | None:
        """The embedding rows (N, width) of its prompt, if it has some."""
        return None if self.embedded is None else self.embedded.rows

    @property
    def cache(self) -> CacheOptions:
        return self.terms.cache

    @property
    def claim(self) -> QueueOptions:
        return self.terms.claim

    @property
    def is_open(self) -> bool:
        return any(seq.stage is not Stage.GONE for seq in self.choices)

    def break_cycles(self) -> None:
        """It has ended and all is delivered: of choices and reader, which know it, it knows no more.

        Else its tokens would stay until the interpreter looks for cycles: under load for some 2,500 requests.
        """
        self.choices, self.deliver = [], _no_receiver


class Sequence:
    """Choice `index` of a request."""

    __slots__ = (
        *("index", "matcher", "n_computed", "n_prompt", "pages", "request", "row", "stage", "text", "tokens"),
        *("keys", "leader", "leads", "n_ahead", "n_finite", "n_known", "n_most", "source", "caches"),
    )

    def __init__(self, request: Request, index: int) -> None:
        self.request, self.index, self.stage = request, index, Stage.WAITING
        self.tokens = IntBuffer(request.prompt)
        self.n_prompt = len(request.prompt)
        self.n_most = self.n_prompt + request.resolved.max_tokens - 1  # that are ever computed: the last one is not
        self.n_computed = 0
        self.n_ahead = 0  # tokens behind these that launched steps draw: nobody but the device knows them yet
        self.pages = IntBuffer()
        self.caches: SequenceCaches = NO_CACHES  # its window pages and state slots while it runs
        self.keys: list[Key] = []  # of its first full pages, as far as anybody wanted to know
        self.n_finite = 0  # of its computed tokens, those that a finite one was drawn from
        self.n_known = 0  # of its pages, so many from the first on are in the index
        self.leader: Sequence | None = None  # whose prompt it waits for, because they begin alike
        self.source: int | None = None  # a page that the next step copies into its first own one; it is a co-owner
        self.leads: Key | None = None  # of the first page that it computes of what others may wait for
        self.text = request.new_text()
        self.matcher = request.matchers[index] if request.matchers else None
        row = request.resolved.row.copy()
        row["choice"] = index
        self.row = row.tobytes()  # its row of SAMPLING; what changes is filled in by the batch

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the first-come-first-served queue."""
        return self.request.order, self.index

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens to compute before the next one can be drawn; 0: the last that it may have is being drawn."""
        return min(len(self.tokens) + self.n_ahead, self.n_most) - self.n_computed

    def page_keys(self, n_pages: int, page_tokens: int) -> list[Key]:
        """Of its first `n_pages`, which are full."""
        if len(self.keys) < n_pages:
            if not self.keys:  # the prompt of its siblings is its own
                self.keys += self.request.choices[0].keys[: self.n_prompt // page_tokens]
            extend_keys(self.keys, self.request.root, self.tokens.array, n_pages, page_tokens)
        return self.keys[:n_pages]

    def content(self, i: int, page_tokens: int, n_tokens: int | None = None) -> PageKey:
        """Of its page `i`, all before which are full. n_tokens: as if it had so many"""
        after = self.page_keys(i, page_tokens)[-1] if i else self.request.root
        return PageKey(after, self.tokens.array[:n_tokens][i * page_tokens : (i + 1) * page_tokens], page_tokens)

    def is_faster_after_leader(self, leader: "Sequence", n_keys: int, n_known: int, page_tokens: int) -> bool:
        """Whether it has its next token sooner when the leader's prompt is computed first, then the rest of its own.

        n_keys: of the pages that it could share; n_known: of those that it can share now
        """
        own, other = self.keys, leader.keys
        n_common = bisect_left(range(min(n_keys, len(other))), True, key=lambda i: own[i] != other[i])
        n_own, n_saved = self.n_tokens - n_known * page_tokens, (n_common - n_known) * page_tokens
        # waiting: leader.n_left + n_own - n_saved; side by side, with half of each step: twice n_own
        return leader.n_left <= n_own + n_saved

    def append_token(self, token: int, logprobs: TokenLogprobs | None) -> Delta:
        """Append a drawn token, and say what that adds, and whether it ends the answer.

        A token that ends the answer counts as its last token; its text is left out, save for a stop token with
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
            self.matcher.take(token)
        reason, why = (None, None) if finish is None else (finish.reason, finish.stop)
        reported = None if logprobs is None else (logprobs,)
        return Delta(self.request.first + self.index, text, (token,), reported, finish_reason=reason, stop_reason=why)

    def sampling_failure(self, token: int) -> tuple[str, RequestError | None]:
        """Why nothing was drawn, or scored: `token` is what came instead. And the request's own fault, where it is."""
        if token == NOTHING_ALLOWED and self.matcher is not None:
            why = f"the grammar cannot be enforced any more: {self.matcher.why or 'nothing is allowed'}"
            return why, self.matcher.fault
        return "the model's output for this request was not finite", None

    def scored(self, logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        """The next tokens of the prompt, with their log probabilities."""
        return Delta(index=self.request.first + self.index, text="", token_ids=(), prompt_logprobs=logprobs)

    def end(self, reason: FinishReason, error: str | None, fault: RequestError | None = None) -> Delta:
        """The last delta of an answer that ends without a token: aborted or failed."""
        index, text = self.request.first + self.index, self.text.flush()
        return Delta(index, text, (), finish_reason=reason, error=error, fault=fault)
