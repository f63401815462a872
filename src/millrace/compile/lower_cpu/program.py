"""A program as data: a flat list of kernel calls over planned buffers, and the weights they read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from millrace.compile.lower_cpu.memory import MemoryPlan
from millrace.engine.cache_specs import CacheSpec, StateSpec
from millrace.engine.io_slots import Size, Slot
from millrace.graph.types import Symbol
from millrace.kernels.declare import Param, Space
from millrace.kernels.encode import Ref, encode
from millrace.kernels.operand_places import OperandPlace, PackedPlace


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call."""

    kernel: str
    operands: Mapping[str, OperandPlace | None]
    params: Mapping[str, Param]
    origin: tuple[str, ...]
    note: str = ""  # the numerics class or row format, for display


@dataclass(frozen=True, slots=True)
class Bounds:
    """The optimization profile of one symbol: its bounds, and the size to tune for."""

    low: int
    usual: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Calls with their operands placed. `weights_offsets` and `memory.offsets` are bytes within their spaces."""

    calls: tuple[Call, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    symbols: Mapping[Symbol, Bounds]
    sizes: tuple[Size, ...]  # numbered after the symbols
    weights: tuple[PackedPlace, ...]
    weights_offsets: tuple[int, ...]
    weights_bytes: int
    memory: MemoryPlan  # of the activations
    caches: tuple[CacheSpec, ...]
    states: tuple[StateSpec, ...]
    passes: tuple[str, ...] = field(default=())

    @property
    def matrix_bytes(self) -> int:
        """Bytes of matmul weights, which each step reads completely."""
        places = (call.operands["w"] for call in self.calls if call.kernel == "matmul")
        return sum(self.weights[place.number].nbytes for place in places if place)

    def encoded(self) -> bytes:
        return b"".join(encode(call.kernel, self._refs(call), call.params) for call in self.calls)

    def _refs(self, call: Call) -> dict[str, Ref | None]:
        return {name: self._ref(place) for name, place in call.operands.items()}

    def _ref(self, place: OperandPlace | None) -> Ref | None:
        if place is None:
            return None
        offsets = self.weights_offsets if place.space == Space.WEIGHTS else self.memory.offsets
        return Ref(place.space, offsets[place.number] + place.offset)
