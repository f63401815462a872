"""Backend `python`: unchanged model.py files of Triton's Python backend, in this process or in a stub process.

In this process, each instance has its own module, as each has its own process in Triton. A model's folders are on the
path while it is imported, and modules from them are private, so that two models may each have a `utils.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.model_repository.backends.backend import Instance, InstanceContext, ModelBackend
from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import DynamicBatching, ModelInput, ModelOutput, TransactionPolicy
from millrace.model_repository.config.model_config import ModelConfig as Config
from millrace.model_repository.python_backend.python_host import InProcessRequest, ServerHost
from millrace.model_repository.python_backend.python_interpreter import resolve_python
from millrace.model_repository.python_backend.python_process import StubInstance, auto_complete_in_child
from millrace.model_repository.python_backend.stub import model_runner
from millrace.model_repository.python_backend.stub.model_runner import (
    ModelDescription,
    PythonModelError,
    PythonModelRunner,
)
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError, invalid


class _PythonModel(Instance):
    responds_async = True  # response senders may answer from other threads

    def __init__(self, context: InstanceContext) -> None:
        self._host = ServerHost(context)
        try:
            self._model = PythonModelRunner(model_description(context), self._host)
        except PythonModelError as error:
            self._host.close()
            raise StatusError(Code.INTERNAL, str(error)) from error

    def execute(self, requests: Sequence[InferRequest]) -> None:
        try:
            self._model.execute([InProcessRequest(request) for request in requests])
        except PythonModelError as error:
            raise StatusError(Code.INTERNAL, str(error)) from error

    @property
    def is_independent(self) -> bool:  # type: ignore[override]
        return not self._host.has_called_models

    def readiness_check(self) -> Callable[[], bool] | None:
        return self._model.is_ready if self._model.reports_readiness else None

    def close(self) -> None:
        try:
            self._model.close()
        finally:
            self._host.close()


def model_description(context: InstanceContext) -> ModelDescription:
    policy = context.config.model_transaction_policy
    arguments = {
        "model_config": json.dumps(config_json(context.config)),
        "model_instance_kind": context.group.kind.name.removeprefix("KIND_"),
        "model_instance_name": context.name,
        "model_instance_device_id": "0",
        "model_repository": str(context.folder),
        "model_version": str(context.version),
        "model_name": context.config.name,
    }
    return ModelDescription(
        context.file, arguments, [o.name for o in context.config.output], bool(policy and policy.decoupled)
    )


class PythonBackend(ModelBackend):
    takes_ragged = True  # the model receives requests, not arrays

    def instance(self, context: InstanceContext) -> Instance:
        python = resolve_python(context.config, context.folder)
        return _PythonModel(context) if python is None else StubInstance(python, model_description(context), context)

    def complete_config(self, config: Config, folder: Path) -> Config:
        """Complete the configuration with `auto_complete_config` of the highest version."""
        name = config.default_model_filename or "model.py"
        versions = sorted(
            (p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit() and (p / name).is_file()), key=_number
        )
        if not versions:
            return config
        try:
            python, file = resolve_python(config, folder), versions[-1] / name
            if python is None:
                completed_config = model_runner.auto_complete(file, config_json(config))
            else:
                completed_config = auto_complete_in_child(python, file, config_json(config), config.name)
            return config if completed_config is None else _with_completion(config, completed_config)
        except PythonModelError as error:
            raise StatusError(Code.INTERNAL, str(error)) from error
        except (KeyError, TypeError, ValueError) as error:  # invalid values in the model's dictionary
            message = f"auto_complete_config of model '{config.name}' made a configuration that cannot be read"
            raise StatusError(Code.INTERNAL, f"{message}: {model_runner.error_text(error)}") from error


def _number(folder: Path) -> int:
    return int(folder.name)


def _with_completion(config: Config, completion: Mapping[str, Any]) -> Config:
    """Apply a completion. config: from the file. completion: its JSON as changed by the model. raises StatusError"""
    if completion == config_json(config):
        return config
    inputs = tuple(_tensor(empty(ModelInput), t, config.input) for t in completion["input"])
    outputs = tuple(_tensor(empty(ModelOutput), t, config.output) for t in completion["output"])
    config = replace(config, input=inputs, output=outputs, max_batch_size=int(completion["max_batch_size"]))
    if "dynamic_batching" in completion and config.dynamic_batching is None:
        sizes = (config.max_batch_size,) if config.max_batch_size else ()
        config = replace(config, dynamic_batching=replace(empty(DynamicBatching), preferred_batch_size=sizes))
    policy = completion.get("model_transaction_policy")
    if policy is not None:
        transaction_policy = replace(empty(TransactionPolicy), decoupled=bool(policy["decoupled"]))
        config = replace(config, model_transaction_policy=transaction_policy)
    return config


def _tensor(nothing: Any, tensor: Mapping[str, Any], declared: tuple[Any, ...]) -> Any:
    base = next((t for t in declared if t.name == tensor["name"]), nothing)
    data_type = DataType.__members__.get(str(tensor["data_type"]))
    dims = tensor["dims"]
    if data_type is None or not isinstance(dims, list | tuple) or not all(isinstance(d, int) for d in dims):
        raise invalid(f"tensor '{tensor['name']}' has data_type {tensor['data_type']} and dims {dims}")
    more = {
        key: bool(tensor[key]) for key in ("optional", "allow_ragged_batch") if key in tensor and hasattr(base, key)
    }
    return replace(base, name=str(tensor["name"]), data_type=data_type, dims=tuple(dims), **more)
