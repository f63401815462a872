"""A graph lowered for a GPU: the decisions of `compile/lower_gpu`, made before a weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.graph.types import Graph, Node, Value

if TYPE_CHECKING:  # PyTorch is imported only when a GPU is used
    from millrace.kernels.matmul.coded import RowQuantization


@dataclass(frozen=True, slots=True)
class Placement:
    """The form of each constant on the device.

    coded: matmuls with quantized weights, with the node that makes their input rows
    narrow: constants in the engine's type; wide: in float32, or int32
    """

    coded: Mapping[Node, Node | None]
    narrow: tuple[Value, ...]
    wide: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Fusions:
    """Operations between matmuls that are fused into one kernel.

    norms: for a matmul that is added to the residual stream, the norm that reads the sum
    codings: for rows that only matmuls of 8-bit rows read, the format in which they are written
    """

    norms: Mapping[Node, Node]
    codings: "Mapping[Value, RowQuantization]"


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """graph: after the passes of `pipeline.gpu`, which choose the format of each matmul's weights

    dtype: of activations, and of weights that are not quantized: fp32, tf32, bf16, fp16
    e4m3: quantized matmuls whose 16-bit input rows are rounded to E4M3, each by its own scale
    """

    graph: Graph
    dtype: str
    e4m3: frozenset[Node]
    placement: Placement
    fusions: Fusions
