"""Settings of a build, and its callbacks to the user."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from millrace.engine.cache_specs import KV_CACHE_DTYPES
from millrace.errors import ConfigError
from millrace.settings import Settings, setting

Progress = Callable[[str, int, int], None]  # the current task, the amount done, and the total
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuildSettings(Settings):
    """How an engine is built from a checkpoint."""

    title: ClassVar = "Build"

    precision: str | None = setting(
        None,
        "fp32, bf16, w8a8, w8a16, w4a8, w4a16 or fp8a16, on a GPU also tf32, fp16 and fp8; auto: the cheapest that "
        "stays within --max-kl, which is measured; default: the checkpoint's own (on a CPU float16 runs as fp32)",
    )
    max_kl: float | None = setting(
        None,
        "bound for --precision auto: mean KL divergence from fp32 in nats per token; default: 0.01",
        low=0,
        high=100,
    )
    evaluate: bool = setting(
        True, "measure and report the accuracy loss of a --precision that differs from the checkpoint's own"
    )
    calibration: str | None = setting(
        None, "UTF-8 text to measure precisions on; default: a bundled text", metavar="FILE"
    )
    head: str | None = setting(
        None,
        "precision of the LM head; default: that of the layers, or 8-bit integers if the layers have 4 bits or E4M3; "
        "w4a8: a 4-bit pass, then the best 256 tokens again in 8 bits",
        choices=("fp32", "bf16", "w8a8", "w8a16", "w4a8", "w4a16", "fp8a16"),
    )
    bf16_sums: str | None = setting(
        None,
        "summation order of bfloat16 matmuls: in pairs or like AMX tiles; both run on any CPU, and each gives the same "
        "bits everywhere; default: tiles if the CPU has AMX",
        choices=("pairs", "tiles"),
    )
    kv_cache_dtype: str | None = setting(
        None,
        "KV cache format: fp32, bf16, int8 (half the memory of bf16), fp8 (half, less accurate) or int4 (a third, much "
        "less accurate); default: bf16, or fp32 with precision fp32",
        choices=tuple(KV_CACHE_DTYPES),
    )
    max_context: int | None = setting(None, "longest sequence in tokens; default: the model's own, at most 8192", low=1)
    max_batch: int | None = setting(
        None,
        "maximum sequences per step; default: 16, on a GPU 64, for an encoder as many as fit into a step",
        low=1,
        high=1024,
    )
    group: int | None = setting(
        None,
        "inputs that share a scale in quantised weights, a multiple of 4; default: the checkpoint's group size, "
        "otherwise 128",
        low=4,
        high=4096,
    )
    tune: float = setting(
        2.0,
        "seconds to time kernels that were not timed on this machine before (at a build, or at a start on a GPU); 0: "
        "use default settings",
        low=0,
        high=3600,
    )
    tune_rows: str | None = setting(
        None,
        "row counts of the timed steps: decode (one row per sequence) / prefill; default: 1,4,16/64,128",
        metavar="N,N/N,N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_kl is not None and self.precision != "auto":
            raise ConfigError(
                "--max-kl is given without --precision auto", "both: it bounds what auto may choose",
                "add --precision auto, or leave it out",
            )  # fmt: skip
