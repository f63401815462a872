"""Which kernels there are: the folders of this room that hold a declare.py.

A kernel's number in a program is its place among them, sorted by name. Standard library only, as in declare.py.
"""

import hashlib
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from millrace.kernels.declare import Kernel


def found(file: str) -> list[tuple[str, object]]:
    """(folder, module) of all folders that hold this file, sorted by name."""
    names = sorted(path.parent.name for path in Path(__file__).parent.glob(f"*/{file}.py"))
    return [(name, importlib.import_module(f"millrace.kernels.{name}.{file}")) for name in names]


@cache
def kernels() -> tuple[Kernel, ...]:
    """In the order of their numbers."""
    return tuple(_declared(folder, module) for folder, module in found("declare"))


def _declared(folder: str, module: object) -> Kernel:
    kernel = getattr(module, "KERNEL", None)
    assert isinstance(kernel, Kernel) and kernel.name == folder, f"kernels/{folder}/declare.py: no KERNEL of that name"
    return kernel


@cache
def numbered() -> Mapping[str, tuple[int, Kernel]]:
    """By name: its number and its declaration."""
    return MappingProxyType({kernel.name: (i, kernel) for i, kernel in enumerate(kernels())})


def declarations_digest() -> str:
    """Of all that a program's bytes mean: kernels, operands, parameters, sizes and checks, in their order."""
    said = [(k.name, [(o.name, o.access, o.size, o.ctype) for o in k.operands], k.params, k.checks) for k in kernels()]
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()
