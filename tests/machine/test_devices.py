"""One table of what devices multiply: `size` refuses by it, and so does what runs an engine on a GPU.

`build` and `doctor` go by it, too: tests/cli/test_gpus_asked.py.
"""

import re
from pathlib import Path

import pytest

import millrace
from millrace.errors import ConfigError
from millrace.machine.devices import (
    CAPABILITIES,
    DEVICES,
    MIN_CAPABILITY,
    PROCESSOR,
    Device,
    check_multiplies,
    find_device,
    multiplied,
)
from millrace.size import plan

# What tensor cores multiply by compute capability, as the CUDA C++ Programming Guide has it,
# without what no engine here is made of (4 bits before Blackwell, TF32, FP64).
TENSOR_CORES = {
    "Volta": {"fp16"}, "Turing": {"fp16", "int8"}, "Ampere": {"fp16", "bf16", "int8"},
    "Ada": {"fp16", "bf16", "int8", "fp8"}, "Hopper": {"fp16", "bf16", "int8", "fp8"},
    "Blackwell": {"fp16", "bf16", "int8", "fp8", "fp4"},
}  # fmt: skip
PRECISIONS = ("fp16", "bf16", "int8", "fp8", "fp4")
OURS = [device for device in DEVICES if device.architecture in TENSOR_CORES]


def capability(device: Device) -> tuple[int, int]:
    return next(least for least, name in CAPABILITIES.items() if name == device.architecture)


def test_architectures_multiply_what_nvidia_says() -> None:
    assert set(CAPABILITIES.values()) == set(TENSOR_CORES)
    assert {name: set(multiplied(name)) for name in TENSOR_CORES} == TENSOR_CORES


@pytest.mark.parametrize("device", OURS, ids=lambda device: device.name)
def test_every_device_multiplies_what_its_architecture_does(device: Device) -> None:
    """Else a purchase would be planned with what an engine is refused on, or the other way round."""
    assert set(device.peaks) == TENSOR_CORES[device.architecture]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("device", [d for d in OURS if capability(d) >= MIN_CAPABILITY], ids=lambda d: d.name)
def test_a_purchase_is_refused_where_the_engine_is(device: Device, precision: str) -> None:
    asked = {"model": "llama-3.2-1b", "isl": 10, "osl": 2, "rate": 1, "mode": "offline", "simulate": False}
    if precision in TENSOR_CORES[device.architecture]:
        check_multiplies(device.name, capability(device), [precision])
        assert plan(**asked, hardware=device.name, precision=precision).plan.point.precision == precision
        return
    with pytest.raises(ConfigError, match=f"does not multiply {precision}"):
        check_multiplies(device.name, capability(device), [precision])
    with pytest.raises(ConfigError, match=rf"{re.escape(device.name)} \({device.architecture}\) does not multiply"):
        plan(**asked, hardware=device.name, precision=precision)


def test_a_name_has_many_spellings() -> None:
    """Each device by its name and aliases, with hyphens, without regard to case; no two meet in one."""
    for device in DEVICES:
        for name in (device.name, *device.aliases):
            for spelt in (
                name,
                name.upper(),
                name.replace(" ", "-"),
                f"NVIDIA {name.removeprefix('NVIDIA ').replace('-', ' ')}",
                f" {name} ",
            ):
                assert find_device(spelt) is device, spelt
    with pytest.raises(ConfigError, match="no device is known as h100-smx"):
        find_device("h100-smx")


def test_no_other_room_names_architectures() -> None:
    """There is no second table: constants that were fitted name devices, and nobody else an architecture."""
    names = {device.architecture for device in DEVICES} - {PROCESSOR}
    quoted = re.compile("|".join(f'"{re.escape(name)}"' for name in names))
    source = Path(millrace.__file__).parent
    found = {str(file.relative_to(source)) for file in source.rglob("*.py") if quoted.search(file.read_text())}
    assert found == {"machine/devices.py"}
