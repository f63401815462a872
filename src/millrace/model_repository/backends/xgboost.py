"""Backends `xgboost` and Triton's `fil`: XGBoost trees in the open formats `xgboost.json` and `xgboost.ubj`.

`input__0` holds the features (FP32, NaN if missing), `output__0` XGBoost's own prediction. FIL's parameters select a
class (`is_classifier` or `output_class`, with a binary `threshold`) or all probabilities (`predict_proba`). XGBoost's
old binary format and pickles are refused, and `xgboost_file_check.py` checks a file before XGBoost reads it. Each
instance has its own trees; they share the cores.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.framework_backend import (
    FrameworkBackend,
    FrameworkModel,
    ModelSignatures,
    Setting,
    TensorSignature,
    check_size,
    choice,
    column,
    column_signature,
    flag,
    framework_errors,
    import_package,
    n_threads,
    number,
    set_parameters,
)
from millrace.model_repository.backends.xgboost_file_check import check_model
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array

_WHO = "XGBoost"
_INPUT, _OUTPUT = "input__0", "output__0"
_TYPES = ("XGBOOST_JSON", "XGBOOST_UBJ")  # accepted values of FIL's model_type
_BINARY = ("binary:logistic",)
_MANY = ("multi:softmax", "multi:softprob")


class XgboostBackend(FrameworkBackend):
    def instance(self, context: InstanceContext) -> "_Trees":
        return _Trees(context)

    def signatures(self, config: ModelConfig, file: Path) -> ModelSignatures:
        return _sides(_load(file, 1), _PredictOptions(config))


class _PredictOptions:
    """Options from FIL's parameters. raises StatusError"""

    def __init__(self, config: ModelConfig) -> None:
        self.threads = n_threads(config)
        self.is_classifier = self.has_probabilities = False
        self.threshold = 0.5

        def sets(name: str, read: Any) -> Setting:
            return lambda key, text: setattr(self, name, read(config, key, text))

        def fraction(config: ModelConfig, key: str, text: str) -> float:
            try:
                return float(text)
            except ValueError:
                message = (
                    f"failed to parse parameter '{key}' of model '{config.name}': '{text:.40}', a number is expected"
                )
                raise invalid(message) from None

        set_parameters(config, {
            "model_type": sets("model_type", lambda c, key, text: choice(c, key, _type(c, text), _TYPES)),
            "output_class": sets("is_classifier", flag), "is_classifier": sets("is_classifier", flag),
            "predict_proba": sets("has_probabilities", flag), "threshold": sets("threshold", fraction),
            "intra_op_thread_count": sets("threads", number),
        })  # fmt: skip


def _type(config: ModelConfig, text: str) -> str:
    """Return a supported model_type. raises StatusError for FIL models outside of XGBoost's open formats"""
    if text.lower() == "xgboost":
        message = f"model type 'xgboost' of model '{config.name}' is XGBoost's old binary format, which is not read"
        raise StatusError(Code.UNSUPPORTED, f"{message}; save it with save_model('xgboost.ubj'), and say xgboost_ubj")
    if text.lower() in ("lightgbm", "treelite_checkpoint"):
        message = f"model type '{text.lower()}' of model '{config.name}' is not supported"
        raise StatusError(Code.UNSUPPORTED, f"{message}; models of XGBoost are, or the backend 'python' loads it")
    return text


class _Trees(FrameworkModel):
    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        config = self.inner
        self._options = _PredictOptions(config)
        self._booster = _load(context.file, self._options.threads)
        self._objective = _objective(self._booster)
        inputs, outputs = _sides(self._booster, self._options)
        outputs_by_name = {output.name: output for output in config.output}
        self.check(
            inputs,
            [column_signature(config, outputs_by_name[o.name], o) if o.name in outputs_by_name else o for o in outputs],
        )
        self._output_config = outputs_by_name[_OUTPUT]

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with framework_errors(_WHO):
            predictions = self._booster.inplace_predict(inputs[_INPUT], validate_features=False, strict_shape=True)
        return {_OUTPUT: column(self._select_output(predictions), self.config, self._output_config)}

    def _select_output(self, predictions: Array) -> Array:
        """Select classes or probabilities. predictions: (items, groups) -> (items,) or (items, classes)"""
        options = self._options
        if not options.is_classifier and not options.has_probabilities:
            return predictions[:, 0] if predictions.shape[1] == 1 else predictions
        if self._objective in _BINARY:
            chosen, both = predictions[:, 0] > options.threshold, np.concatenate([1 - predictions, predictions], axis=1)
        else:
            chosen, both = predictions.argmax(axis=1), predictions
        return both if options.has_probabilities else chosen.astype(np.float32)

    def close(self) -> None:
        del self._booster


def _load(file: Path, threads: int) -> Any:
    """Load trees. raises StatusError, also for other formats"""
    xgboost, failure_text = import_package("xgboost"), f"failed to load {file.parent.name}/{file.name}"
    if file.suffix not in (".json", ".ubj"):
        raise invalid(f"{failure_text}: a name in .json or .ubj is expected, as save_model writes them")
    check_size(file)
    check_model(file.read_bytes(), failure_text, is_json=file.suffix == ".json")
    booster = xgboost.Booster()
    with framework_errors(_WHO):
        booster.load_model(file)
        booster.set_param({"nthread": threads})
    return booster


def _objective(booster: Any) -> str:
    with framework_errors(_WHO):
        return str(json.loads(booster.save_config())["learner"]["objective"]["name"])


def _sides(booster: Any, options: _PredictOptions) -> ModelSignatures:
    """Return the signatures. raises StatusError if classes are requested of an objective without any"""
    objective = _objective(booster)
    if options.is_classifier or options.has_probabilities:
        if objective not in (*_BINARY, *_MANY):
            raise invalid(f"objective {objective} has no classes; they are asked of {', '.join((*_BINARY, *_MANY))}")
        if objective == "multi:softmax":  # same margins; softmax itself returns only classes
            booster.set_param({"objective": "multi:softprob"})
    n = booster.num_features()
    with framework_errors(_WHO):
        groups = booster.inplace_predict(
            np.zeros((1, n), np.float32), validate_features=False, strict_shape=True
        ).shape[1]
    n_classes = 2 if objective in _BINARY else groups
    width = n_classes if options.has_probabilities else 1 if options.is_classifier else groups
    dims = (-1,) if width == 1 else (-1, width)
    return [TensorSignature(_INPUT, "FP32", (-1, n))], [TensorSignature(_OUTPUT, "FP32", dims)]
