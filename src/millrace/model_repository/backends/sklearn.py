"""Backend `sklearn`: scikit-learn estimators and pipelines in skops files (`model.skops`), without pickle.

The input is a matrix of numbers or strings with one row per item or, with `reshape { shape: [ ] }`, one string per
item. Each output is named after a method: `predict`, `predict_proba`, ... skops creates only objects of trusted types
of scikit-learn, NumPy and SciPy; a file with any other type is refused, unless parameter `trusted_types` lists it.
Trees are not trusted by default, because scikit-learn follows their node indices unchecked. Each instance has its own
estimator; they divide the cores.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignatures,
    TensorSignature,
    check_size,
    column,
    column_signature,
    decode_texts,
    encode_texts,
    framework_errors,
    import_package,
    n_threads,
    number,
    set_parameters,
)
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.override_checks import TRUSTED
from millrace.model_repository.request.request_validation import wire_name
from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import BYTES, DTYPES, Array

_WHO = "scikit-learn"
_USUAL = ("predict", "predict_proba")  # outputs added by completion; the next method for estimators without them
_METHODS = (*_USUAL, "transform", "predict_log_proba", "decision_function", "score_samples", "apply")
_KINDS = {np.dtype(dtype): kind for kind, dtype in DTYPES.items() if kind != BYTES}
log = logging.getLogger(__name__)


class SklearnBackend(FrameworkBackend):
    def instance(self, context: InstanceContext) -> "_Estimator":
        return _Estimator(context)

    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        """Determine the signatures by computing a row of zeros."""
        estimator = _load(config, file)
        if not config.input and not hasattr(estimator, "n_features_in_"):
            message = f"model '{config.name}' must say its input in config.pbtxt: its estimator"
            raise invalid(f"{message}, {type(estimator).__name__}, does not know how many features it takes")
        has = [m for m in _METHODS if hasattr(estimator, m)]
        methods = [m for m in has if m in _USUAL] or has[:1]
        rows = _zeros(config) if config.input else np.zeros((1, estimator.n_features_in_))
        return [TensorSignature("input", "FP64", (-1, *rows.shape[1:]))], _output_signatures(estimator, rows, methods)


class _Estimator(FrameworkModel):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        config = self.inner
        self._estimator = _load(config, context.file)
        self._share(config)
        if len(config.input) != 1:
            raise invalid(f"unable to load model '{config.name}', configuration expects {len(config.input)} inputs, "
                          "model provides 1")  # fmt: skip
        self._outputs = {output.name: output for output in config.output}
        has = [method for method in _METHODS if hasattr(self._estimator, method)]
        unknown = next((name for name in self._outputs if name not in has), None)
        if unknown is not None:
            raise invalid(f"unexpected inference output '{unknown}', allowed outputs are: {', '.join(has)}")
        self._compare(config)

    def _share(self, config: ModelConfig) -> None:
        """Set thread counts in the instance's thread, because OpenMP's are per thread, and the estimator's n_jobs."""
        threads = n_threads(config)

        def intra(key: str, text: str) -> None:
            nonlocal threads
            threads = number(config, key, text, min_value=1)

        set_parameters(config, {"intra_op_thread_count": intra, TRUSTED: lambda *_: None})
        with framework_errors(_WHO):
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads, user_api="openmp")
            parameters = self._estimator.get_params() if hasattr(self._estimator, "get_params") else {}
            jobs = {key: threads for key in parameters if key == "n_jobs" or key.endswith("__n_jobs")}
            if jobs:
                self._estimator.set_params(**jobs)

    def _compare(self, config: ModelConfig) -> None:
        """Compare the configuration with the outputs for zeros. raises StatusError"""
        rows = _zeros(config)
        n = getattr(self._estimator, "n_features_in_", None)
        (declared,) = config.input
        kind = wire_name(declared.data_type)
        dims = (-1,) * (rows.ndim - 1) + (n,) if n is not None and rows.ndim == 2 else None
        input_signatures = [TensorSignature(declared.name, None, dims)]
        try:
            outputs = _output_signatures(self._estimator, rows, self._outputs)
        except StatusError as error:  # an estimator may reject zeros; outputs are then checked per request
            log.info("model '%s': no answer to %s of zeros: %s", config.name, kind, error)
            outputs = [TensorSignature(name, None, None) for name in self._outputs]
        self.check(input_signatures, [column_signature(config, self._outputs[t.name], t) for t in outputs])

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        ((name, rows),) = inputs.items()
        if rows.dtype == np.object_:
            rows = decode_texts(name, rows)
        with framework_errors(_WHO):
            results = {method: _array(getattr(self._estimator, method)(rows)) for method in self._outputs}
        for method, array in results.items():
            kind, output = _kind(array), self._outputs[method]
            if f"TYPE_{kind}" != output.data_type.name:
                message = f"configuration expects datatype {output.data_type.name} for output '{method}'"
                raise invalid(f"{message}, model provides TYPE_{kind}")
        return {name: column(encode_texts(array), self.config, self._outputs[name]) for name, array in results.items()}

    def close(self) -> None:
        del self._estimator


