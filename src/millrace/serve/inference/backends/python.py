"""`python`: an unchanged model.py of Triton's Python backend, in this process.

Each instance has a module of its own, as each has a process of its own in Triton. While a model is imported its folders
are on the path; what it imports of them is its own, so that two models may each have a `utils.py`.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.serve.inference.backend import Instance, InstanceGiven, ModelBackend
from millrace.serve.inference.backends import python_utils
from millrace.serve.inference.backends.importing import imported
from millrace.serve.inference.backends.python_config import ModelConfig, completed_by
from millrace.serve.inference.backends.python_utils import InferenceRequest, InferenceResponse, deliver
from millrace.serve.inference.instances import told
from millrace.serve.inference.request import InferRequest
from millrace.serve.inference.status import Code, StatusError
from millrace.serve.repository.config import ModelConfig as Config
from millrace.serve.repository.config_json import config_json

_CLASS = "TritonPythonModel"
_GIVEN = {"triton_python_backend_utils": python_utils, "c_python_backend_utils": python_utils}


def _model_class(file: Path) -> Any:
    found = getattr(imported(file, _GIVEN), _CLASS, None)
    if found is None:
        raise StatusError(Code.INTERNAL, f"{file.name} has no class {_CLASS}")
    return found


class _PythonModel(Instance):
    answers_later = True  # by senders, from threads of its own

    def __init__(self, given: InstanceGiven) -> None:
        config = given.config
        self._name, self._outputs = given.name, [o.name for o in config.output]
        self._is_decoupled = bool(config.model_transaction_policy and config.model_transaction_policy.decoupled)
        self._loop: asyncio.AbstractEventLoop | None = None  # of a model whose `execute` is async
        self._module_name = ""
        try:
            self._model = _model_class(given.file)()
            self._module_name = type(self._model).__module__
            if hasattr(self._model, "initialize"):
                self._model.initialize(_arguments(given))
            if not hasattr(self._model, "execute"):
                raise StatusError(Code.INTERNAL, f"{_CLASS} of model '{config.name}' has no function execute")
        except BaseException as error:  # sys.exit, too
            sys.modules.pop(self._module_name, None)
            if isinstance(error, StatusError):
                raise
            raise StatusError(Code.INTERNAL, _told(error, given.file)) from error
        self._file = given.file

    def execute(self, requests: Sequence[InferRequest]) -> None:
        asked = [InferenceRequest(request, self._outputs) for request in requests]
        try:
            answers = self._model.execute(asked)
            if inspect.iscoroutine(answers):
                self._loop = self._loop or asyncio.new_event_loop()
                answers = self._loop.run_until_complete(answers)
            self._answer(requests, asked, answers)
        except BaseException as error:  # sys.exit, too
            for one in asked:
                one.answered()
            what = f"Failed to process the request(s) for model instance '{self._name}', message: "
            raise StatusError(Code.INTERNAL, what + _told(error, self._file)) from error

    def _answer(self, requests: Sequence[InferRequest], asked: Sequence[InferenceRequest], answers: Any) -> None:
        if self._is_decoupled:
            if answers is not None:
                raise python_utils.TritonModelException(
                    f"Python model '{self._name}' is using the decoupled mode and the execute function must return "
                    "None."
                )
            return
        if answers is None and all(one.has_sender for one in asked):
            return
        if not isinstance(answers, list | tuple):
            raise python_utils.TritonModelException(
                f"Expected a list in the execute return, found type '{type(answers).__name__}'."
            )
        if len(answers) != len(requests):
            raise python_utils.TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}"
            )
        for request, one, answer in zip(requests, asked, answers, strict=True):
            if isinstance(answer, InferenceResponse):
                deliver(request, answer, True)
                one.answered()
            elif answer is not None or not one.has_sender:
                raise python_utils.TritonModelException(
                    f"Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(answer).__name__}'."
                )

    def close(self) -> None:
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            if self._loop is not None:
                self._loop.close()
            sys.modules.pop(self._module_name, None)


def _arguments(given: InstanceGiven) -> dict[str, str]:
    return {
        "model_config": json.dumps(config_json(given.config)),
        "model_instance_kind": given.group.kind.name.removeprefix("KIND_"),
        "model_instance_name": given.name,
        "model_instance_device_id": "0",
        "model_repository": str(given.folder),
        "model_version": str(given.version),
        "model_name": given.config.name,
    }


def _told(error: BaseException, file: Path) -> str:
    """With the last line of the model's own that it came through; not the folder, which is nobody's business."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(file.parent.parent))]
    at = f"; at {Path(lines[-1].filename).name}({lines[-1].lineno}): {lines[-1].name}" if lines else ""
    return told(error) + at


class PythonBackend(ModelBackend):
    takes_ragged = True  # a model gets requests, not arrays

    def instance(self, given: InstanceGiven) -> Instance:
        return _PythonModel(given)

    def completed(self, config: Config, folder: Path) -> Config:
        """By the model's own `auto_complete_config`, which is asked of its highest version."""
        name = config.default_model_filename or "model.py"
        versions = sorted(
            (p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit() and (p / name).is_file()), key=_number
        )
        if not versions:
            return config
        file = versions[-1] / name
        try:
            found = _model_class(file)
            sys.modules.pop(found.__module__, None)
            if not hasattr(found, "auto_complete_config"):
                return config
            made = found.auto_complete_config(ModelConfig(config_json(config)))
            if not isinstance(made, ModelConfig):
                what = f"auto_complete_config of model '{config.name}' must return a ModelConfig"
                raise StatusError(Code.INTERNAL, what)
            return completed_by(config, made.as_dict())
        except BaseException as error:  # sys.exit, too
            if isinstance(error, StatusError):
                raise
            raise StatusError(Code.INTERNAL, _told(error, file)) from error


def _number(folder: Path) -> int:
    return int(folder.name)
