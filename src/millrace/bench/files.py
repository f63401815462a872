"""Prompts and traces from files, told apart by what is in them.

- lines of JSON: {"text" | "prompt" | "text_input": ..., "max_tokens" | "output_length": n}, or {"messages": [...]}, or
  {"turns": [{"text": ..., "delay": ms}, ...]}, each with a "timestamp" (ms) if it has its time
- Mooncake's trace: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}: an id for each 512
  tokens, and equal ids are equal text
- Azure's trace: CSV of TIMESTAMP,ContextTokens,GeneratedTokens
- ShareGPT: a JSON list of {"conversations": [{"from": "human" | "gpt", "value": ...}, ...]}

Every mistake names file and line. Requests come in the order of their times, which count from the first.
"""

import csv
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from millrace.bench.histogram import MOST_TOKENS
from millrace.bench.inputs import Session, Turn
from millrace.bench.words import Words
from millrace.errors import ConfigError

BLOCK = 512  # tokens of a Mooncake id
MOST_LINE, MOST_FILE = 16 << 20, 2 << 30
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_TEXTS, _LENGTHS = ("text", "prompt", "text_input"), ("max_tokens", "output_length", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class Entry:
    """at_s: its time, where it has one. turns: a trace's texts are written when it is known what tokens words become"""

    at_s: float | None
    turns: Callable[[Words], tuple[Turn, ...]]


@dataclass(frozen=True, slots=True)
class Given:
    """What a file holds."""

    entries: list[Entry]

    @property
    def timed(self) -> bool:
        return self.entries[0].at_s is not None

    def busiest(self, seconds: float, speed: float) -> tuple["Given", int]:
        """From the beginning of so many seconds in which most come, at that speed; and how many do."""
        at_s = np.array([entry.at_s or 0.0 for entry in self.entries])
        n = np.searchsorted(at_s, at_s + seconds * speed, side="right") - np.arange(at_s.size) if speed else [at_s.size]
        begin = int(np.argmax(n))
        return Given(self.entries[begin:]), int(n[begin])

    def sessions(self, words: Words, speed: float = 1.0) -> Iterator[Session]:
        """speed: of its own times; 0: all are due at once"""
        start_s = self.entries[0].at_s or 0.0
        for entry in self.entries:
            at_s = None if entry.at_s is None else (entry.at_s - start_s) / speed if speed else 0.0
            yield Session(entry.turns(words), at_s)


def read_requests(path: Path, max_tokens: int | None, seed: int) -> Given:
    """max_tokens: of answers for which the file says nothing. The whole file is checked here. raises ConfigError"""
    try:
        size = path.stat().st_size
        if size > MOST_FILE:
            raise ConfigError(f"{path} has {size} bytes", f"at most {MOST_FILE}", "split it")
        with path.open(encoding="utf-8-sig", errors="strict") as file:
            first = _first(file)
            if first == "[":
                found = list(_sharegpt(file.read(), path, max_tokens))
            else:
                lines = _lines(file, path)
                found = list(_azure(lines, path) if first == "T" else _jsonl(lines, path, max_tokens, seed))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "a file of prompts", "check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}", "UTF-8 text", "convert it with iconv") from None
    if not found:
        raise ConfigError(f"{path} holds no request", "one at least", "check the file")
    if len({entry.at_s is None for entry in found}) > 1:
        raise ConfigError(f"{path} has times for some of its requests", "for all, or for none", "complete it")
    return Given(sorted(found, key=lambda entry: entry.at_s or 0.0))


def _first(file: TextIO) -> str:
    """What the file begins with but for white space, "" where it holds nothing else."""
    first = ""
    while not first and (part := file.read(1 << 16)):
        first = part.lstrip()[:1]
    file.seek(0)
    return first


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            _wrong(path, number, f"more than {MOST_LINE} characters")
        if line.strip():
            yield number, line


def _wrong(path: Path, line: int, what: str, expected: str = "a request") -> NoReturn:
    raise ConfigError(f"{path}, line {line}: {what}", expected, "correct the line, or leave it out")


def _azure(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[Entry]:
    """Times without a zone are taken for UTC."""
    number, head = next(lines)
    if _fields(head, path, number) != AZURE:
        _wrong(path, number, f'"{head.strip()}"', ",".join(AZURE))
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for number, line in lines:
        fields = _fields(line, path, number)
        try:
            at = datetime.fromisoformat(fields[0])
            n_input, n_output = int(fields[1]), int(fields[2])
        except (ValueError, IndexError):
            _wrong(path, number, f'"{line.strip()}"', ",".join(AZURE))
        at_s = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - epoch).total_seconds()
        yield Entry(at_s, _traced(path, number, n_input, n_output))


