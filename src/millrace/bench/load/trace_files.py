"""Prompts and traces from files, told apart by what is in them.

- lines of JSON: {"text" | "prompt" | "text_input": ..., "max_tokens" | "output_length": n}, or {"messages": [...]}, or
  {"turns": [{"text": ..., "delay": ms}, ...]}, each with a "timestamp" (ms) if it has its time
- Mooncake's trace: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}: an id for each 512
  tokens, and equal ids are equal text
- Azure's trace: CSV of TIMESTAMP,ContextTokens,GeneratedTokens
- ShareGPT: a JSON list of {"conversations": [{"from": "human" | "gpt", "value": ...}, ...]}

Every mistake names file and line. Requests come in the order of their times, which count from the first.
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
from millrace.tune.trace_formats import BLOCK, MOST_TOKENS, Lines, begins, numbered, opened, rows, wrong

_TEXTS, _LENGTHS = ("text", "prompt", "text_input"), ("max_tokens", "output_length", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class Entry:
    """at_s: its time, where it has one. turns: a trace's texts are written when it is known what tokens words become"""

    at_s: float | None
    turns: Callable[[PromptWords], tuple[Turn, ...]]


@dataclass(frozen=True, slots=True)
class InputRequests:
    """What a file holds."""

    entries: list[Entry]

    @property
    def timed(self) -> bool:
        return self.entries[0].at_s is not None

    def busiest(self, seconds: float, speed: float) -> tuple["InputRequests", int]:
        """From the beginning of so many seconds in which most come, at that speed; and how many do."""
        at_s = np.array([entry.at_s or 0.0 for entry in self.entries])
        n = np.searchsorted(at_s, at_s + seconds * speed, side="right") - np.arange(at_s.size) if speed else [at_s.size]
        begin = int(np.argmax(n))
        return InputRequests(self.entries[begin:]), int(n[begin])

    def sessions(self, words: PromptWords, speed: float = 1.0) -> Iterator[Session]:
        """speed: of its own times; 0: all are due at once"""
        start_s = self.entries[0].at_s or 0.0
        for entry in self.entries:
            at_s = None if entry.at_s is None else (entry.at_s - start_s) / speed if speed else 0.0
            yield Session(entry.turns(words), at_s)


def read_requests(path: Path, max_tokens: int | None, seed: int) -> InputRequests:
    """max_tokens: of answers for which the file says nothing. The whole file is checked here. raises ConfigError"""
    with opened(path, "a file of prompts") as file:
        match begins(file):
            case b"[":
                found = list(_sharegpt(file.read().decode("utf-8-sig"), path, max_tokens))
            case b"T":
                found = [_traced(r.number, r.n_input, r.n_output, r.at_s) for r in rows(numbered(file, path), path)]
            case _:
                found = list(_jsonl(numbered(file, path), path, max_tokens, seed))
    if not found:
        raise ConfigError(f"{path} holds no request", "one at least", "check the file")
    if len({entry.at_s is None for entry in found}) > 1:
        raise ConfigError(f"{path} has times for some of its requests", "for all, or for none", "complete it")
    return InputRequests(sorted(found, key=lambda entry: entry.at_s or 0.0))


def _jsonl(lines: Lines, path: Path, max_tokens: int | None, seed: int) -> Iterator[Entry]:
    for number, line in lines:
        try:
            yield _entry(line.decode(), path, number, max_tokens, seed)
        except RecursionError as error:  # in reading it, or in showing what is wrong with it
            wrong(path, number, f"not JSON: {error}", "a JSON object")


def _entry(line: str, path: Path, number: int, max_tokens: int | None, seed: int) -> Entry:
    try:
        told = json.loads(line)
    except ValueError as error:  # also a number of 5,000 digits
        wrong(path, number, f"not JSON: {error}", "a JSON object")
    if not isinstance(told, dict):
        wrong(path, number, f"{line.strip():.80}", "a JSON object")
    at_s = None
    if "timestamp" in told:
        at_ms = told["timestamp"]
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not abs(at_ms) < 1e15:
            wrong(path, number, f'"timestamp" is {at_ms!r}', "milliseconds")
        at_s = at_ms / 1e3
    if "input_length" not in told:
        return _said(at_s, _turns(told, path, number, max_tokens))
    n_input, n_output = _count(told, "input_length", path, number), _count(told, "output_length", path, number)
    ids = told.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        wrong(path, number, '"hash_ids" is no list of numbers', "one id for each 512 tokens")
    return _traced(number, n_input, n_output, at_s, tuple(ids), seed)


