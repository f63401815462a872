"""`pb_utils.ModelConfig`: the configuration that `auto_complete_config` receives and completes."""

import copy
from collections.abc import Mapping
from typing import Any

_INPUT = ("name", "data_type", "dims", "optional", "allow_ragged_batch")
_OUTPUT = ("name", "data_type", "dims")


class ModelConfig:
    """Argument and result of `auto_complete_config`. Values that contradict the file raise ValueError."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._model_config = dict(copy.deepcopy(config))

    def as_dict(self) -> dict[str, Any]:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        current = self._model_config["max_batch_size"]
        if current > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {current}, but in auto_complete_config function for model "
                f"'{self._model_config['name']}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        scheduler = next((s for s in ("sequence_batching", "ensemble_scheduling") if s in self._model_config), None)
        if scheduler is not None:
            raise ValueError(
                f"Configuration specified scheduling_choice as '{scheduler}', but auto_complete_config tries to set "
                "scheduling_choice as 'dynamic_batching'."
            )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, _INPUT)

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, _OUTPUT)

    def set_model_transaction_policy(self, policy: Mapping[str, Any]) -> None:
        if set(policy) != {"decoupled"}:
            raise ValueError(f"model transaction policy has {sorted(policy)}, where 'decoupled' is expected")
        current = self._model_config.get("model_transaction_policy")
        if current is not None and current["decoupled"] != policy["decoupled"]:
            raise ValueError("trying to change decoupled property, which the configuration sets")
        self._model_config["model_transaction_policy"] = dict(policy)

    def _add(self, side: str, tensor: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
        where = f"{side} '{tensor.get('name', '')}' in auto-complete-config function for model"
        where = f"{where} '{self._model_config['name']}'"
        unknown = [key for key in tensor if key not in allowed]
        if unknown:
            listed = ", ".join(f"'{key}'" for key in allowed)
            raise ValueError(f"{where} contains property other than {listed}: '{unknown[0]}'")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{where} is missing '{key}' property.")
        existing = next((t for t in self._model_config[side] if t["name"] == tensor["name"]), None)
        if existing is None:
            self._model_config[side].append(dict(tensor))
            return
        for key in ("data_type", "dims"):
            if existing[key] not in ("TYPE_INVALID", []) and existing[key] != _plain(tensor[key]):
                raise ValueError(f"{where} has {key} {tensor[key]}, and the configuration {existing[key]}")
            existing[key] = tensor[key]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