def _fields(line: str, path: Path, number: int) -> list[str]:
    try:
        return next(csv.reader([line.strip()]))
    except csv.Error as error:  # such as a field of more than 131,072 characters
        _wrong(path, number, f"no CSV: {error}", ",".join(AZURE))


def _jsonl(lines: Iterator[tuple[int, str]], path: Path, max_tokens: int | None, seed: int) -> Iterator[Entry]:
    for number, line in lines:
        try:
            yield _entry(line, path, number, max_tokens, seed)
        except RecursionError as error:  # in reading it, or in showing what is wrong with it
            _wrong(path, number, f"not JSON: {error}", "a JSON object")


def _entry(line: str, path: Path, number: int, max_tokens: int | None, seed: int) -> Entry:
    try:
        told = json.loads(line)
    except ValueError as error:  # also a number of 5,000 digits
        _wrong(path, number, f"not JSON: {error}", "a JSON object")
    if not isinstance(told, dict):
        _wrong(path, number, f"{line.strip():.80}", "a JSON object")
    at_s = None
    if "timestamp" in told:
        at_ms = told["timestamp"]
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not abs(at_ms) < 1e15:
            _wrong(path, number, f'"timestamp" is {at_ms!r}', "milliseconds")
        at_s = at_ms / 1e3
    if "input_length" not in told:
        return _said(at_s, _turns(told, path, number, max_tokens))
    n_input, n_output = _count(told, "input_length", path, number), _count(told, "output_length", path, number)
    ids = told.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        _wrong(path, number, '"hash_ids" is no list of numbers', "one id for each 512 tokens")
    return Entry(at_s, _traced(path, number, n_input, n_output, tuple(ids), seed))


def _said(at_s: float | None, turns: tuple[Turn, ...]) -> Entry:
    return Entry(at_s, lambda words: turns)


def _count(told: Mapping[str, Any], name: str, path: Path, line: int) -> int:
    n = told.get(name)
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MOST_TOKENS:
        _wrong(path, line, f'"{name}" is {n!r:.40}', f"a number of tokens up to {MOST_TOKENS}")
    return n


def _traced(
    path: Path, line: int, n_input: int, n_output: int, ids: tuple[int, ...] = (), seed: int = 0
) -> Callable[[Words], tuple[Turn, ...]]:
    if not (0 <= n_input <= MOST_TOKENS and 0 <= n_output <= MOST_TOKENS):
        _wrong(path, line, f"{n_input} and {n_output} tokens", f"0 to {MOST_TOKENS}")

    def turns(words: Words) -> tuple[Turn, ...]:
        """Equal ids give equal text; what they do not cover is this request's own."""
        parts = [
            words.text(min(BLOCK, n_input - i * BLOCK), random.Random(f"{seed}/block/{block}"), fresh=i == 0)
            for i, block in enumerate(ids[: -(-n_input // BLOCK)])
        ]
        if (rest := n_input - len(parts) * BLOCK) > 0 or not parts:
            parts.append(words.text(max(rest, 1), random.Random(f"{seed}/line/{line}"), fresh=not parts))
        return (Turn(" ".join(parts), max(n_output, 1), n_input=n_input),)

    return turns


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
                    _wrong(path, line, f"the message {message!s:.80}", "a role and a content")
        return (Turn(said[-1][1], _limit(told, path, line, max_tokens), history=tuple(said[:-1])),)
    return (_turn(told, path, line, max_tokens),)


def _turn(told: Any, path: Path, line: int, max_tokens: int | None) -> Turn:
    text = next((told[n] for n in _TEXTS if isinstance(told.get(n), str)), None) if isinstance(told, dict) else None
    if not text:
        _wrong(path, line, f"no prompt in {json.dumps(told):.80}", '"text", "messages", "turns" or "input_length"')
    pause_ms = told.get("delay", 0)
    if isinstance(pause_ms, bool) or not isinstance(pause_ms, int | float) or not 0 <= pause_ms <= 1e9:
        _wrong(path, line, f'"delay" is {pause_ms!r:.40}', "milliseconds")
    return Turn(_whole(text, path, line), _limit(told, path, line, max_tokens), pause_ms / 1e3)


def _whole(text: str, path: Path, line: int) -> str:
    """JSON can write half of a character, which no request can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        _wrong(path, line, f"the text has {half}, which is half of a character", "both surrogates of a pair")
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
            _wrong(path, number, "no list of conversations (counted as entries)", '{"conversations": [...]}')
        texts = [
            t["value"] for t in turns
            if isinstance(t, dict) and t.get("from") in ("human", "user") and isinstance(t.get("value"), str)
        ]  # fmt: skip
        if any(texts):
            yield _said(None, tuple(Turn(_whole(text, path, number), max_tokens) for text in texts if text))
