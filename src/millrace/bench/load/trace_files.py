"""Prompts and traces from files; the format is detected from the content.

- lines of JSON: {"text" | "prompt" | "text_input": ..., "max_tokens" | "output_length": n}, or {"messages": [...]}, or
  {"turns": [{"text": ..., "delay": ms}, ...]}, each with a "timestamp" (ms) if it has its time
- Mooncake's trace: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}: an id for each 512
  tokens, and equal ids are equal text
- Azure's trace: CSV of TIMESTAMP,ContextTokens,GeneratedTokens
- ShareGPT: a JSON list of {"conversations": [{"from": "human" | "gpt", "value": ...}, ...]}

Errors name file and line. Requests are sorted by time, relative to the first.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.bench.load.inputs import Session, Turn
from millrace.bench.load.prompt_text import PromptWords
from millrace.errors import ConfigError
from millrace.tune.trace_formats import (
    BLOCK,
    MAX_TOKENS,
    Lines,
    first_byte,
    numbered_lines,
    open_trace,
    raise_line_error,
    rows,
)

_TEXTS, _LENGTHS = ("text", "prompt", "text_input"), ("max_tokens", "output_length", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A request of a file. at_s: its time, if any; turns: creates its texts once the tokens-per-word ratio is known"""

    at_s: float | None
    turns: Callable[[PromptWords], tuple[Turn, ...]]


@dataclass(frozen=True, slots=True)
class InputRequests:
    """The requests of a file."""

    entries: list[TraceEntry]

    @property
    def timed(self) -> bool:
        return self.entries[0].at_s is not None

    def busiest(self, seconds: float, speed: float) -> tuple["InputRequests", int]:
        """Return the requests from the start of the busiest window of `seconds` at a speed, and how many are in it."""
        at_s = np.array([entry.at_s or 0.0 for entry in self.entries])
        n = np.searchsorted(at_s, at_s + seconds * speed, side="right") - np.arange(at_s.size) if speed else [at_s.size]
        begin = int(np.argmax(n))
        return InputRequests(self.entries[begin:]), int(n[begin])

    def sessions(self, words: PromptWords, speed: float = 1.0) -> Iterator[Session]:
        """Yield sessions. speed: replay speed; 0: all are due at once"""
        start_s = self.entries[0].at_s or 0.0
        for entry in self.entries:
            at_s = None if entry.at_s is None else (entry.at_s - start_s) / speed if speed else 0.0
            yield Session(entry.turns(words), at_s)


def read_requests(path: Path, max_tokens: int | None, seed: int) -> InputRequests:
    """Read and check a whole file. max_tokens: of answers for which the file gives no length. raises ConfigError"""
    with open_trace(path, "a file of prompts") as file:
        match first_byte(file):
            case b"[":
                entries = list(_sharegpt(file.read().decode("utf-8-sig"), path, max_tokens))
            case b"T":
                entries = [
                    _trace_entry(r.number, r.n_input, r.n_output, r.at_s)
                    for r in rows(numbered_lines(file, path), path)
                ]
            case _:
                entries = list(_jsonl(numbered_lines(file, path), path, max_tokens, seed))
    if not entries:
        raise ConfigError(f"{path} holds no request", "one at least", "check the file")
    if len({entry.at_s is None for entry in entries}) > 1:
        raise ConfigError(f"{path} has times for some of its requests", "for all, or for none", "complete it")
    return InputRequests(sorted(entries, key=lambda entry: entry.at_s or 0.0))


def _jsonl(lines: Lines, path: Path, max_tokens: int | None, seed: int) -> Iterator[TraceEntry]:
    for number, line in lines:
        try:
            yield _entry(line.decode(), path, number, max_tokens, seed)
        except RecursionError as error:  # while parsing, or while formatting the error
            raise_line_error(path, number, f"not JSON: {error}", "a JSON object")


def _entry(line: str, path: Path, number: int, max_tokens: int | None, seed: int) -> TraceEntry:
    try:
        fields = json.loads(line)
    except ValueError as error:  # also a number of 5,000 digits
        raise_line_error(path, number, f"not JSON: {error}", "a JSON object")
    if not isinstance(fields, dict):
        raise_line_error(path, number, f"{line.strip():.80}", "a JSON object")
    at_s = None
    if "timestamp" in fields:
        at_ms = fields["timestamp"]
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not abs(at_ms) < 1e15:
            raise_line_error(path, number, f'"timestamp" is {at_ms!r}', "milliseconds")
        at_s = at_ms / 1e3
    if "input_length" not in fields:
        return _fixed_entry(at_s, _read_turns(fields, path, number, max_tokens))
    n_input, n_output = _count(fields, "input_length", path, number), _count(fields, "output_length", path, number)
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise_line_error(path, number, '"hash_ids" is no list of numbers', "one id for each 512 tokens")
    return _trace_entry(number, n_input, n_output, at_s, tuple(ids), seed)


