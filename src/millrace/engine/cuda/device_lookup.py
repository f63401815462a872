"""Find the requested GPU, or fail with one clear error before anything else is done. Imports PyTorch to look."""

import re
from dataclasses import dataclass

from millrace.errors import ConfigError, MachineError
from millrace.machine.devices import find_device, match_device_name

CPU = "cpu"
_DEVICE_NAME = re.compile(r"cpu|cuda(:\d{1,4})?")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. device: PyTorch's name; capability: (9, 0) of a Hopper; free_bytes: of its memory"""

    device: str
    name: str
    capability: tuple[int, int]
    free_bytes: int
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class DeviceId:
    """Where a model runs, by the name of its device, and by what.

    random_weights: weights are drawn on the device, and none is read
    transformers: it runs through transformers in PyTorch, on a CPU
    """

    device: str = CPU
    random_weights: bool = False
    transformers: bool = False


ON_CPU = DeviceId()


@dataclass(frozen=True, slots=True)
class DatasheetDevice:
    """A local GPU, or one of the catalog. about: its name and specification; here: None for one of the catalog"""

    about: str
    architecture: str
    here: Gpu | None = None


def first_line(error: Exception) -> str:
    """Return the first line of an error of PyTorch or Triton; for an empty message, the error's name."""
    return (str(error) or type(error).__name__).splitlines()[0]


def known_gpu(device: str) -> DatasheetDevice:
    """Look a GPU up. device: cuda, or cuda:1, of this machine; otherwise a name of the catalog, such as h100

    raises ConfigError for other names; MachineError if this machine has no GPU
    """
    if device != CPU and _DEVICE_NAME.fullmatch(device):
        result = find_gpu(device)
        return DatasheetDevice(*match_device_name(result.name, result.capability), result)
    try:
        device_name = find_device(device)
    except ConfigError as error:
        expected = "cuda, cuda:1 for the second GPU here, or one of the catalogue, such as H100"
        raise ConfigError(f'--device is "{device}"', expected, error.fix) from None
    return DatasheetDevice(f"{device_name.name} ({device_name.architecture})", device_name.architecture)


def check_name(device: str) -> None:
    """Check a device's name. raises ConfigError"""
    if not isinstance(device, str) or not _DEVICE_NAME.fullmatch(device):  # in Python it may be any object
        meant = str(device).lower()
        if meant.isdecimal():
            meant = f"cuda:{meant}"
        if meant in ("gpu", "nvidia", "auto"):
            meant = "cuda"
        fix = f"write --device {meant}" if _DEVICE_NAME.fullmatch(meant) else "choose one of them"
        raise ConfigError(f'--device is "{device}"', "cpu, cuda, or cuda:1 for the second GPU", fix)


def find_gpu(device: str) -> Gpu:
    """Find the GPU. raises MachineError if PyTorch, its CUDA part, a driver or the GPU is missing, or has failed"""
    try:
        import torch
        import triton  # noqa: F401 - the kernels are written in it
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
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
            available = ", ".join(f"cuda:{i} ({torch.cuda.get_device_properties(i).name})" for i in range(n))
            raise MachineError(f"there is no GPU cuda:{index}", f"one of {available}", "choose one of them")
        result, (free_bytes, _) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    except (RuntimeError, AssertionError) as error:  # no driver, one too old, no GPU that may be used, a failed one
        raise MachineError(
            f"--device {device}: no GPU to run on: {first_line(error)}",
            f"an NVIDIA GPU, with a driver for CUDA {torch.version.cuda}",
            "see what nvidia-smi says, or leave --device out to run on the CPU",
        ) from error
    return Gpu(f"cuda:{index}", result.name, (result.major, result.minor), free_bytes, result.multi_processor_count)
