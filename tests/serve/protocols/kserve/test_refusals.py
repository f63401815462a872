"""KServe over HTTP: the status and the words of each error; they are those of Triton's source and of its own tests."""

from typing import Any

import pytest

from tests.support.kserve import ID, infer, one

ADD = [one("INT32", [1, 16], [0] * 16), {**one("INT32", [1, 16], [0] * 16), "name": "INPUT1"}]
BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
JSON_ERRORS: list[tuple[str, Any, int, str]] = [
    ("gone", {}, 404, "Request for unknown model: 'gone' is not found"),
    ("simple/versions/2", {}, 404, "Request for unknown model: 'simple' version 2 is not found"),
    (
        "simple/versions/0",
        {},
        400,
        "failed to get model version from specified version string '0', version should be an integral value > 0",
    ),
    (
        f"simple/versions/{2**70}",
        {},
        400,
        f"failed to get model version from specified version string '{2**70}' (details:"
        " stol), version should be an integral value > 0",
    ),
    ("repeat_int32", {}, 501, "HTTP end point doesn't support models with decoupled transaction policy"),
    (
        "simple",
        {"inputs": ADD[:1]},
        400,
        ID + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) "
        "['INPUT0'], but missing required input(s) ['INPUT1']. Please provide all required input(s).",
    ),
    (
        "simple",
        {"id": "me", "inputs": []},
        400,
        "[request id: me] expected 2 inputs but got 0 inputs for model 'simple'. "
        "Got input(s) [], but missing required input(s) ['INPUT0','INPUT1']. Please provide all required input(s).",
    ),
    (
        "optional",
        {"inputs": []},
        400,
        ID + "expected number of inputs between 1 and 2 but got 0 inputs for model "
        "'optional'. Got input(s) [], but missing required input(s) ['INPUT1']. Please provide all required input(s).",
    ),
    (
        "optional",
        {"inputs": ADD[:1]},
        400,
        ID + "expected number of inputs between 1 and 2 but got 1 inputs for model "
        "'optional'. Got input(s) ['INPUT0'], but missing required input(s) ['INPUT1']. Please provide all required "
        "input(s).",
    ),
    ("simple", {"inputs": [ADD[0], ADD[0]]}, 400, ID + "input 'INPUT0' already exists in request"),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}]},
        400,
        "Duplicate output name 'OUTPUT0' is not allowed in a request",
    ),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "DUMMY"}]},
        400,
        ID + "unexpected inference output 'DUMMY' for model 'simple'",
    ),
    (
        "same_FP32",
        {"inputs": [{**one("FP32", [1, 1], [0]), "name": "X"}]},
        400,
        ID + "unexpected inference input 'X' for model 'same_FP32'",
    ),
    (
        "same_FP32",
        {"inputs": [one("INT32", [1, 1], [0])]},
        400,
        ID + "inference input 'INPUT0' data-type is 'INT32', but model 'same_FP32' expects 'FP32'",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [16], [0] * 16), {**one("INT32", [16], [0] * 16), "name": "INPUT1"}]},
        400,
        ID + "inference request batch-size must be <= 8 for 'simple'",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [1, 15], [0] * 15), ADD[1]]},
        400,
        ID + "unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,15]. " + BATCH_NOTE,
    ),
    (
        "strings",
        {"inputs": [one("BYTES", [1], ["a"])]},
        400,
        ID + "unexpected shape for input 'INPUT0' for model 'strings'. Expected [-1,-1], got [1]. ",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [], [0]), ADD[1]]},
        400,
        ID + "input 'INPUT0' has no shape but model requires batch dimension for 'simple'",
    ),
    (
        "simple",
        {"inputs": [one("INT32", [2, 16], [0] * 32), ADD[1]]},
        400,
        ID + "input 'INPUT1' batch size does not match other inputs for 'simple'",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [2**4, 2**60 + 2], [1])]},
        400,
        "invalid shape for input 'INPUT0': shape "
        f"[16,{2**60 + 2}] causes total element count to exceed maximum size of 9223372036854775807",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [2**2, 2**60 + 2], [1])]},
        400,
        "byte size overflow for input 'INPUT0': element "
        f"count ({2**62 + 8}) * data type size (4) exceeds maximum allowed size (9223372036854775807)",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [2, -5], [1])]},
        500,
        "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 2], [1])]},
        500,
        "Unable to parse 'data': Shape does not match true shape of 'data' field",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], ["a"])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-number as double",
    ),
    (
        "same_BOOL",
        {"inputs": [one("BOOL", [1, 1], [1])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
    ),
    (
        "same_UINT8",
        {"inputs": [one("UINT8", [1, 1], [-1])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "same_INT8",
        {"inputs": [one("INT8", [1, 1], [1.5])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer",
    ),
    (
        "strings",
        {"inputs": [one("BYTES", [1, 1], [1])]},
        500,
        "Unable to parse 'data': attempt to access JSON non-string as string",
    ),
    ("same_FP32", {"inputs": [one("FP33", [1, 1], [1])]}, 400, "invalid datatype for input INPUT0"),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1])]},
        400,
        "Input must set only one of the following fields: 'data', "
        "'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'. But no field is set",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], [1], parameters={"binary_data_size": 4})]},
        400,
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        "'shared_memory_region' in 'parameters'. But set 'data' 'binary_data_size'",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], parameters={"binary_data_size": 4})]},
        400,
        "unexpected size for input 'INPUT0', expecting 4 additional bytes for model 'same_FP32'",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], parameters={"shared_memory_region": "r"})]},
        501,
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
    ),
    (
        "same_FP32",
        {"inputs": [one("FP32", [1, 1], parameters={"binary_data_size": "4"})]},
        500,
        "Unable to parse 'binary_data_size': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    ("simple", {"id": 3, "inputs": ADD}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
    ("simple", {}, 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ("simple", {"inputs": 3}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
    (
        "simple",
        {"inputs": [{"shape": [], "datatype": ""}]},
        500,
        "Unable to parse 'name': attempt to access non-existing object member 'name'",
    ),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]},
        500,
        "Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean",
    ),
    (
        "simple",
        {"inputs": ADD, "outputs": [{"name": "OUTPUT0", "parameters": {"classification": -1}}]},
        500,
        "Unable to parse 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "simple",
        {"inputs": ADD, "parameters": {"priority": -1}},
        500,
        "Unable to parse 'priority': attempt to access JSON non-unsigned-integer as unsigned-integer",
    ),
    (
        "simple",
        {"inputs": ADD, "parameters": {"sequence_start": 1}},
        500,
        "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean",
    ),
    (
        "simple",
        {"inputs": ADD, "parameters": {"triton_x": 1}},
        400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    ("simple", {"inputs": ADD, "parameters": {"headers": 1}}, 400, "headers is reserved for Triton usage"),
    (
        "simple",
        {"inputs": ADD, "parameters": {"mine": [1]}},
        400,
        "parameter 'mine' has invalid type. It should be either 'int', 'bool', 'double', or 'string'.",
    ),
]


@pytest.mark.parametrize(("model", "body", "status", "says"), JSON_ERRORS)
def test_what_is_refused_in_tritons_words(url: str, model: str, body: Any, status: int, says: str) -> None:
    response = infer(url, model, body)
    assert (response.status_code, response.json()) == (status, {"error": says})
    assert response.headers["content-type"] == "application/json"
