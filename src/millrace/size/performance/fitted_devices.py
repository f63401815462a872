"""Device constants fitted by `fit/device.py` to published runs: shares of the datasheet, and residuals.

Source of all rows: NVIDIA's course "Sizing LLM inference systems". Steps: engine runs of TensorRT-LLM 0.9.0 in static
batches (Llama-2 7B and 70B; TP 1 to 8; prompts of 128 and 2,048 tokens, answers of 128 to 4,096); Mistral 7B and GH200
were held out. Newer software is faster, mostly by one factor on every time: `Constants.factor`. Serving: runs of NVIDIA
NIM with 1 to 250 requests in flight (Llama-3 8B and 70B on A100 and H100), fitted by simulation.
"""

from dataclasses import dataclass

from millrace.machine.devices import Device, Link, find_device
from millrace.size.performance.roofline_cost import Constants
from millrace.size.performance.serving_overhead import Stack

TENSORRT_LLM = "TensorRT-LLM 0.9.0, static batches"
UNSEEN = 0.25  # expected relative error of an unmeasured device: twice the leave-one-out error


def _nim(prefill: float, decode: float, cache: float, host_us: float) -> Stack:
    """Create a stack of NIM: the KV cache is read slower than in static batches, at 8 bits no faster than at 16.

    TTFT matches steps of up to 32,768 tokens, and 2 ms in which the host takes in a request before the next.
    """
    return Stack(
        name="NVIDIA NIM of 2024", prefill=prefill, decode=decode, cache=cache, host_s=host_us * 1e-6, front_s=2e-3,
        step_tokens=32768,
    )  # fmt: skip


_UNSERVED = 0.15  # relative error of requests/s if the engine was measured but not the serving stack
# Fitted by simulation; with the mean leave-one-out error of requests/s (overhead.py).
STACKS = {
    ("A100 SXM 80GB", "fp16"): (_nim(1.138, 1.056, 1.74, 23.7), 0.05),
    ("H100 SXM", "fp16"): (_nim(1.132, 1.059, 1.70, 10.5), 0.05),
    ("H100 SXM", "fp8"): (_nim(1.055, 1.186, 3.11, 13.2), 0.13),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """Constants of a device and precision. prefill_error, decode_error: mean relative errors of the fitted rows, or
    expected ones; served_error: of requests/s for a model outside the fit
    """

    device: str
    precision: str
    constants: Constants
    prefill_error: float
    decode_error: float
    source: str
    stack: Stack
    served_error: float


def _trt(device: str, precision: str, prefill: tuple[float, ...], decode: tuple[float, ...], *errors: float) -> Profile:
    """Create a profile fitted to TensorRT-LLM. errors: of prefill, of decode"""
    prefill_error, decode_error = errors
    stack, served_error = STACKS.get((device, precision), (STACKS["H100 SXM", precision][0], _UNSERVED))
    return Profile(
        device, precision, Constants(prefill, decode), prefill_error, decode_error, TENSORRT_LLM, stack, served_error
    )


PROFILES = (
    _trt(
        "A100 SXM 80GB",
        "fp16",
        (1.32, 2.83e-05, 5.07e-12, 3.33e-11, 0.00766),
        (1.26, 1.0, 2.65e-05, 5.91e-12, 3.33e-11, 0.00184, 9.58e-06),
        0.061,
        0.044,
    ),
    _trt(
        "H100 NVL",
        "fp8",
        (2.09, 2.43e-05, 3.71e-12, 3.68e-11, 0.00454),
        (1.36, 1.71, 3.11e-05, 5.42e-12, 3.85e-11, 0.00164, 9.94e-06),
        0.122,
        0.079,
    ),
    _trt(
        "H100 SXM",
        "fp16",
        (1.6, 2.73e-05, 2.66e-12, 3.33e-11, 0.00561),
        (1.12, 1.0, 2.09e-05, 3.48e-12, 3.33e-11, 0.00201, 7.02e-06),
        0.036,
        0.037,
    ),
    _trt(
        "H100 SXM",
        "fp8",
        (1.72, 2.9e-05, 3.39e-12, 3.33e-11, 0.00512),
        (1.25, 1.1, 2e-05, 5.12e-12, 3.33e-11, 0.00149, 7e-06),
        0.046,
        0.041,
    ),
    _trt(
        "H200 SXM",
        "fp8",
        (1.7, 2.86e-05, 3.1e-12, 3.33e-11, 0.00432),
        (1.37, 1.27, 2.03e-05, 4.49e-12, 3.33e-11, 0.00158, 7.63e-06),
        0.044,
        0.048,
    ),
    _trt(
        "L40",
        "fp8",
        (1.39, 2.08e-05, 6.63e-11, 3.33e-11, 0.00753),
        (1.38, 1.0, 3.36e-05, 5.84e-11, 3.33e-11, 0.00125, 9.23e-06),
        0.090,
        0.081,
    ),
    _trt(
        "L40S",
        "fp8",
        (1.89, 2.44e-05, 6.23e-11, 3.33e-11, 0.00622),
        (1.31, 1.41, 2.56e-05, 6.51e-11, 3.33e-11, 0.00112, 9.29e-06),
        0.043,
        0.070,
    ),
)


def profile(device: Device, precision: str) -> Profile:
    """Return the profile of a device and precision, or of the most similar one with its expected error.

    raises ConfigError if the device lacks the precision
    """
    device.peak("fp16" if precision == "int4" else "bf16" if precision == "bf16" else precision)
    base_precision = {"bf16": "fp16", "int8": "fp8", "int4": "fp16", "fp4": "fp8"}.get(precision, precision)
    for candidate in PROFILES:
        if candidate.device == device.name and candidate.precision == base_precision == precision:
            return candidate
    alike = min(PROFILES, key=lambda candidate: _distance(candidate, device, base_precision))
    source = f"{alike.source}: that of {alike.precision} on {alike.device}, which is the most similar"
    return Profile(device.name, precision, alike.constants, UNSEEN, UNSEEN, source, alike.stack, UNSEEN)


def _distance(candidate: Profile, device: Device, precision: str) -> tuple[bool, bool, bool, bool, float]:
    other = find_device(candidate.device)
    return (
        other.link != device.link and Link.PCIE in (other.link, device.link),
        other.link != device.link,
        candidate.precision != precision,
        other.architecture != device.architecture,
        abs(other.bandwidth / device.bandwidth - 1),
    )
