"""A configuration as a model.py has completed it, read back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import DynamicBatching, ModelInput, ModelOutput, TransactionPolicy
from millrace.model_repository.config.model_config import ModelConfig as Config
from millrace.model_repository.request.status_code import invalid


def completed_by(config: Config, told: Mapping[str, Any]) -> Config:
    """config: as the file has it. told: what a model made of its JSON. raises StatusError"""
    if told == config_json(config):
        return config
    inputs = tuple(_tensor(empty(ModelInput), t, config.input) for t in told["input"])
    outputs = tuple(_tensor(empty(ModelOutput), t, config.output) for t in told["output"])
    config = replace(config, input=inputs, output=outputs, max_batch_size=int(told["max_batch_size"]))
    if "dynamic_batching" in told and config.dynamic_batching is None:
        sizes = (config.max_batch_size,) if config.max_batch_size else ()
        config = replace(config, dynamic_batching=replace(empty(DynamicBatching), preferred_batch_size=sizes))
    policy = told.get("model_transaction_policy")
    if policy is not None:
        made = replace(empty(TransactionPolicy), decoupled=bool(policy["decoupled"]))
        config = replace(config, model_transaction_policy=made)
    return config


def _tensor(nothing: Any, told: Mapping[str, Any], known: tuple[Any, ...]) -> Any:
    base = next((t for t in known if t.name == told["name"]), nothing)
    data_type = DataType.__members__.get(str(told["data_type"]))
    dims = told["dims"]
    if data_type is None or not isinstance(dims, list | tuple) or not all(isinstance(d, int) for d in dims):
        raise invalid(f"tensor '{told['name']}' has data_type {told['data_type']} and dims {dims}")
    more = {key: bool(told[key]) for key in ("optional", "allow_ragged_batch") if key in told and hasattr(base, key)}
    return replace(base, name=str(told["name"]), data_type=data_type, dims=tuple(dims), **more)
