"""What a graph has constant, on a device: each read once."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace.engine.cuda.placement import Placement, transform_of
from millrace.graph.types import DType, Graph, Node, Value
from millrace.kernels.matmul.coded import CodedRows, Matrix, weights
from millrace.kernels.matmul.op import codes_of, group_of, matrices_of, precision_of
from millrace.kernels.places import constant_of


@dataclass(frozen=True, slots=True)
class Loaded:
    """tensors: tables, biases and weights of products in the engine's type, others in float32

    coded: of products by node: codes and scales of each of their matrices
    """

    tensors: dict[Value, Tensor]
    coded: dict[Node, tuple[CodedRows, ...]]

    def matrices(self, node: Node) -> tuple[Matrix, ...]:
        """Of a product."""
        return self.coded.get(node) or tuple(self.tensors[w] for w in matrices_of(node))


def load(graph: Graph, dtype: torch.dtype, device: torch.device, given: Loaded | None = None) -> Loaded:
    """given: what is there already, and is not read

    raises CheckpointError for weights that are not finite, where they become codes
    """
    placement, held = Placement.of(graph), given or Loaded({}, {})
    coded = {n: held.coded[n] if n in held.coded else _coded(n, rows, device) for n, rows in placement.coded.items()}
    kinds = (placement.narrow, dtype), (placement.wide, torch.float32)
    tensors = {
        value: held.tensors[value] if value in held.tensors else _tensor(value, kind, device)
        for values, kind in kinds for value in values
    }  # fmt: skip
    return Loaded(tensors, coded)


def _tensor(value: Value, dtype: torch.dtype, device: torch.device) -> Tensor:
    kind = np.int32 if value.dtype == DType.I32 else np.float32
    array = np.ascontiguousarray(constant_of(value).load()).astype(kind)
    return torch.from_numpy(array).to(device, torch.int32 if kind == np.int32 else dtype)


def _coded(node: Node, rows: Node | None, device: torch.device) -> tuple[CodedRows, ...]:
    """rows: what made those that its weights meet"""
    bits, group, transform = precision_of(node).bits, group_of(node), transform_of(rows)
    constants = [constant_of(w) for w in matrices_of(node)]
    return tuple(weights(codes_of(c, c.load, bits, group, transform), device) for c in constants)
