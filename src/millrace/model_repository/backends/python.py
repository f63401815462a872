"""`python`: an unchanged model.py of Triton's Python backend, in this process or one of its own.

In this one each instance has a module of its own, as each has a process of its own in Triton. While a model is imported
its folders are on the path; what it imports of them is its own, so that two models may each have a `utils.py`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace.model_repository.backends.backend import Instance, InstanceContext, ModelBackend
from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.model_config import ModelConfig as Config
from millrace.model_repository.python_backend.python_config import completed_by
from millrace.model_repository.python_backend.python_host import InProcessRequest, ServerHost
from millrace.model_repository.python_backend.python_interpreter import python_of
from millrace.model_repository.python_backend.python_process import ChildModel, completed_in
from millrace.model_repository.python_backend.stub import model_runner
from millrace.model_repository.python_backend.stub.model_runner import GuestError, PythonModelRunner, RaisedByModelError
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError


class _PythonModel(Instance):
    answers_later = True  # by senders, from threads of its own

    def __init__(self, given: InstanceContext) -> None:
        self._host = ServerHost(given)
        try:
            self._model = PythonModelRunner(said_of(given), self._host)
        except GuestError as error:
            self._host.close()
            raise StatusError(Code.INTERNAL, str(error)) from error

    def execute(self, requests: Sequence[InferRequest]) -> None:
        try:
            self._model.execute([InProcessRequest(request) for request in requests])
        except GuestError as error:
            raise StatusError(Code.INTERNAL, str(error)) from error

    @property
    def is_independent(self) -> bool:  # type: ignore[override]
        return not self._host.has_asked

    def says_ready(self) -> Callable[[], bool] | None:
        return self._model.is_ready if self._model.has_say else None

    def close(self) -> None:
        try:
            self._model.close()
        finally:
            self._host.close()


def said_of(given: InstanceContext) -> RaisedByModelError:
    policy = given.config.model_transaction_policy
    arguments = {
        "model_config": json.dumps(config_json(given.config)),
        "model_instance_kind": given.group.kind.name.removeprefix("KIND_"),
        "model_instance_name": given.name,
        "model_instance_device_id": "0",
        "model_repository": str(given.folder),
        "model_version": str(given.version),
        "model_name": given.config.name,
    }
    return RaisedByModelError(
        given.file, arguments, [o.name for o in given.config.output], bool(policy and policy.decoupled)
    )


class PythonBackend(ModelBackend):
    takes_ragged = True  # a model gets requests, not arrays

    def instance(self, given: InstanceContext) -> Instance:
        python = python_of(given.config, given.folder)
        return _PythonModel(given) if python is None else ChildModel(python, said_of(given), given)

    def completed(self, config: Config, folder: Path) -> Config:
        """By the model's own `auto_complete_config`, which is asked of its highest version."""
        name = config.default_model_filename or "model.py"
        versions = sorted(
            (p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit() and (p / name).is_file()), key=_number
        )
        if not versions:
            return config
        try:
            python, file = python_of(config, folder), versions[-1] / name
            if python is None:
                made = model_runner.completed_by(file, config_json(config))
            else:
                made = completed_in(python, file, config_json(config), config.name)
            return config if made is None else completed_by(config, made)
        except GuestError as error:
            raise StatusError(Code.INTERNAL, str(error)) from error
        except (KeyError, TypeError, ValueError) as error:  # what a model may put into a dictionary
            what = f"auto_complete_config of model '{config.name}' made a configuration that cannot be read"
            raise StatusError(Code.INTERNAL, f"{what}: {model_runner.said(error)}") from error


def _number(folder: Path) -> int:
    return int(folder.name)
