"""Fields of requests over both protocols: versions, parameters, outputs, load requests.

The error texts of wrong types differ by protocol, so callers pass a function that creates them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millrace.errors import nearest
from millrace.model_repository.lifecycle.load_override import PREFIX
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.serve.http.json_scan import count_values
from millrace.serve.protocols.kserve.http.json_values import no_json

SHARED_OFF = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
NO_CUDA = "cuda shared memory is not supported: tensor models run on the CPU here"
NO_REPOSITORY_NAME = "'repository_name' specification is not supported"
MAX_CONTROL_BYTES = 1 << 20  # of a request that reads or changes settings
_MAX_VALUES = 1 << 16
# Of a parameter, by its name, and what it should have been: "id", "boolean", "string", "count", "natural" (the range of
# a count), "any" (of those that are the model's own)
Wrong = Callable[[str, str], StatusError]


def cuda_regions(action: str, name: str) -> list[Any] | None:
    """Return the regions of CUDA shared memory: none, as in a Triton without GPUs; None for an empty response.

    Clients begin with unregistering all regions. action: status, register or unregister. raises StatusError
    """
    if action == "register":
        raise StatusError(Code.UNSUPPORTED, NO_CUDA)
    if action == "status" and name:
        raise StatusError(Code.NOT_FOUND, f"Unable to find cuda shared memory region: '{name}'")
    return [] if action == "status" else None


def region_fields(region: str, body: dict[str, Any]) -> tuple[str, int, int]:
    """Return key, offset and byte size of a shared-memory region to be registered over HTTP. raises StatusError"""
    if not region:
        raise invalid("'region name' is necessary to register system shared memory region")
    for member in ("key", "byte_size"):
        if member not in body:
            raise invalid(f"Shared memory register request has no '{member}' field")
    key, offset, size = body["key"], body.get("offset", 0), body["byte_size"]
    if not isinstance(key, str):
        raise StatusError(Code.INTERNAL, "attempt to access JSON non-string as string")
    for number in (offset, size):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise StatusError(Code.INTERNAL, "attempt to access JSON non-unsigned-integer as unsigned-integer")
    return key, offset, size


def version_of(text: str) -> int:
    """Parse a model version. raises StatusError"""
    what = f"failed to get model version from specified version string '{text}'"
    expected = "version should be an integral value > 0"
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or int(text) >= 2**63:
        raise invalid(f"{what} (details: stol), {expected}")
    if int(text) == 0:
        raise invalid(f"{what}, {expected}")
    return int(text)


def take_parameter(request: InferRequest, key: str, value: Any, wrong: Wrong) -> None:
    """Take a parameter that both protocols have, or one of the model's own. raises StatusError"""
    if key == "sequence_id":
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise wrong(key, "id")
        request.correlation_id = value
    elif key in ("sequence_start", "sequence_end"):
        if not isinstance(value, bool):
            raise wrong(key, "boolean")
        if value:
            request.flags |= 1 if key == "sequence_start" else 2
    elif key in ("priority", "timeout"):
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(key, "count")
        if not 0 <= value < 2**64:
            raise wrong(key, "natural")
        setattr(request, "priority" if key == "priority" else "timeout_us", value)
    elif isinstance(value, bool | float | str) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        request.parameters[key] = value
    else:
        raise wrong(key, "any")


def output_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of requested outputs. raises StatusError if one occurs twice"""
    unique: dict[str, None] = {}
    for name in names:
        if name in unique:
            raise invalid(f"Duplicate output name '{name}' is not allowed in a request")
        unique[name] = None
    return tuple(unique)


@dataclass(slots=True)
class LoadRequest:
    """A load request. config, files: as in `ModelRepository.load`; dry_run: report what would change, load nothing"""

    config: dict[str, Any] | None = None
    files: dict[str, bytes | str] = field(default_factory=dict)
    dry_run: bool = False


def load_of(model: str, parameters: Mapping[str, Any], wrong: Wrong, file_type: type[bytes] | type[str]) -> LoadRequest:
    """Parse the parameters of a load request. file_type: the protocol's type of files, bytes or base64 in a string

    raises StatusError
    """
    load = LoadRequest()
    for key, value in parameters.items():
        if key.startswith(PREFIX):
            if not isinstance(value, file_type):
                raise wrong(key, "file")
            load.files[key.removeprefix(PREFIX)] = value
        elif key == "config":
            if not isinstance(value, str):
                raise wrong(key, "string")
            try:
                load.config = json_object(value.encode("utf-8", "surrogatepass"))
            except StatusError as error:
                raise StatusError(error.code, f"failed to load '{model:.80}', its config: {error}") from None
        elif key == "dry_run":
            if not isinstance(value, bool):
                raise wrong(key, "boolean")
            load.dry_run = value
        else:
            names = ("config", "dry_run", f"{PREFIX}VERSION/NAME")
            raise invalid(f"unrecognized load parameter '{key:.80}'; {nearest(key, names)}")
    if load.dry_run and load.files:
        raise StatusError(Code.UNSUPPORTED, "a dry run takes no files: it says what the repository's would change")
    return load


def unloads_members(parameters: Mapping[str, Any], wrong: Wrong) -> bool:
    """Return whether an unload request includes the members of an ensemble. raises StatusError"""
    value = parameters.get("unload_dependents", False)
    if not isinstance(value, bool):
        raise wrong("unload_dependents", "boolean")
    return value


def json_object(body: bytes, max_bytes: int = MAX_CONTROL_BYTES) -> dict[str, Any]:
    """Decode a body that is not an inference and may be empty. raises StatusError"""
    if not body:
        return {}
    if len(body) > max_bytes:
        raise invalid(f"the request JSON has {len(body)} bytes, at most {max_bytes} are supported here")
    if (n := count_values(body).values) > _MAX_VALUES:
        raise invalid(f"the request JSON has {n} values, at most {_MAX_VALUES} are supported here")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise no_json(error) from None
    if not isinstance(value, dict):
        raise StatusError(Code.INTERNAL, "attempt to access JSON non-object as object")
    return value
