"""The catalog of kernels and operators: the folders of this room that have a declare.py or an op.py.

A kernel's number in a program is its index among them, sorted by name. Standard library only, as in declare.py.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from millrace.kernels.declare import Kernel

if TYPE_CHECKING:
    from millrace.kernels.operators import KernelOperator


def discover(file: str) -> list[tuple[str, ModuleType]]:
    """Return (folder, module) of all folders that have this file, sorted by name."""
    names = sorted(path.parent.name for path in Path(__file__).parent.glob(f"*/{file}.py"))
    return [(name, importlib.import_module(f"millrace.kernels.{name}.{file}")) for name in names]


@cache
def kernels() -> tuple[Kernel, ...]:
    """Return all kernels in the order of their numbers."""
    return tuple(_declared(folder, module) for folder, module in discover("declare"))


def _declared(folder: str, module: ModuleType) -> Kernel:
    kernel = getattr(module, "KERNEL", None)
    assert isinstance(kernel, Kernel) and kernel.name == folder, f"kernels/{folder}/declare.py: no KERNEL of that name"
    return kernel


@cache
def numbered() -> Mapping[str, tuple[int, Kernel]]:
    """Return the number and declaration of each kernel by name."""
    return MappingProxyType({kernel.name: (i, kernel) for i, kernel in enumerate(kernels())})


def declarations_digest() -> str:
    """Digest the meaning of a program's bytes: kernels, operands, parameters, sizes and checks, in order."""
    declarations = [
        (k.name, [(o.name, o.access, o.size, o.ctype) for o in k.operands], k.params, k.checks) for k in kernels()
    ]
    return hashlib.blake2b(repr(declarations).encode(), digest_size=8).hexdigest()


@cache
def operators() -> Mapping[str, KernelOperator]:
    """Return the operators of all folders by name."""
    every = [operator for _, module in discover("op") for operator in module.OPERATORS]
    by_name = {operator.name: operator for operator in every}
    assert len(by_name) == len(every), f"two operators of one name among {sorted(o.name for o in every)}"
    return MappingProxyType(by_name)
