"""An encoder on a GPU: whole texts in, packed one after the other, a vector for each out; nothing is kept."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace.engine.cuda.attention_partition import blocks, rows_for
from millrace.engine.cuda.capability_check import check_runs
from millrace.engine.cuda.device_constants import load
from millrace.engine.cuda.graph_executor import GraphExecutor, Load
from millrace.engine.cuda.host_device_copy import AsyncCopy, on_device, on_device_context
from millrace.engine.cuda.lowered import LoweredGraph
from millrace.engine.encoder_inputs import text_inputs
from millrace.engine.io_slots import Slot, sizes_of
from millrace.errors import RequestError
from millrace.graph.types import Node, Symbol
from millrace.kernels.attention.texts import TextTables
from millrace.kernels.operators import float_attr, static_dim


class CudaEncoderExecutor(GraphExecutor):
    """lowered, device, load: as in GraphExecutor; most: maximum of tokens (T) and texts (S) of a run

    raises as GraphExecutor; EngineError for an operator without a kernel here
    """

    def __init__(self, lowered: LoweredGraph, max_sizes: Mapping[str, int], *, device: str, load: Load = load) -> None:
        check_runs(lowered.graph, None)
        super().__init__(lowered, device=device, load=load)
        self._inputs = tuple(map(Slot.from_port, lowered.graph.inputs))
        self._most = {Symbol(name): n for name, n in max_sizes.items()}
        self._lengths: NDArray[np.int32]
        self._texts: dict[int, TextTables] = {}  # of this run, by query heads per KV head

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Run the encoder and return its outputs by name, float32.

        raises RequestError for an input that is missing, unknown, or not of the declared shape, type and bounds;
        RuntimeError if the device fails
        """
        sizes = sizes_of(self._inputs, self._most, inputs)
        self._lengths, self._texts = np.asarray(inputs["lengths"], np.int32), {}
        if self._lengths.min() < 1 or self._lengths.sum() != sizes[Symbol("T")]:
            raise RequestError("lengths of texts that are not those of the tokens", "one for each text, of all tokens",
                               "give each text's number of tokens, at least 1")  # fmt: skip
        with torch.inference_mode(), on_device_context(self.device):
            tensors = {name: on_device(np.asarray(x), self.device) for name, x in inputs.items()}
            result = {name: y.float() for name, y in self._computed(tensors).items()}
            arrived = AsyncCopy.start(tuple(result.values())).arrived()
        return dict(zip(result, arrived, strict=True))

    def warm(self, longest: int) -> None:
        """Compile the kernels and allocate the largest run's memory before the first request.

        longest: tokens of a text. raises RuntimeError if the device fails, or has too little memory
        """
        tokens, texts = self._most[Symbol("T")], self._most[Symbol("S")]
        each = min(longest, tokens)
        self.run(text_inputs([np.zeros(each, np.int32)] * min(tokens // each, texts), [s.name for s in self._inputs]))

    def attended_whole(self, node: Node, heads: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        group = static_dim(node.inputs[0], 1) // static_dim(node.inputs[1], 1)
        if group not in self._texts:
            self._texts[group] = text_tables(self._lengths, group, self.device)
        y: Tensor = self._kernels.text_attention(heads, self._texts[group], float_attr(node, "scale"))
        return y


def text_tables(lengths: NDArray[np.int32], group: int, device: torch.device) -> TextTables:
    """Copy the texts' tables to the device at once. lengths: tokens of each text; group: query heads per KV head"""
    rows = rows_for(int(lengths.max(initial=1)) * group)
    starts, programs = np.append(0, np.cumsum(lengths)), np.stack(blocks(lengths * group, rows), 1)
    tables = on_device(np.concatenate([starts, programs.reshape(-1)]).astype(np.int32), device)
    return TextTables(tables[: len(starts)], tables[len(starts) :].view(-1, 2), rows)
