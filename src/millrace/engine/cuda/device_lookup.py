"""The GPU that was asked for: found, or one clear error, before anything else is done. PyTorch is imported for it."""

import re
from dataclasses import dataclass

from millrace.errors import ConfigError, MachineError
from millrace.machine.devices import find_device, match_device_name

CPU = "cpu"
_NAMED = re.compile(r"cpu|cuda(:\d{1,4})?")


@dataclass(frozen=True, slots=True)
class Gpu:
    """device: as PyTorch names it; capability: (9, 0) of a Hopper; free_bytes: of its memory"""

    device: str
    name: str
    capability: tuple[int, int]
    free_bytes: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class DeviceId:
    """Where a model runs, by the name of its device; random_weights: with weights that are drawn there, none is read"""

    device: str = CPU
    random_weights: bool = False


ON_CPU = DeviceId()


@dataclass(frozen=True, slots=True)
class DatasheetDevice:
    """A GPU that is here, or one of the catalogue. about: its name and what it is; here: None of the catalogue's"""

    about: str
    architecture: str
    here: Gpu | None = None


def first_line(error: Exception) -> str:
    """What an error of PyTorch's or Triton's says first; some say nothing but their name."""
    return (str(error) or type(error).__name__).splitlines()[0]


def known_gpu(device: str) -> DatasheetDevice:
    """device: cuda, or cuda:1, of those that are here; else a name of the catalogue, such as h100

    raises ConfigError for others; MachineError where there is none here
    """
    if device != CPU and _NAMED.fullmatch(device):
        result = find_gpu(device)
        return DatasheetDevice(*match_device_name(result.name, result.capability), result)
    try:
        named = find_device(device)
    except ConfigError as error:
        expected = "cuda, cuda:1 for the second GPU here, or one of the catalogue, such as H100"
        raise ConfigError(f'--device is "{device}"', expected, error.mend) from None
    return DatasheetDevice(f"{named.name} ({named.architecture})", named.architecture)


def check_name(device: str) -> None:
    """raises ConfigError"""
    if not isinstance(device, str) or not _NAMED.fullmatch(device):  # from Python it may be anything
        meant = str(device).lower()
        if meant.isdecimal():
            meant = f"cuda:{meant}"
        if meant in ("gpu", "nvidia", "auto"):
            meant = "cuda"
        mend = f"write --device {meant}" if _NAMED.fullmatch(meant) else "choose one of them"
        raise ConfigError(f'--device is "{device}"', "cpu, cuda, or cuda:1 for the second GPU", mend)


def find_gpu(device: str) -> Gpu:
    """raises MachineError where PyTorch, its part for CUDA, a driver or such a GPU is not there, or it has failed"""
    try:
        import torch
        import triton  # noqa: F401 - the kernels are written in it
    except (ImportError, OSError) as error:  # OSError: a library of theirs is missing
        missing = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else ""
        raise MachineError(
            f"--device {device}: {missing or f'PyTorch cannot be used: {error}'}", "PyTorch for CUDA, and Triton",
            "pip install 'millrace[gpu]', or leave --device out to run on the CPU",
        ) from error  # fmt: skip
    if torch.version.cuda is None:
        raise MachineError(
            f"--device {device}: this PyTorch ({torch.__version__}) was built without CUDA",
            "PyTorch for CUDA",
            "install it as https://pytorch.org/get-started says, or leave --device out to run on the CPU",
        )
    try:
        torch.cuda.init()
        n = torch.cuda.device_count()
        index = int(device.partition(":")[2] or torch.cuda.current_device())
        if index >= n:
            there = ", ".join(f"cuda:{i} ({torch.cuda.get_device_properties(i).name})" for i in range(n))
            raise MachineError(f"there is no GPU cuda:{index}", f"one of {there}", "choose one of them")
        result, (free_bytes, _) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    except (RuntimeError, AssertionError) as error:  # no driver, one too old, none that may be used, one that failed
        raise MachineError(
            f"--device {device}: no GPU to run on: {first_line(error)}",
            f"an NVIDIA GPU, with a driver for CUDA {torch.version.cuda}",
            "see what nvidia-smi says, or leave --device out to run on the CPU",
        ) from error
    return Gpu(f"cuda:{index}", result.name, (result.major, result.minor), free_bytes, result.multi_processor_count)
