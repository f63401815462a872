"""`xgboost`, and `fil` as Triton's users have it: trees of XGBoost in its two open formats, `xgboost.json` and `.ubj`.

`input__0` are the features (FP32, NaN where one is missing), `output__0` what XGBoost itself predicts; FIL's parameters
ask for a class (`is_classifier` or `output_class`, with `threshold` of two) or for all probabilities (`predict_proba`).
XGBoost's old binary format and pickles are refused, and `xgboost_file_check.py` checks a file before XGBoost reads it.
Each instance has its own trees; they share the cores.
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
    ModelSignature,
    Setting,
    Sides,
    check_size,
    choice,
    column,
    column_signature,
    failing,
    flag,
    n_threads,
    number,
    package,
    set_parameters,
)
from millrace.model_repository.backends.xgboost_file_check import check_model
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import Array

_WHO = "XGBoost"
_INPUT, _OUTPUT = "input__0", "output__0"
_TYPES = ("XGBOOST_JSON", "XGBOOST_UBJ")  # of FIL's model_type; the others are refused
_BINARY = ("binary:logistic",)
_MANY = ("multi:softmax", "multi:softprob")


class XgboostBackend(FrameworkBackend):
    def instance(self, given: InstanceContext) -> "_Trees":
        return _Trees(given)

    def sides(self, config: ModelConfig, file: Path) -> Sides:
        return _sides(_loaded(file, 1), _PredictOptions(config))


class _PredictOptions:
    """What FIL's parameters say. raises StatusError"""

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
                what = f"failed to parse parameter '{key}' of model '{config.name}': '{text:.40}', a number is expected"
                raise invalid(what) from None

        set_parameters(config, {
            "model_type": sets("model_type", lambda c, key, text: choice(c, key, _type(c, text), _TYPES)),
            "output_class": sets("is_classifier", flag), "is_classifier": sets("is_classifier", flag),
            "predict_proba": sets("has_probabilities", flag), "threshold": sets("threshold", fraction),
            "intra_op_thread_count": sets("threads", number),
        })  # fmt: skip


def _type(config: ModelConfig, text: str) -> str:
    """raises StatusError for models of FIL that are none of XGBoost's open formats"""
    if text.lower() == "xgboost":
        what = f"model type 'xgboost' of model '{config.name}' is XGBoost's old binary format, which is not read"
        raise StatusError(Code.UNSUPPORTED, f"{what}; save it with save_model('xgboost.ubj'), and say xgboost_ubj")
    if text.lower() in ("lightgbm", "treelite_checkpoint"):
        what = f"model type '{text.lower()}' of model '{config.name}' is not supported"
        raise StatusError(Code.UNSUPPORTED, f"{what}; models of XGBoost are, or the backend 'python' loads it")
    return text


class _Trees(FrameworkModel):
    def __init__(self, given: InstanceContext) -> None:
        super().__init__(given)
        config = self.inner
        self._asked = _PredictOptions(config)
        self._booster = _loaded(given.file, self._asked.threads)
        self._objective = _objective(self._booster)
        inputs, outputs = _sides(self._booster, self._asked)
        said = {output.name: output for output in config.output}
        self.check(inputs, [column_signature(config, said[o.name], o) if o.name in said else o for o in outputs])
        self._said = said[_OUTPUT]

    def compute(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        with failing(_WHO):
            found = self._booster.inplace_predict(inputs[_INPUT], validate_features=False, strict_shape=True)
        return {_OUTPUT: column(self._shaped(found), self.config, self._said)}

    def _shaped(self, found: Array) -> Array:
        """found: (items, groups), probabilities where the parameters ask for classes -> (items,) or (items, classes)"""
        asked = self._asked
        if not asked.is_classifier and not asked.has_probabilities:
            return found[:, 0] if found.shape[1] == 1 else found
        if self._objective in _BINARY:
            chosen, both = found[:, 0] > asked.threshold, np.concatenate([1 - found, found], axis=1)
        else:
            chosen, both = found.argmax(axis=1), found
        return both if asked.has_probabilities else chosen.astype(np.float32)

    def close(self) -> None:
        del self._booster


def _loaded(file: Path, threads: int) -> Any:
    """raises StatusError, also for what is in neither of the open formats"""
    xgboost, named = package("xgboost"), f"failed to load {file.parent.name}/{file.name}"
    if file.suffix not in (".json", ".ubj"):
        raise invalid(f"{named}: a name in .json or .ubj is expected, as save_model writes them")
    check_size(file)
    check_model(file.read_bytes(), named, is_json=file.suffix == ".json")
    booster = xgboost.Booster()
    with failing(_WHO):
        booster.load_model(file)
        booster.set_param({"nthread": threads})
    return booster


def _objective(booster: Any) -> str:
    with failing(_WHO):
        return str(json.loads(booster.save_config())["learner"]["objective"]["name"])


def _sides(booster: Any, asked: _PredictOptions) -> Sides:
    """What it takes and gives. raises StatusError for classes of what has none"""
    objective = _objective(booster)
    if asked.is_classifier or asked.has_probabilities:
        if objective not in (*_BINARY, *_MANY):
            raise invalid(f"objective {objective} has no classes; they are asked of {', '.join((*_BINARY, *_MANY))}")
        if objective == "multi:softmax":  # the same margins; it would answer with classes alone
            booster.set_param({"objective": "multi:softprob"})
    n = booster.num_features()
    with failing(_WHO):
        groups = booster.inplace_predict(
            np.zeros((1, n), np.float32), validate_features=False, strict_shape=True
        ).shape[1]
    n_classes = 2 if objective in _BINARY else groups
    width = n_classes if asked.has_probabilities else 1 if asked.is_classifier else groups
    dims = (-1,) if width == 1 else (-1, width)
    return [ModelSignature(_INPUT, "FP32", (-1, n))], [ModelSignature(_OUTPUT, "FP32", dims)]