def _fixed_entry(at_s: float | None, turns: tuple[Turn, ...]) -> TraceEntry:
    return TraceEntry(at_s, lambda words: turns)


def _count(fields: Mapping[str, Any], name: str, path: Path, line: int) -> int:
    n = fields.get(name)
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_TOKENS:
        raise_line_error(path, line, f'"{name}" is {n!r:.40}', f"a number of tokens up to {MAX_TOKENS}")
    return n


def _trace_entry(
    line: int, n_input: int, n_output: int, at_s: float | None, ids: tuple[int, ...] = (), seed: int = 0
) -> TraceEntry:
    def turns(words: PromptWords) -> tuple[Turn, ...]:
        """Write the prompt: equal ids give equal text; tokens without ids are unique to the request."""
        parts = [
            words.text(min(BLOCK, n_input - i * BLOCK), random.Random(f"{seed}/block/{block}"), fresh=i == 0)
            for i, block in enumerate(ids[: -(-n_input // BLOCK)])
        ]
        if (rest := n_input - len(parts) * BLOCK) > 0 or not parts:
            parts.append(words.text(max(rest, 1), random.Random(f"{seed}/line/{line}"), fresh=not parts))
        return (Turn(" ".join(parts), max(n_output, 1), n_input=n_input),)

    return TraceEntry(at_s, turns)


def _read_turns(fields: Mapping[str, Any], path: Path, line: int, max_tokens: int | None) -> tuple[Turn, ...]:
    if isinstance(turns := fields.get("turns"), list) and turns:
        return tuple(_turn(t, path, line, max_tokens) for t in turns)
    if isinstance(messages := fields.get("messages"), list) and messages:
        history = []
        for message in messages:
            match message:
                case {"role": str(role), "content": str(content)}:
                    history.append((_checked_text(role, path, line), _checked_text(content, path, line)))
                case _:
                    raise_line_error(path, line, f"the message {message!s:.80}", "a role and a content")
        return (Turn(history[-1][1], _limit(fields, path, line, max_tokens), history=tuple(history[:-1])),)
    return (_turn(fields, path, line, max_tokens),)


def _turn(fields: Any, path: Path, line: int, max_tokens: int | None) -> Turn:
    text = (
        next((fields[n] for n in _TEXTS if isinstance(fields.get(n), str)), None) if isinstance(fields, dict) else None
    )
    if not text:
        raise_line_error(
            path, line, f"no prompt in {json.dumps(fields):.80}", '"text", "messages", "turns" or "input_length"'
        )
    pause_ms = fields.get("delay", 0)
    if isinstance(pause_ms, bool) or not isinstance(pause_ms, int | float) or not 0 <= pause_ms <= 1e9:
        raise_line_error(path, line, f'"delay" is {pause_ms!r:.40}', "milliseconds")
    return Turn(_checked_text(text, path, line), _limit(fields, path, line, max_tokens), pause_ms / 1e3)


def _checked_text(text: str, path: Path, line: int) -> str:
    """Refuse lone surrogates, which JSON can contain but no request can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise_line_error(path, line, f"the text has {half}, which is half of a character", "both surrogates of a pair")
    return text


def _limit(fields: Mapping[str, Any], path: Path, line: int, default: int | None) -> int | None:
    name = next((n for n in _LENGTHS if n in fields), None)
    return default if name is None else max(1, _count(fields, name, path, line))


def _sharegpt(text: str, path: Path, max_tokens: int | None) -> Iterator[TraceEntry]:
    """Yield conversations: each human message is a turn, recorded answers are dropped."""
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", "a list of conversations, or lines", "correct it") from None
    for number, one in enumerate(conversations, 1):
        turns = one.get("conversations") if isinstance(one, dict) else None
        if not isinstance(turns, list):
            raise_line_error(path, number, "no list of conversations (counted as entries)", '{"conversations": [...]}')
        texts = [
            t["value"] for t in turns
            if isinstance(t, dict) and t.get("from") in ("human", "user") and isinstance(t.get("value"), str)
        ]  # fmt: skip
        if any(texts):
            yield _fixed_entry(
                None, tuple(Turn(_checked_text(text, path, number), max_tokens) for text in texts if text)
            )
