"""Settings of a build, and its callbacks to the user."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from millrace.engine.cache_specs import KV_CACHE_DTYPES
from millrace.errors import ConfigError
from millrace.settings import Settings, setting

Progress = Callable[[str, int, int], None]  # what is done, how much is done, of how much
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Settings):
    """How an engine is built from a checkpoint."""

    title: ClassVar = "Build"

    precision: str | None = setting(
        None,
        "fp32, bf16, w8a8, w8a16, w4a8, w4a16 or fp8a16, on a GPU also tf32, fp16 and fp8; auto: the cheapest that "
        "keeps within --max-kl, which is measured; default: the checkpoint's own (on a CPU float16 runs as fp32)",
    )
    max_kl: float | None = setting(
        None,
        "of --precision auto: how far from fp32 its answers may be, KL in nats a token on average; default: 0.01",
        low=0,
        high=100,
    )
    evaluate: bool = setting(
        True, "measure what a --precision costs in answers, where it is not the checkpoint's own, and say it"
    )
    calibration: str | None = setting(
        None, "text in UTF-8 to measure precisions on; default: some pages that come along", metavar="FILE"
    )
    head: str | None = setting(
        None,
        "precision of the head; default: that of the layers, but 8-bit integers where these have 4 bits or E4M3; "
        "w4a8: a 4-bit pass, and the best 256 tokens again in 8 bits",
        choices=("fp32", "bf16", "w8a8", "w8a16", "w4a8", "w4a16", "fp8a16"),
    )
    bf16_sums: str | None = setting(
        None,
        "how products of bfloat16 are summed, in pairs or by the tiles of AMX: both run anywhere with equal answers "
        "of their own; default: tiles on a CPU that has them",
        choices=("pairs", "tiles"),
    )
    kv_cache_dtype: str | None = setting(
        None,
        "how keys and values are kept: fp32, bf16, int8 (half the memory of bf16), fp8 (as much, less exact) or int4 "
        "(a third, much less exact); default: bf16, with fp32 fp32",
        choices=tuple(KV_CACHE_DTYPES),
    )
    max_context: int | None = setting(None, "longest sequence in tokens; default: the model's own, at most 8192", low=1)
    max_batch: int | None = setting(
        None,
        "sequences that run at the same time; default: 16, on a GPU 64, of an encoder all that its step holds",
        low=1,
        high=1024,
    )
    group: int | None = setting(
        None,
        "inputs that share one scale in quantised weights, a multiple of 4; default: those in which a checkpoint holds "
        "integers, else 128",
        low=4,
        high=4096,
    )
    tune: float = setting(
        2.0,
        "about how many seconds a build, or a start on a GPU, times kernels that were never timed on this machine; 0: "
        "they go by their own rules",
        low=0,
        high=3600,
    )
    tune_rows: str | None = setting(
        None,
        "rows of the steps that are timed: of answers, one a sequence, and of prompts; default: 1,4,16/64,128",
        metavar="N,N/N,N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_kl is not None and self.precision != "auto":
            raise ConfigError(
                "--max-kl is given without --precision auto", "both: it bounds what auto may choose",
                "add --precision auto, or leave it out",
            )  # fmt: skip