def _load(config: ModelConfig, file: Path) -> Any:
    """Load an estimator. raises StatusError, also for untrusted types"""
    import_package("sklearn")  # skops imports without it, but fails later
    io = import_package("skops.io", "sklearn")
    try:
        with ZipFile(file) as archive:
            entries = archive.infolist()
    except (OSError, BadZipFile) as error:
        raise invalid(f"failed to load {file.parent.name}/{file.name}: it is no file of skops: {error}") from None
    check_size(file, sum(entry.file_size for entry in entries))
    with framework_errors("skops"):
        trusted_types = config.parameters[TRUSTED].string_value if TRUSTED in config.parameters else ""
        trusted = [name.strip() for name in trusted_types.split(",") if name.strip()]
        untrusted = sorted(set(io.get_untrusted_types(file=file)).difference(trusted))
        if untrusted:
            message = f"failed to load {file.parent.name}/{file.name}: it has types that are not trusted"
            fix = f"where you trust the file, parameter '{TRUSTED}' of config.pbtxt may have them"
            raise invalid(f"{message}: {', '.join(untrusted[:8])}; {fix}")
        return io.load(file, trusted=trusted)


def _zeros(config: ModelConfig) -> Array:
    """Return one item of the declared input: zeros or empty strings, with variable dims of 1."""
    tensor, batch = config.input[0], [1] if config.max_batch_size > 0 else []
    dims = tensor.reshape.shape if tensor.reshape else tensor.dims
    shape = [*batch, *(1 if dim == -1 else dim for dim in dims)]
    kind = wire_name(tensor.data_type)
    return np.full(shape, "", np.object_) if kind == BYTES else np.zeros(shape, DTYPES[kind])


def _output_signatures(
    estimator: Any, rows: Array, methods: Sequence[str] | Mapping[str, object]
) -> list[TensorSignature]:
    """Return the signatures of outputs for these rows. raises StatusError if the estimator rejects them"""
    signatures = []
    for method in methods:
        with framework_errors(_WHO):
            array = _array(getattr(estimator, method)(rows))
        signatures.append(TensorSignature(method, _kind(array), (-1, *array.shape[1:]), str(array.dtype)))
    return signatures


def _array(result: Any) -> Array:
    """Convert a result to a dense array."""
    if isinstance(result, list) and result and isinstance(result[0], np.ndarray):
        raise invalid("the estimator answers with several arrays, one for each target, which is not supported")
    array: Array = np.asarray(result.toarray() if hasattr(result, "toarray") else result)
    return array


def _kind(array: Array) -> str:
    return "STRING" if array.dtype.kind in "OUS" else _KINDS.get(array.dtype, "")
