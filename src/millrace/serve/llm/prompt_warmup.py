"""Prefix-cache warm-up: prompts of a file are computed before the server is ready."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, MillraceError
from millrace.runtime.request.prefix_cache_options import CacheOptions
from millrace.runtime.request.request import RequestOptions
from millrace.runtime.request.sampling_params import FinishReason, SamplingParams
from millrace.runtime.service import AsyncEngine
from millrace.serve.llm.request_decoding import cache_options, decode
from millrace.serve.llm.request_types import Body, Message
from millrace.settings import read_bounded

MAX_FILE_BYTES = 64 * 2**20
MAX_PROMPTS = 1024
_EXPECTED = '"a text", {"prompt": "a text"} or {"messages": [...]}, one a line'
log = logging.getLogger(__name__)


class WarmLine(Body, kw_only=True):
    """One line of the file: a prompt or a conversation so far, and its cache options."""

    prompt: str | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    cache_priority: int | None = None
    cache_ttl_s: float | None = None
    cache_pin: bool | None = None


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    location: str  # file and line
    line: WarmLine
    cache: CacheOptions
    n_bytes: int


def read_warm_prompts(path: Path) -> tuple[WarmPrompt, ...]:
    """Read the prompts of a file. raises ConfigError naming file and line"""
    try:
        data = read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read the prompts of {path}: {error}", "a file of JSON lines", "name another"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        expected = f"at most {MAX_FILE_BYTES // 2**20} MiB"
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes", expected, "keep the prompts that matter")
    lines = [(n, line) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_PROMPTS:
        raise ConfigError(f"{path} has {len(lines)} prompts", f"1 to {MAX_PROMPTS}: {_EXPECTED}", "correct the file")
    return tuple(_read(f"{path}, line {n}", line) for n, line in lines)


def _read(location: str, data: bytes) -> WarmPrompt:
    try:
        kind = type(msgspec.json.decode(data))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{location} is not JSON: {error}", _EXPECTED, "correct the line") from None
    if kind not in (str, dict):
        raise ConfigError(f"{location} is neither a text nor an object", _EXPECTED, "correct the line")
    try:
        line = WarmLine(prompt=msgspec.json.decode(data)) if kind is str else decode(data, WarmLine)
        cache = cache_options(line)
    except MillraceError as error:
        raise ConfigError(f"{location}: {error.what}", error.expected, error.fix) from None
    if (line.prompt is None) == (line.messages is None):
        has = "neither a prompt nor messages" if line.prompt is None else "a prompt and messages"
        raise ConfigError(f"{location} has {has}", "one of them", "correct the line")
    if line.chat_template_kwargs is not None and line.messages is None:
        raise ConfigError(f"{location} has chat_template_kwargs, but no messages", "both", "correct the line")
    return WarmPrompt(location, line, cache, len(data))


async def warm_prefix_cache(
    prompts: Sequence[WarmPrompt], tokens: Callable[[WarmPrompt], Awaitable[list[int]]], engine: AsyncEngine
) -> str | None:
    """Compute prompts one by one, because they may share prefixes. Return an error with file and line, or None."""
    params, n_tokens = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True), 0
    for prompt in prompts:
        try:
            ids = await tokens(prompt)
            async with engine.submit(
                [ids], [params], "warm-prompt", options=RequestOptions(cache=prompt.cache)
            ) as handle:
                async for deltas in handle:
                    for delta in deltas:
                        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                            return f"{prompt.location}: {delta.error or 'it was aborted'}"
        except MillraceError as error:
            return f"{prompt.location}: {error}"
        n_tokens += len(ids)
    if prompts:
        stats = engine.stats()
        log.info("warmed by %d prompts of %d tokens: %d KV pages kept, %d of them pinned", len(prompts), n_tokens,
                 stats.pages_kept + stats.pages_pinned, stats.pages_pinned)  # fmt: skip
    return None
