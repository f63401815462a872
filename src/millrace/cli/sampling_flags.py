"""How tokens are chosen, as flags; ranges are checked where requests are checked (`SamplingParams`)."""

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
    """None: the model's generation_config.json decides, then the default."""

    max_tokens: int | None = setting(
        None, "tokens to generate at most; default: the model's, or the rest of the context"
    )
    temperature: float | None = setting(
        None, "0 always takes the likeliest token; default: the model's, or 1 (a GGUF file: 0.8)"
    )
    top_p: float | None = setting(
        None,
        "draw from the likeliest tokens that together have this probability; default: the model's, or 1 (a GGUF file: "
        "0.95)",
    )
    top_k: int | None = setting(
        None, "draw from so many of the likeliest tokens; 0: from all; default: the model's, or 0 (a GGUF file: 40)"
    )
    min_p: float | None = setting(
        None,
        "leave out tokens less likely than this share of the likeliest one; default: the model's, or 0 (a GGUF file: "
        "0.05)",
    )
    seed: int | None = setting(None, "the same seed gives the same answer; default: drawn, and told")

    def params(self, n: int = 1) -> "SamplingParams":
        """raises RequestError naming the option that is out of range"""
        from millrace.runtime.request.sampling_params import SamplingParams  # which --help does not need

        with as_options():
            return SamplingParams(n=n, **asdict(self))


@contextmanager
def as_options() -> Iterator[None]:
    """Errors name parameters as requests do (max_tokens); on the command line they are options (--max-tokens)."""
    options = {f.name: flag_of(f.name) for f in fields(SamplingFlags)}
    names = re.compile(rf"(?<![\w-])({'|'.join(options)})\b")
    try:
        yield
    except RequestError as error:
        error.reworded(lambda text: names.sub(lambda name: options[name[1]], text))
        raise
