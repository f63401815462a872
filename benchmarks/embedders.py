"""Encoders of sentences that `benchmarks.embeddings` compares: each takes token ids of texts and gives their vectors.

Others take rectangles: their batches hold texts of similar lengths, padded to the longest, in the batch size that is
fastest for them here. Their graphs pool and normalise too, as ours does.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import TUNE_S
from benchmarks.peers.timing import fastest, seconds

Vectors = NDArray[np.float32]  # (texts, width)
SearchWindows = Sequence[Sequence[int]]
Rectangle = tuple[NDArray[np.int64], NDArray[np.int64]]  # token ids and mask, (batch, longest)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Embedder(Protocol):
    def warm_up(self, texts: SearchWindows) -> None:
        """Whatever may be slow once, and the choice of the fastest setting."""

    def run(self) -> Vectors:
        """Of the texts that it was warmed up with, in their order."""
        ...

    def describe(self) -> Mapping[str, object]:
        """Version and settings, as they were chosen."""
        ...


def load(name: str, checkpoint: Path, folder: Path, threads: int) -> Embedder:
    """name: of EMBEDDERS; folder: for what is built or exported"""
    engine, _, precision = name.partition("-")
    if engine == "millrace":
        return Millrace(checkpoint, folder / name, precision, threads)
    opened = {"onnxruntime": open_onnxruntime, "openvino": open_openvino, "transformers": open_transformers}[engine]
    return Batched(opened(checkpoint, folder, precision, threads))


EMBEDDERS = ("millrace-fp32", "onnxruntime-fp32", "openvino-fp32", "millrace-bf16", "openvino-bf16")


class Millrace:
    """A built engine, tuned for this machine, at work as in `LLM.embed`: from token ids to vectors."""

    def __init__(self, checkpoint: Path, folder: Path, precision: str, threads: int) -> None:
        from millrace.compile.builder import build_engine
        from millrace.compile.settings import BuildSettings
        from millrace.compile.tune.tuner import Tuning, tune_folder
        from millrace.engine.artifact.engine import Engine
        from millrace.runtime.open_engine import open_encoder
        from millrace.runtime.settings import RunSettings

        settings = BuildSettings(precision=precision, tune=0)
        build_engine("encoder", checkpoint, folder, settings).close()
        tune_folder(folder, Tuning(TUNE_S, threads))
        self._opened = open_encoder("encoder", Engine.open(folder), RunSettings(threads=threads))
        self._loop = self._opened.loop()
        self._loop.start()

    def warm_up(self, texts: SearchWindows) -> None:
        self._texts = [np.array(ids, np.int32) for ids in texts]
        self.run()

    def run(self) -> Vectors:
        return self._loop.submit(self._texts).future.result()

    def describe(self) -> Mapping[str, object]:
        from millrace import __version__

        m = self._opened.engine.manifest
        return {
            "version": __version__, "isa": self._opened.isa, "step_tokens": m.max_step_tokens,
            "weights_bytes": m.cpu.weights_bytes,
        }  # fmt: skip


class Model(Protocol):
    """Settings that may be tried, and what one of them gives for each of some padded batches."""

    @property
    def settings(self) -> Sequence[str]: ...

    def vectors(self, setting: str, batches: Sequence[Rectangle]) -> list[Vectors]: ...

    def describe(self) -> Mapping[str, object]: ...


class Batched:
    """Batches of texts sorted by their lengths; made beforehand, so that padding costs no more than its arithmetic."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def warm_up(self, texts: SearchWindows) -> None:
        self._order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        self._batches = {n: [_padded([texts[i] for i in part]) for part in _cut(self._order, n)] for n in BATCHES}
        choices = [(setting, n) for setting in self._model.settings for n in BATCHES]
        self._chosen = fastest(choices, lambda choice: seconds(lambda: self._run(*choice)))

    def run(self) -> Vectors:
        together = self._run(*self._chosen)
        found = np.empty_like(together)
        found[self._order] = together
        return found

    def _run(self, setting: str, batch: int) -> Vectors:
        return np.concatenate(self._model.vectors(setting, self._batches[batch]))

    def describe(self) -> Mapping[str, object]:
        setting, batch = self._chosen
        return {**self._model.describe(), "chosen": setting, "batch": batch}


def _cut(order: Sequence[int], n: int) -> list[Sequence[int]]:
    return [order[at : at + n] for at in range(0, len(order), n)]


