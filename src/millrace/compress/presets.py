"""Names and defaults that `--help` of `compress` shows; imports only the standard library."""

from collections.abc import Mapping
from enum import StrEnum

SAMPLES = 128  # default number of samples of a text, for statistics
BATCH = 16  # default sequences of the large batch of --advise
ABOUT: Mapping[str, str] = {
    "int8-wo": "8-bit weights, a scale a row: Model Optimizer's int8_weight_only",
    "int4-wo": "4-bit weights in groups of 128, to nearest: llm-compressor's W4A16",
    "int4-wo-mse": "the same, the best of smaller ranges: llm-compressor's memoryless_mse",
    "fp8": "E4M3 with a scale a row: llm-compressor's FP8_DYNAMIC; activations stay bfloat16 here",
    "fp8-tensor": "E4M3 with one scale a matrix: weights of llm-compressor's FP8; activations as of fp8",
    "fp8-gptq": "E4M3 with a scale a row, the best of an octave, by GPTQ: what FP8 loses least by",
    "int4-gptq": "GPTQ of statistics, damping 0.01, static order: llm-compressor's W4A16 by GPTQModifier",
    "int4-gptq-clip": "the same within clipped ranges of either sign: what loses least of these",
    "int4-awq": "inputs that matter scaled up, ranges clipped by whole outputs: AWQ's losses, AutoAWQ's grids",
    "w4afp8-awq": "the same, meant for FP8 activations as llm-compressor's W4AFP8 is; they stay bfloat16 here",
    "int8-sq": "8-bit weights and activations: SmoothQuant by mean squares, then GPTQ; as llm-compressor's W8A8",
}


class CompressionTarget(StrEnum):
    """What to minimize. latency: time of a step with few rows, as in decoding; throughput: of one with many rows."""

    LATENCY = "latency"
    MEMORY = "memory"
    THROUGHPUT = "throughput"


ROWS: Mapping[CompressionTarget, int] = {
    CompressionTarget.LATENCY: 1,
    CompressionTarget.THROUGHPUT: 64,
}  # defaults