def _said(at_s: float | None, turns: tuple[Turn, ...]) -> Entry:
    return Entry(at_s, lambda words: turns)


def _count(told: Mapping[str, Any], name: str, path: Path, line: int) -> int:
    n = told.get(name)
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MOST_TOKENS:
        wrong(path, line, f'"{name}" is {n!r:.40}', f"a number of tokens up to {MOST_TOKENS}")
    return n


def _traced(
    line: int, n_input: int, n_output: int, at_s: float | None, ids: tuple[int, ...] = (), seed: int = 0
) -> Entry:
    def turns(words: PromptWords) -> tuple[Turn, ...]:
        """Equal ids give equal text; what they do not cover is this request's own."""
        parts = [
            words.text(min(BLOCK, n_input - i * BLOCK), random.Random(f"{seed}/block/{block}"), fresh=i == 0)
            for i, block in enumerate(ids[: -(-n_input // BLOCK)])
        ]
        if (rest := n_input - len(parts) * BLOCK) > 0 or not parts:
            parts.append(words.text(max(rest, 1), random.Random(f"{seed}/line/{line}"), fresh=not parts))
        return (Turn(" ".join(parts), max(n_output, 1), n_input=n_input),)

    return Entry(at_s, turns)


def _turns(told: Mapping[str, Any], path: Path, line: int, max_tokens: int | None) -> tuple[Turn, ...]:
    if isinstance(turns := told.get("turns"), list) and turns:
        return tuple(_turn(t, path, line, max_tokens) for t in turns)
    if isinstance(messages := told.get("messages"), list) and messages:
        said = []
        for message in messages:
            match message:
                case {"role": str(role), "content": str(content)}:
                    said.append((_whole(role, path, line), _whole(content, path, line)))
                case _:
                    wrong(path, line, f"the message {message!s:.80}", "a role and a content")
        return (Turn(said[-1][1], _limit(told, path, line, max_tokens), history=tuple(said[:-1])),)
    return (_turn(told, path, line, max_tokens),)


def _turn(told: Any, path: Path, line: int, max_tokens: int | None) -> Turn:
    text = next((told[n] for n in _TEXTS if isinstance(told.get(n), str)), None) if isinstance(told, dict) else None
    if not text:
        wrong(path, line, f"no prompt in {json.dumps(told):.80}", '"text", "messages", "turns" or "input_length"')
    pause_ms = told.get("delay", 0)
    if isinstance(pause_ms, bool) or not isinstance(pause_ms, int | float) or not 0 <= pause_ms <= 1e9:
        wrong(path, line, f'"delay" is {pause_ms!r:.40}', "milliseconds")
    return Turn(_whole(text, path, line), _limit(told, path, line, max_tokens), pause_ms / 1e3)


def _whole(text: str, path: Path, line: int) -> str:
    """JSON can write half of a character, which no request can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        wrong(path, line, f"the text has {half}, which is half of a character", "both surrogates of a pair")
    return text


def _limit(told: Mapping[str, Any], path: Path, line: int, otherwise: int | None) -> int | None:
    name = next((n for n in _LENGTHS if n in told), None)
    return otherwise if name is None else max(1, _count(told, name, path, line))


def _sharegpt(text: str, path: Path, max_tokens: int | None) -> Iterator[Entry]:
    """Each human's message is a turn; the answers are the server's own. What begins with an answer loses it."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", "a list of conversations, or lines", "correct it") from None
    for number, one in enumerate(told, 1):
        turns = one.get("conversations") if isinstance(one, dict) else None
        if not isinstance(turns, list):
            wrong(path, number, "no list of conversations (counted as entries)", '{"conversations": [...]}')
        texts = [
            t["value"] for t in turns
            if isinstance(t, dict) and t.get("from") in ("human", "user") and isinstance(t.get("value"), str)
        ]  # fmt: skip
        if any(texts):
            yield _said(None, tuple(Turn(_whole(text, path, number), max_tokens) for text in texts if text))
