"""`sklearn`: an estimator or pipeline of scikit-learn, as skops writes it (`model.skops`): without pickle.

One input, a matrix of numbers or strings with a row for each item, or with `reshape { shape: [ ] }` a string for each;
an output for each method that the configuration names: `predict`, `predict_proba`, ... skops makes objects of types
that it trusts, those of scikit-learn, NumPy and SciPy that do nothing else; any other type in a file is refused by
name, unless the parameter `trusted_types` has it. Trees are such: scikit-learn follows the numbers in their nodes
wherever they lead. Each instance has an estimator of its own; they share out the cores.
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
    ModelSignature,
    Sides,
    check_size,
    column,
    column_signature,
    encoded,
    failing,
    n_threads,
    number,
    package,
    set_parameters,
    texts,
)
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.override_checks import TRUSTED
from millrace.model_repository.request.request_validation import wire_name
from millrace.model_repository.request.status_code import StatusError, invalid
from millrace.model_repository.request.tensors import BYTES, DTYPES, Array

_WHO = "scikit-learn"
_USUAL = ("predict", "predict_proba")  # what is completed, and for what predicts nothing the third
_METHODS = (*_USUAL, "transform", "predict_log_proba", "decision_function", "score_samples", "apply")
_KINDS = {np.dtype(dtype): kind for kind, dtype in DTYPES.items() if kind != BYTES}
log = logging.getLogger(__name__)


class SklearnBackend(FrameworkBackend):
    def instance(self, given: InstanceContext) -> "_Estimator":
        return _Estimator(given)

    def sides(self, config: ModelConfig, file: Path) -> Sides:
        """By what the estimator answers to a row of zeros."""
        estimator = _loaded(config, file)
        if not config.input and not hasattr(estimator, "n_features_in_"):
            what = f"model '{config.name}' must say its input in config.pbtxt: its estimator"
            raise invalid(f"{what}, {type(estimator).__name__}, does not know how many features it takes")
        has = [m for m in _METHODS if hasattr(estimator, m)]
        methods = [m for m in has if m in _USUAL] or has[:1]
        rows = _zeros(config) if config.input else np.zeros((1, estimator.n_features_in_))
        return [ModelSignature("input", "FP64", (-1, *rows.shape[1:]))], _told(estimator, rows, methods)


class _Estimator(FrameworkModel):
    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given)
        config = self.inner
        self._estimator = _loaded(config, given.file)
        self._share(config)
        if len(config.input) != 1:
            raise invalid(f"unable to load model '{config.name}', configuration expects {len(config.input)} inputs, "
                          "model provides 1")  # fmt: skip
        self._outputs = {said.name: said for said in config.output}
        has = [method for method in _METHODS if hasattr(self._estimator, method)]
        unknown = next((name for name in self._outputs if name not in has), None)
        if unknown is not None:
            raise invalid(f"unexpected inference output '{unknown}', allowed outputs are: {', '.join(has)}")
        self._compare(config)

    def _share(self, config: ModelConfig) -> None:
        """In its thread: OpenMP keeps a number for each; what an estimator begins itself (n_jobs) it is told."""
        threads = n_threads(config)

        def intra(key: str, text: str) -> None:
            nonlocal threads
            threads = number(config, key, text, least=1)

        set_parameters(config, {"intra_op_thread_count": intra, TRUSTED: lambda *_: None})
        with failing(_WHO):
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads, user_api="openmp")
            said = self._estimator.get_params() if hasattr(self._estimator, "get_params") else {}
            jobs = {key: threads for key in said if key == "n_jobs" or key.endswith("__n_jobs")}
            if jobs:
                self._estimator.set_params(**jobs)

    def _compare(self, config: ModelConfig) -> None:
        """With what it answers to zeros. raises StatusError"""
        rows = _zeros(config)
        n = getattr(self._estimator, "n_features_in_", None)
        (said,) = config.input
        kind = wire_name(said.data_type)
        dims = (-1,) * (rows.ndim - 1) + (n,) if n is not None and rows.ndim == 2 else None
        told = [ModelSignature(said.name, None, dims)]
        try:
            outputs = _told(self._estimator, rows, self._outputs)
        except StatusError as error:  # an estimator may take no zeros; then it is compared when it answers
            log.info("model '%s': no answer to %s of zeros: %s", config.name, kind, error)
            outputs = [ModelSignature(name, None, None) for name in self._outputs]
        self.check(told, [column_signature(config, self._outputs[t.name], t) for t in outputs])

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        ((name, rows),) = inputs.items()
        if rows.dtype == np.object_:
            rows = texts(name, rows)
        with failing(_WHO):
            found = {method: _array(getattr(self._estimator, method)(rows)) for method in self._outputs}
        for method, array in found.items():
            kind, said = _kind(array), self._outputs[method]
            if f"TYPE_{kind}" != said.data_type.name:
                what = f"configuration expects datatype {said.data_type.name} for output '{method}'"
                raise invalid(f"{what}, model provides TYPE_{kind}")
        return {name: column(encoded(array), self.config, self._outputs[name]) for name, array in found.items()}

    def close(self) -> None:
        del self._estimator


def _loaded(config: ModelConfig, file: Path) -> Any:
    """raises StatusError, also for types that skops does not trust"""
    package("sklearn")  # skops begins without it, and fails later
    io = package("skops.io", "sklearn")
    try:
        with ZipFile(file) as archive:
            entries = archive.infolist()
    except (OSError, BadZipFile) as error:
        raise invalid(f"failed to load {file.parent.name}/{file.name}: it is no file of skops: {error}") from None
    check_size(file, sum(entry.file_size for entry in entries))
    with failing("skops"):
        said = config.parameters[TRUSTED].string_value if TRUSTED in config.parameters else ""
        trusted = [name.strip() for name in said.split(",") if name.strip()]
        untrusted = sorted(set(io.get_untrusted_types(file=file)).difference(trusted))
        if untrusted:
            what = f"failed to load {file.parent.name}/{file.name}: it has types that are not trusted"
            mend = f"where you trust the file, parameter '{TRUSTED}' of config.pbtxt may have them"
            raise invalid(f"{what}: {', '.join(untrusted[:8])}; {mend}")
        return io.load(file, trusted=trusted)


def _zeros(config: ModelConfig) -> Array:
    """One item of the input as it is declared, -1 as 1; empty strings."""
    said, batch = config.input[0], [1] if config.max_batch_size > 0 else []
    dims = said.reshape.shape if said.reshape else said.dims
    shape = [*batch, *(1 if dim == -1 else dim for dim in dims)]
    kind = wire_name(said.data_type)
    return np.full(shape, "", np.object_) if kind == BYTES else np.zeros(shape, DTYPES[kind])


def _told(estimator: Any, rows: Array, methods: Sequence[str] | Mapping[str, object]) -> list[ModelSignature]:
    """raises StatusError where it takes no such rows"""
    found = []
    for method in methods:
        with failing(_WHO):
            array = _array(getattr(estimator, method)(rows))
        found.append(ModelSignature(method, _kind(array), (-1, *array.shape[1:]), str(array.dtype)))
    return found


def _array(found: Any) -> Array:
    """Sparse ones as a whole."""
    if isinstance(found, list) and found and isinstance(found[0], np.ndarray):
        raise invalid("the estimator answers with several arrays, one for each target, which is not supported")
    array: Array = np.asarray(found.toarray() if hasattr(found, "toarray") else found)
    return array


def _kind(array: Array) -> str:
    return "STRING" if array.dtype.kind in "OUS" else _KINDS.get(array.dtype, "")
