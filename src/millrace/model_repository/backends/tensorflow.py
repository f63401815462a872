"""Backend `tensorflow`: SavedModels (`model.savedmodel/`) of TensorFlow on the CPU; an optional package.

Tensor names are those of the signature: `serving_default`, or the parameter `TF_SIGNATURE_DEF`. Each instance has its
own session and threads; they divide the cores unless `TF_NUM_INTRA_THREADS` is set. A SavedModel is a program of
TensorFlow operators; models with operators that call Python or access files are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignatures,
    TensorSignature,
    check_size,
    flag,
    framework_errors,
    import_package,
    n_threads,
    number,
    set_parameters,
)
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array

_WHO = "tensorflow"
_PROTO = "saved_model.pb"
_GRAPHDEF = "tensorflow_graphdef"
_MAX_GRAPH_BYTES = 2 << 30  # of protobuf
_TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32",
    "float64": "FP64", "string": "STRING",
}  # fmt: skip
# Variables and tables are restored by other operators (such as RestoreV2), which stay allowed.
_REFUSED = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "WriteFile", "ReadFile", "MatchingFiles"})


class TensorflowBackend(FrameworkBackend):
    takes_ragged = takes_batch_io = True

    def instance(self, context: InstanceContext) -> "_TensorFlowModel":
        return _TensorFlowModel(context)

    def complete_config(self, config: ModelConfig, folder: Path) -> ModelConfig:
        _refuse_graphdef(config)
        return super().complete_config(config, folder)

    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        return _sides(_signature(config, file, _SessionOptions(config)))


class _SessionOptions:
    """Options from Triton's parameters. raises StatusError"""

    def __init__(self, config: ModelConfig) -> None:
        self.intra, self.inter, self.tag, self.signature = n_threads(config), 1, "", ""

        def intra(key: str, text: str) -> None:
            self.intra = number(config, key, text)

        def inter(key: str, text: str) -> None:
            self.inter = number(config, key, text)

        def own(key: str, text: str) -> None:
            if not flag(config, key, text):
                message = f"parameter '{key}' of model '{config.name}' is not supported as false"
                raise StatusError(Code.UNSUPPORTED, f"{message}: each session has threads of its own")

        set_parameters(config, {
            "TF_NUM_INTRA_THREADS": intra, "TF_NUM_INTER_THREADS": inter, "TF_USE_PER_SESSION_THREADS": own,
            "TF_GRAPH_TAG": lambda _, text: setattr(self, "tag", text),
            "TF_SIGNATURE_DEF": lambda _, text: setattr(self, "signature", text),
        })  # fmt: skip


class _TensorFlowModel(FrameworkModel):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        config = self.inner
        _refuse_graphdef(config)
        session_options, tf = _SessionOptions(config), import_package("tensorflow").compat.v1
        signature = _signature(config, context.file, session_options)
        self.check(*_sides(signature))
        options = tf.ConfigProto(
            intra_op_parallelism_threads=session_options.intra, inter_op_parallelism_threads=session_options.inter,
            use_per_session_threads=True, device_count={"GPU": 0},
        )  # fmt: skip
        names = [o.name for o in config.output]
        with framework_errors(_WHO):
            graph = tf.Graph()
            self._session = tf.Session(graph=graph, config=options)
            with graph.as_default():
                tf.saved_model.load(self._session, signature.tags, str(context.file))
            self._feeds = {i.name: signature.inputs[i.name].name for i in config.input}
            self._outputs = {name: signature.outputs[name].name for name in names}

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with framework_errors(_WHO):
            results = self._session.run(self._outputs, {self._feeds[name]: array for name, array in inputs.items()})
        # TensorFlow returns scalars as Python values.
        return {
            name: np.asarray(value, np.object_) if isinstance(value, bytes) else np.asarray(value)
            for name, value in results.items()
        }

    def close(self) -> None:
        self._session.close()


def _refuse_graphdef(config: ModelConfig) -> None:
    if config.platform == _GRAPHDEF:
        message = f"platform '{_GRAPHDEF}' of model '{config.name}' is not supported"
        raise StatusError(Code.UNSUPPORTED, f"{message}: a graph says nothing of its inputs; save it as a SavedModel")


class _Signature:
    """A signature. inputs, outputs: TensorFlow's TensorInfo by name. tags: of its graph"""

    def __init__(self, graph: Any, name: str) -> None:
        self.tags = list(graph.meta_info_def.tags)
        self.inputs: Mapping[str, Any] = dict(graph.signature_def[name].inputs)
        self.outputs: Mapping[str, Any] = dict(graph.signature_def[name].outputs)


def _signature(config: ModelConfig, file: Path, options: _SessionOptions) -> _Signature:
    """Read the signature of a SavedModel. raises StatusError, also for refused operators"""
    import_package("tensorflow")
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    proto, failure_text = file / _PROTO, f"failed to load {file.parent.name}/{file.name}"
    if not proto.is_file():
        raise invalid(f"{failure_text}: it is no folder with a {_PROTO}")
    check_size(file)
    if proto.stat().st_size >= _MAX_GRAPH_BYTES:
        raise invalid(
            f"{failure_text}: {_PROTO} has {proto.stat().st_size} bytes, fewer than {_MAX_GRAPH_BYTES} are read"
        )
    with framework_errors(_WHO):
        graphs = SavedModel.FromString(proto.read_bytes()).meta_graphs
    graph = next((g for g in graphs if (options.tag or "serve") in g.meta_info_def.tags), None)
    if graph is None:
        tags = ", ".join(sorted({tag for g in graphs for tag in g.meta_info_def.tags})) or "none"
        raise invalid(f"{failure_text}: no graph has the tag '{options.tag or 'serve'}', there are {tags}")
    wrong = next((op for op in _operators(graph) if op in _REFUSED), None)
    if wrong is not None:
        raise invalid(f"{failure_text}: it has the operator {wrong}, which is about more than tensors")
    name = options.signature or "serving_default"
    if name not in graph.signature_def:
        available = ", ".join(sorted(n for n in graph.signature_def if not n.startswith("__"))) or "none"
        raise invalid(
            f"{failure_text}: it has no signature '{name}', there are {available}; TF_SIGNATURE_DEF names one"
        )
    return _Signature(graph, name)


def _operators(graph: Any) -> Iterator[str]:
    yield from (node.op for node in graph.graph_def.node)
    for function in graph.graph_def.library.function:
        yield from (node.op for node in function.node_def)


def _sides(signature: _Signature) -> ModelSignatures:
    return _tensor_signatures(signature.inputs), _tensor_signatures(signature.outputs)


def _tensor_signatures(tensors: Mapping[str, Any]) -> Sequence[TensorSignature]:
    dtypes = import_package("tensorflow").dtypes
    signatures = []
    for name, info in sorted(tensors.items()):
        kind, shape = dtypes.as_dtype(info.dtype).name, info.tensor_shape
        dims = None if shape.unknown_rank else tuple(d.size if d.size >= 0 else -1 for d in shape.dim)
        signatures.append(TensorSignature(name, _TYPES.get(kind, ""), dims, kind))
    return signatures
