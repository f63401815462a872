"""Trace and log settings that clients read and change while the server runs, the same over both protocols.

Values have the types of JSON; `grpc/calls.py` converts its messages. Texts are Triton's.
"""

from collections.abc import Mapping
from typing import Any

from millrace.errors import nearest
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.lifecycle.log_settings import FORMATS, LogSettings
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.tracing.trace_flags import NUMBERS, parse_level, parse_number
from millrace.model_repository.tracing.trace_settings import FIELDS

_LOG_TYPES: dict[str, type] = {"log_info": bool, "log_warning": bool, "log_error": bool, "log_verbose_level": int,
                               "log_format": str}  # fmt: skip
_MAX_VERBOSE = 2**31 - 1


def trace(repository: ModelRepository, model: str, change: Mapping[str, Any] | None, owner: str = "") -> dict[str, Any]:
    """Return the settings of a model, or of the server, after the change. owner: as `log` has it. raises StatusError"""
    _check_owner(change, owner)
    if model:
        try:
            repository.get(model)
        except StatusError:
            raise invalid(f"Request for unknown model : {model}") from None
    tracer = repository.common.tracer
    if change:
        tracer.change(_trace_change(change, least_rate=1 if tracer.spans is None else 0), model)
    return tracer.settings_dict(model)


def _trace_change(values: Mapping[str, Any], least_rate: int) -> dict[str, Any]:
    """Parse a change of trace settings; None resets a setting. raises StatusError"""
    change: dict[str, Any] = {}
    for name, value in values.items():
        if name == "trace_file":
            what = "trace file location can not be updated through network protocol"
            raise StatusError(Code.UNSUPPORTED, what)
        if name not in FIELDS:
            raise invalid(f"unknown trace setting '{name:.80}'; {nearest(name, FIELDS)}")
        if value is None:
            change[name] = None
        elif name in NUMBERS:
            if not isinstance(value, str):
                raise StatusError(
                    Code.INTERNAL, f"Unable to parse '{name}': attempt to access JSON non-string as string"
                )
            change[name] = parse_number(name, value, least_rate if name == "trace_rate" else None)
        else:
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise StatusError(Code.INTERNAL, f"Unable to parse '{name}': attempt to access JSON non-array as array")
            change[name] = parse_level(value)
    return change


def _check_owner(change: Mapping[str, Any] | None, owner: str) -> None:
    """raises StatusError"""
    if change and owner:
        what = "these settings hold for all API keys, so that this one cannot change them"
        raise invalid(f"{what}: a key with role=admin can")


def log(switches: LogSettings, change: Mapping[str, Any] | None, owner: str = "") -> dict[str, Any]:
    """Return the settings after the change.

    owner: the API key that asks, if there are several and it is no admin's. raises StatusError
    """
    _check_owner(change, owner)
    for name, value in (change or {}).items():
        if name == "log_file":
            what = "log file location can not be updated through network protocol"
            raise StatusError(Code.UNSUPPORTED, what)
        value_type = _LOG_TYPES.get(name)
        if value_type is None:
            raise invalid(f"unknown log setting '{name:.80}'; {nearest(name, _LOG_TYPES)}")
        if not isinstance(value, value_type) or (value_type is int and not _fits(value)):
            word = {bool: "boolean", int: "unsigned-integer", str: "string"}[value_type]
            what = f"Unable to parse '{name}': attempt to access JSON non-{word} as {word}"
            raise StatusError(Code.INTERNAL, what)
        if name == "log_format" and value not in FORMATS:
            raise invalid(f"invalid argument for log_format, got: {value:.40}; expected: {' or '.join(FORMATS)}")
    if change:
        switches.change(change)
    return dict(switches.to_dict())


def _fits(value: Any) -> bool:
    return not isinstance(value, bool) and 0 <= value <= _MAX_VERBOSE
