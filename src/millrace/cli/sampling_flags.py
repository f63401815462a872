"""Sampling parameters as flags; `SamplingParams` checks their ranges."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from millrace.errors import RequestError
from millrace.settings import Settings, flag_of, setting

if TYPE_CHECKING:
    from millrace.runtime.request.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingFlags(Settings):
    """Sampling flags. None: the model's generation_config.json, then the default"""

    max_tokens: int | None = setting(
        None, "maximum tokens to generate; default: the model's, or the rest of the context"
    )
    temperature: float | None = setting(
        None, "sampling temperature; 0: always the most likely token; default: the model's, or 1 (a GGUF file: 0.8)"
    )
    top_p: float | None = setting(
        None,
        "sample from the most likely tokens with this cumulative probability; default: the model's, or 1 (a GGUF file: "
        "0.95)",
    )
    top_k: int | None = setting(
        None, "sample from this many most likely tokens; 0: all; default: the model's, or 0 (a GGUF file: 40)"
    )
    min_p: float | None = setting(
        None,
        "drop tokens below this share of the highest probability; default: the model's, or 0 (a GGUF file: 0.05)",
    )
    seed: int | None = setting(None, "random seed; the same seed gives the same answer; default: random, and printed")

    def params(self, n: int = 1) -> "SamplingParams":
        """Convert to SamplingParams. raises RequestError that names the option"""
        from millrace.runtime.request.sampling_params import SamplingParams  # which --help does not need

        with as_options():
            return SamplingParams(n=n, **asdict(self))


@contextmanager
def as_options() -> Iterator[None]:
    """Rewrite parameter names in request errors (max_tokens) as options (--max-tokens)."""
    options = {f.name: flag_of(f.name) for f in fields(SamplingFlags)}
    names = re.compile(rf"(?<![\w-])({'|'.join(options)})\b")
    try:
        yield
    except RequestError as error:
        error.reworded(lambda text: names.sub(lambda name: options[name[1]], text))
        raise
