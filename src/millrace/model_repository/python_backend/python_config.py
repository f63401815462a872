"""Reads back the configuration that a model.py has completed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import DynamicBatching, ModelInput, ModelOutput, TransactionPolicy
from millrace.model_repository.config.model_config import ModelConfig as Config
from millrace.model_repository.request.status_code import invalid


def with_completion(config: Config, completion: Mapping[str, Any]) -> Config:
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
