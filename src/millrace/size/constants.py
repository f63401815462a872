"""What devices reach of their datasheets, fitted by `fit.py` to published runs, with what the fit leaves unexplained.

Source of all rows: NVIDIA's course "Sizing LLM inference systems", engine runs of TensorRT-LLM 0.9.0 in static batches
(Llama-2 7B and 70B, Mistral 7B; TP 1 to 8; prompts of 128 and 2,048 tokens, answers of 128 to 4,096). Newer software is
faster, mostly by one factor on every time: `Constants.factor`.
"""

from dataclasses import dataclass

from millrace.machine.devices import Device, Link, find_device
from millrace.size.cost import Constants

TENSORRT_LLM = "TensorRT-LLM 0.9.0, static batches"
_UNSEEN = 0.25  # relative error to expect of a device that was not measured: that of one left out, doubled


@dataclass(frozen=True, slots=True)
class Profile:
    """prefill_error, decode_error: mean relative errors, of the rows that it was fitted to or as to be expected"""

    device: str
    precision: str
    constants: Constants
    prefill_error: float
    decode_error: float
    source: str


def _trt(device: str, precision: str, prefill: tuple[float, ...], decode: tuple[float, ...], *errors: float) -> Profile:
    """errors: of prefill, of decode"""
    prefill_error, decode_error = errors
    return Profile(device, precision, Constants(prefill, decode), prefill_error, decode_error, TENSORRT_LLM)


PROFILES = (
    _trt(
        "A100 SXM 80GB",
        "fp16",
        (1.34, 3.98e-05, 4.79e-12, 3.33e-11, 0.00754),
        (1.19, 1.15, 4.42e-05, 5.94e-12, 3.33e-11, 0.00264, 1.03e-05),
        0.054,
        0.055,
    ),
    _trt(
        "GH200 96GB",
        "fp8",
        (1.84, 4.43e-05, 3.09e-12, 3.33e-11, 0.00422),
        (1.25, 1.29, 2.74e-05, 4.68e-12, 3.33e-11, 0.00186, 8.92e-06),
        0.055,
        0.070,
    ),
    _trt(
        "H100 SXM",
        "fp16",
        (1.68, 3.64e-05, 2.37e-12, 3.33e-11, 0.00541),
        (1.05, 1, 3.53e-05, 3.46e-12, 3.33e-11, 0.00248, 9.12e-06),
        0.054,
        0.051,
    ),
    _trt(
        "H100 SXM",
        "fp8",
        (1.76, 4.03e-05, 3.28e-12, 3.33e-11, 0.00476),
        (1.16, 1.07, 3.11e-05, 5.19e-12, 3.33e-11, 0.0019, 9.29e-06),
        0.047,
        0.067,
    ),
    _trt(
        "H100 NVL",
        "fp8",
        (2.13, 3.61e-05, 3.24e-12, 3.66e-11, 0.0045),
        (1.34, 1.68, 4.06e-05, 5.11e-12, 4e-11, 0.00193, 1.1e-05),
        0.103,
        0.120,
    ),
    _trt(
        "H200 SXM",
        "fp8",
        (1.73, 3.93e-05, 3.02e-12, 3.33e-11, 0.00416),
        (1.32, 1.26, 2.85e-05, 4.9e-12, 3.33e-11, 0.00184, 9.39e-06),
        0.043,
        0.077,
    ),
    _trt(
        "L40",
        "fp8",
        (1.5, 3.07e-05, 6.39e-11, 3.33e-11, 0.00708),
        (1.28, 1, 5.64e-05, 6.43e-11, 3.33e-11, 0.00179, 8.82e-06),
        0.091,
        0.069,
    ),
    _trt(
        "L40S",
        "fp8",
        (1.91, 3.49e-05, 6.21e-11, 3.33e-11, 0.00599),
        (1.25, 1.14, 4.79e-05, 6.67e-11, 3.33e-11, 0.00165, 8.7e-06),
        0.043,
        0.054,
    ),
)


def profile(device: Device, precision: str) -> Profile:
    """Of that device and precision; else of the most similar one, with the error to expect. raises ConfigError"""
    device.peak("fp16" if precision == "int4" else "bf16" if precision == "bf16" else precision)
    wanted = {"bf16": "fp16", "int8": "fp8", "int4": "fp16", "fp4": "fp8"}.get(precision, precision)
    for known in PROFILES:
        if known.device == device.name and known.precision == wanted == precision:
            return known
    alike = min(PROFILES, key=lambda known: _distance(known, device, wanted))
    told = f"{alike.source}: that of {alike.precision} on {alike.device}, which is the most similar"
    return Profile(device.name, precision, alike.constants, _UNSEEN, _UNSEEN, told)


def _distance(known: Profile, device: Device, precision: str) -> tuple[bool, bool, bool, float]:
    other = find_device(known.device)
    return (
        other.link != device.link and Link.PCIE in (other.link, device.link),
        known.precision != precision,
        other.architecture != device.architecture,
        abs(other.bandwidth / device.bandwidth - 1),
    )
