"""An encoder's network on a GPU that computes nothing: where its tensors lie, what it launches, what it waits for."""

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from millrace.checkpoint.checkpoint import Checkpoint
from millrace.compile.lower_gpu.lower import lower_for_gpu
from millrace.compile.passes.pipeline import gpu, run_passes
from millrace.compile.precision import precision_map
from millrace.compile.source import Source
from millrace.engine.cuda.encoder_executor import CudaEncoderExecutor
from millrace.engine.cuda.host_device_copy import AsyncCopy
from millrace.engine.encoder_inputs import text_inputs
from millrace.kernels.catalogue import operators
from millrace.model.module import trace_model
from tests.support.checkpoints import random_encoder

pytest.importorskip("triton", reason="triton is not installed")
from tests.support.fake_cuda import DEVICE, loaded_there, on_fake_cuda

MOST = {"T": 512, "S": 16}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "w8a8"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_run_waits_for_its_vectors_alone(
    precision: str, pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the device are of pinned memory and wait for nothing; no operator meets a tensor of the host."""
    source = Source.from_checkpoint(Checkpoint.open(random_encoder(tmp_path, pooling=pooling)))
    graph = run_passes(trace_model(source.module, source.weights, operators()), gpu(precision_map(precision)))
    dtype = "fp32" if precision == "fp32" else "bf16"
    like = CudaEncoderExecutor(lower_for_gpu(graph, dtype), MOST, device="cpu")._loaded
    texts = text_inputs([np.arange(n, dtype=np.int32) for n in (3, 17, 64, 1)], [p.name for p in graph.inputs])
    shapes: list[tuple[int, ...]] = []

    def arrived(way: AsyncCopy) -> tuple[Tensor, ...]:
        shapes.extend(tuple(x.shape) for x in way.tensors)
        return way.tensors

    monkeypatch.setattr(AsyncCopy, "arrived", arrived)
    with on_fake_cuda(monkeypatch) as device:
        network = CudaEncoderExecutor(
            lower_for_gpu(graph, dtype), MOST, device=str(DEVICE), load=lambda *_: loaded_there(like)
        )
        device.warming = True
        network.warm(100)
        device.warming = False
        device.launched.clear()
        shapes.clear()
        assert network.run(texts).keys() == {"embeddings"} and shapes == [(4, 96)]
        assert device.launched.count("attend_texts") == 2, "one of each layer"
        assert "nonzero" not in device.called