def _padded(texts: SearchWindows) -> Rectangle:
    longest = max(map(len, texts))
    mask = np.array([[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts], np.int64)
    return np.array([[*ids, *[0] * (longest - len(ids))] for ids in texts], np.int64), mask


def sentence_model(checkpoint: Path, attention: str) -> Any:
    """The checkpoint in PyTorch: (ids, mask) -> the normalised means of each row. attention: transformers' name"""
    import torch
    import transformers

    class Sentences(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = transformers.AutoModel.from_pretrained(
                checkpoint, dtype=torch.float32, attn_implementation=attention
            )

        def forward(self, ids: Any, mask: Any) -> Any:
            rows = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            kept = mask.unsqueeze(-1).to(rows.dtype)
            return torch.nn.functional.normalize((rows * kept).sum(1) / kept.sum(1), dim=1)

    return Sentences().eval()


def _example() -> Any:
    """With padding: without it, exporters leave the mask out."""
    import torch

    mask = torch.ones(3, 17, dtype=torch.int64)
    mask[1, 9:] = 0
    return torch.full((3, 17), 7), mask


Function = Callable[[Sequence[Rectangle]], list[Vectors]]


def one_by_one(run: Callable[[NDArray[np.int64], NDArray[np.int64]], Vectors]) -> Function:
    return lambda batches: [run(*batch) for batch in batches]


class Opened:
    """A `Model` of a few compiled functions, by what each setting is called."""

    def __init__(self, functions: Mapping[str, Function], told: Mapping[str, object]) -> None:
        self.settings, self._functions, self._told = tuple(functions), functions, told

    def vectors(self, setting: str, batches: Sequence[Rectangle]) -> list[Vectors]:
        return self._functions[setting](batches)

    def describe(self) -> Mapping[str, object]:
        return self._told


def open_onnxruntime(checkpoint: Path, folder: Path, precision: str, threads: int) -> Opened:
    """The exported graph as it is, and with what ONNX Runtime's own optimiser for BERT fuses."""
    import onnxruntime
    import torch
    from onnxruntime.transformers import optimizer

    plain, fused = folder / "encoder.onnx", folder / "encoder-fused.onnx"
    model = sentence_model(checkpoint, "eager")
    axes = {"ids": {0: "texts", 1: "tokens"}, "mask": {0: "texts", 1: "tokens"}, "vectors": {0: "texts"}}
    torch.onnx.export(
        model, _example(), str(plain), input_names=["ids", "mask"], output_names=["vectors"], dynamic_axes=axes,
        opset_version=17, dynamo=False,
    )  # fmt: skip
    c = model.encoder.config
    optimizer.optimize_model(
        str(plain), model_type="bert", num_heads=c.num_attention_heads, hidden_size=c.hidden_size, opt_level=0
    ).save_model_to_file(str(fused))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads

    def session(path: Path) -> Function:
        made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return one_by_one(lambda ids, mask: made.run(None, {"ids": ids, "mask": mask})[0])

    functions = {"as exported": session(plain), "fused by its optimiser for BERT": session(fused)}
    return Opened(functions, {"version": onnxruntime.__version__})


def open_openvino(checkpoint: Path, folder: Path, precision: str, threads: int) -> Opened:
    """Converted from PyTorch by itself, whose attention it knows.

    Settings: all cores for one batch, under both hints; a stream for each core, and as many batches side by side.
    """
    import openvino

    converted = openvino.convert_model(sentence_model(checkpoint, "sdpa"), example_input=_example())
    core, hint = openvino.Core(), {"fp32": "f32", "bf16": "bf16"}[precision]

    def compiled(goal: str, streams: int) -> Any:
        properties = {
            "INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": str(streams), "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": goal,
        }  # fmt: skip
        return core.compile_model(converted, "CPU", properties)

    def alone(goal: str) -> Function:
        request = compiled(goal, 1).create_infer_request()

        def run(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Vectors:
            request.infer([ids, mask], share_inputs=True)
            found: Vectors = request.get_output_tensor(0).data.copy()
            return found

        return one_by_one(run)

    def side_by_side() -> Function:
        jobs = openvino.AsyncInferQueue(compiled("THROUGHPUT", threads), threads)

        def run(batches: Sequence[Rectangle]) -> list[Vectors]:
            found: list[Vectors] = [np.empty(0, np.float32)] * len(batches)
            jobs.set_callback(lambda job, i: found.__setitem__(i, job.get_output_tensor(0).data.copy()))
            for i, batch in enumerate(batches):
                jobs.start_async([*batch], i, share_inputs=True)
            jobs.wait_all()
            return found

        return run

    functions = {"LATENCY": alone("LATENCY"), "THROUGHPUT": alone("THROUGHPUT"), "a stream a core": side_by_side()}
    return Opened(functions, {"version": openvino.__version__})


def open_transformers(checkpoint: Path, folder: Path, precision: str, threads: int) -> Opened:
    """What the others' vectors are compared with."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = sentence_model(checkpoint, "sdpa")

    def run(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Vectors:
        with torch.no_grad():
            found: Vectors = model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        return found

    return Opened({"sdpa": one_by_one(run)}, {"version": transformers.__version__})
