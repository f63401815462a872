"""Serving overhead: what a server adds to an engine's steps, and its scheduling limits."""

from dataclasses import dataclass

from millrace.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A serving stack. prefill, decode, cache: factors on the engine's time for prompts, decode steps, and reading the
    KV cache in them

    host_s: per decoding sequence and step; front_s: per request before it is scheduled, serially
    step_tokens, sequences: limits of a step
    """

    name: str
    prefill: float = 1.0
    decode: float = 1.0
    cache: float = 1.0
    host_s: float = 0.0
    front_s: float = 0.0
    step_tokens: int = 8192
    sequences: int = 256

    def __post_init__(self) -> None:
        if not (0 < self.prefill < 1e3 and 0 < self.decode < 1e3 and 0 < self.cache < 1e3):
            raise ConfigError(f"{self.name}: factors of {self.factors}", "above 0, and below 1000", "correct them")
        if not (0 <= self.host_s < 1 and 0 <= self.front_s < 10):
            raise ConfigError(
                f"{self.name}: {self.host_s:g} s of host a sequence and step, {self.front_s:g} s a request",
                "0 to 1 s, and 0 to 10 s", "correct them",
            )  # fmt: skip
        if not (1 <= self.step_tokens <= 1 << 20 and 1 <= self.sequences <= 1 << 16):
            raise ConfigError(
                f"{self.name}: steps of {self.step_tokens} tokens and {self.sequences} sequences",
                f"1 to {1 << 20}, and 1 to {1 << 16}", "correct them",
            )  # fmt: skip

    @property
    def factors(self) -> tuple[float, float, float]:
        return self.prefill, self.decode, self.cache

    @property
    def scheduler(self) -> str:
        return f"in-flight batching, at most {self.step_tokens} tokens and {self.sequences} sequences a step"


ENGINE = Stack(name="the engine alone")
