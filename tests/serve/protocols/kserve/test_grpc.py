"""KServe over gRPC: every call, tensors of every datatype both ways, and each error's code and words.

Bytes are packed by `struct` here; the words are those of Triton's source and of its own tests.
"""

import struct
from typing import Any

import grpc
import pytest

from millrace.serve.protocols.kserve.grpc.infer import set_parameter
from millrace.serve.protocols.kserve.grpc.protobuf_messages import CONTENTS, message
from tests.support.kserve import ID, KINDS
from tests.support.kserve import infer as infer_over_http
from tests.support.kserve_grpc import Client, one, refusal, request

HEALTH = "/grpc.health.v1.Health/"
PAIR = [one("INT32", [1, 16]), one("INT32", [1, 16], "INPUT1")]


def plain(told: Any) -> dict[str, Any]:
    """What is set of a message."""
    return {
        field.name: [plain(v) if hasattr(v, "ListFields") else v for v in value]
        if field.is_repeated
        else plain(value)
        if hasattr(value, "ListFields")
        else value
        for field, value in told.ListFields()
    }


def test_health_and_metadata(client: Client) -> None:
    assert client.call("ServerLive").live and client.call("ServerReady").ready
    for version in ("", "1"):
        assert client.call("ModelReady", name="simple", version=version).ready
    assert not client.call("ModelReady", name="gone").ready
    assert not client.call("ModelReady", name="simple", version="2").ready
    for service in ("", "inference.GRPCInferenceService"):
        assert client.call("Check", service=HEALTH).status == 1, service
    with pytest.raises(grpc.RpcError, match="unknown service 'other'"):
        client.channel.unary_unary(f"{HEALTH}Check")(message("HealthCheckRequest")(service="other").SerializeToString())
    assert plain(client.call("ServerMetadata")) == {
        "name": "triton",
        "version": "2.73.0",
        "extensions": [
            "classification", "sequence", "sequence(string_id)", "model_repository",
            "model_repository(unload_dependents)", "schedule_policy",
            "model_configuration", "binary_tensor_data", "parameters", "statistics",
            "trace",
            "logging",
        ],
    }  # fmt: skip
    assert plain(client.call("ModelMetadata", name="one")) == {
        "name": "one",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "INPUT0", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "BYTES", "shape": [1]}],
    }
    assert client.call("ModelMetadata", name="simple").inputs[0].shape == [-1, 16]
    config = client.call("ModelConfig", name="repeat_int32").config
    assert config.model_transaction_policy.decoupled and config.input[2].data_type == 4 and config.input[2].dims == [1]
    assert config.version_policy.HasField("latest") and not config.HasField("dynamic_batching")
    assert (config.instance_group[0].kind, config.instance_group[0].count) == (2, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_datatype_raw_and_typed(client: Client, kind: str) -> None:
    code, values = KINDS[kind]
    raw = struct.pack(f"<2{code}", *values)
    told = client.infer(f"same_{kind}", [one(kind, [1, 2])], [raw], id="7")
    assert (told.model_name, told.model_version, told.id) == (f"same_{kind}", "1", "7")
    assert [(o.name, o.datatype, list(o.shape)) for o in told.outputs] == [("OUTPUT0", kind, [1, 2])]
    assert told.raw_output_contents == [raw] and not told.outputs[0].HasField("contents")
    if kind in ("FP16", "BF16"):
        contents = {"fp32_contents": [0.5, 1.0]}
        what = f"unexpected explicit tensor data for input tensor 'INPUT0' for model 'same_{kind}' of type 'FP32', "
        typed = [one(kind, [1, 2], contents=contents)]
        failed = refusal(lambda: client.infer(f"same_{kind}", typed))
        assert failed == ("INVALID_ARGUMENT", what + f"expected datatype '{kind}'")
        return
    told = client.infer(f"same_{kind}", [one(kind, [1, 2], contents={CONTENTS[kind]: values})])
    assert told.raw_output_contents == [raw]


def test_strings_raw_and_typed(client: Client) -> None:
    values = [b"", b"\0\xff", b"x" * 300, b"4"]
    raw = b"".join(struct.pack("<I", len(v)) + v for v in values)
    assert client.infer("strings", [one("BYTES", [2, 2])], [raw]).raw_output_contents == [raw]
    typed = [one("BYTES", [2, 2], contents={"bytes_contents": values})]
    assert client.infer("strings", typed).raw_output_contents == [raw]


def test_sums_with_outputs_and_parameters(client: Client) -> None:
    left, right = list(range(16)), [1] * 16
    raw = [struct.pack("<16i", *left), struct.pack("<16i", *right)]
    told = client.infer(
        "simple", PAIR, raw, model_version="1", outputs=[{"name": "OUTPUT1"}, {"name": "OUTPUT0"}],
        parameters={"priority": {"uint64_param": 1}, "timeout": {"int64_param": 1000}, "mine": {"double_param": 0.5}},
    )  # fmt: skip
    assert [o.name for o in told.outputs] == ["OUTPUT1", "OUTPUT0"], "in the order in which they are asked for"
    assert struct.unpack("<16i", told.raw_output_contents[0]) == tuple(a - 1 for a in left)
    assert struct.unpack("<16i", told.raw_output_contents[1]) == tuple(a + 1 for a in left)


def test_classes(client: Client) -> None:
    raw = struct.pack("<8f", 0.5, 2.0, -1.0, 1.0, 3.0, 3.0, 0.0, 4.0)
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": {"int64_param": 2}}}]
    told = client.infer("label", [one("FP32", [2, 4])], [raw], outputs=outputs)
    assert (told.outputs[0].datatype, told.outputs[0].shape) == ("BYTES", [2, 2])
    says = [b"2.000000:1:b", b"1.000000:3:d", b"4.000000:3:d", b"3.000000:0:a"]
    assert told.raw_output_contents == [b"".join(struct.pack("<I", len(v)) + v for v in says)]


@pytest.mark.parametrize(("value", "kind"), [
    (True, "bool_param"), (-(2**63), "int64_param"), (2**63 - 1, "int64_param"), (2**63, "uint64_param"),
    (2**64 - 1, "uint64_param"), (0.5, "double_param"), ("", "string_param"),
])  # fmt: skip
def test_parameters_of_responses(value: Any, kind: str) -> None:
    found = message("ModelInferResponse")()
    set_parameter(found, "a", value)
    told = message("ModelInferResponse").FromString(found.SerializeToString()).parameters["a"]
    assert told.WhichOneof("parameter_choice") == kind and getattr(told, kind) == value


RAW = bytes(64)
CASES: list[tuple[Any, str, str]] = [
    (request("gone", PAIR, [RAW, RAW]), "NOT_FOUND", "Request for unknown model: 'gone' is not found"),
    (request("simple", PAIR, [RAW, RAW], model_version="2"), "NOT_FOUND",
     "Request for unknown model: 'simple' version 2 is not found"),
    (request("simple", PAIR, [RAW, RAW], model_version="x"), "INVALID_ARGUMENT",
     "failed to get model version from specified version string 'x' (details: stol), version should be an integral "
     "value > 0"),
    (request("repeat_int32", []), "UNIMPLEMENTED",
     "ModelInfer RPC doesn't support models with decoupled transaction policy"),
    (request("simple", PAIR[:1], [RAW]), "INVALID_ARGUMENT",
     ID + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing required "
     "input(s) ['INPUT1']. Please provide all required input(s)."),
    (request("same_FP32", [one("FP64", [1, 1])], [bytes(8)]), "INVALID_ARGUMENT",
     ID + "inference input 'INPUT0' data-type is 'FP64', but model 'same_FP32' expects 'FP32'"),
    (request("same_FP32", [one("FP31", [1, 1])], [bytes(8)]), "INVALID_ARGUMENT", "invalid datatype for input INPUT0"),
    (request("same_FP32", [one("FP32", [1, 2])], [bytes(4)], id="q"), "INVALID_ARGUMENT",
     "[request id: q] input byte size mismatch for input 'INPUT0' for model 'same_FP32'. Expected 8, got 4"),
    (request("same_FP32", [one("FP32", [1, 2], contents={"fp32_contents": [1]})]), "INVALID_ARGUMENT",
     ID + "input byte size mismatch for input 'INPUT0' for model 'same_FP32'. Expected 8, got 4"),
    (request("same_FP32", [one("FP32", [5, 1])], [bytes(20)]), "INVALID_ARGUMENT",
     ID + "inference request batch-size must be <= 4 for 'same_FP32'"),
    (request("same_FP32", [one("FP32", [-1, 1])], [bytes(4)]), "INVALID_ARGUMENT",
     "invalid shape for input 'INPUT0': shape [-1,1] contains one or more invalid dimensions"),
    (request("same_FP32", [one("FP32", [2**62, 4])], [bytes(4)]), "INVALID_ARGUMENT",
     f"invalid shape for input 'INPUT0': shape [{2**62},4] causes total element count to exceed maximum size of "
     f"{2**63 - 1}"),
    (request("same_FP32", [one("FP32", [1, 1])]), "INVALID_ARGUMENT",
     "unable to find data for input tensor 'INPUT0' for model 'same_FP32' in request."),
    (request("same_FP32", [one("FP32", [1, 1])], [bytes(4), b""]), "INVALID_ARGUMENT",
     "unexpected additional input data for model 'same_FP32'"),
    (request("same_FP32", [one("FP32", [1, 1], contents={"fp32_contents": [1]})], [bytes(4)]), "INVALID_ARGUMENT",
     "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'same_FP32'"),
    (request("same_FP32", [one("FP32", [1, 1], contents={"fp32_contents": [1], "int_contents": [1]})]),
     "INVALID_ARGUMENT", "unexpected explicit tensor data for input tensor 'INPUT0' for model 'same_FP32', binary data "
     "was already supplied."),
    (request("same_FP32", [one("FP32", [1, 1], contents={"int_contents": [1]})]), "INVALID_ARGUMENT",
     "unexpected explicit tensor data for input tensor 'INPUT0' for model 'same_FP32' of type 'INT32', expected "
     "datatype 'FP32'"),
    (request("same_FP32", [one("FP32", [1, 1], parameters={"shared_memory_region": {"string_param": "r"}})]),
     "UNIMPLEMENTED",
     "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."),
    (request("strings", [one("BYTES", [1, 1])], [b"\3\0\0\0ab"]), "INVALID_ARGUMENT",
     ID + "incomplete string data for inference input 'INPUT0' for model 'strings', expecting string of length 3 but "
     "only 2 bytes available."),
    (request("same_FP32", [one("FP32", [1, 1])], [bytes(4)], outputs=[{"name": "O"}]), "INVALID_ARGUMENT",
     ID + "unexpected inference output 'O' for model 'same_FP32'"),
    (request("same_FP32", [one("FP32", [1, 1])], [bytes(4)], outputs=[{"name": "OUTPUT0"}] * 2), "INVALID_ARGUMENT",
     "Duplicate output name 'OUTPUT0' is not allowed in a request"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "code", "says"), CASES)
def test_what_is_refused(client: Client, asked: Any, code: str, says: str) -> None:
    assert refusal(lambda: client.future("ModelInfer", asked).result()) == (code, says)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("sequence_id", {"bool_param": True}, "invalid value type for 'sequence_id' parameter, expected int64_param or "
         "string_param."),
        ("sequence_start", {"int64_param": 1}, "invalid value type for 'sequence_start' parameter, expected "
         "bool_param."),
        ("sequence_end", {}, "invalid value type for 'sequence_end' parameter, expected bool_param."),
        ("priority", {"string_param": "1"}, "invalid value type for 'priority' parameter, expected int64_param or "
         "uint64_param."),
        ("priority", {"int64_param": -1}, "invalid value for 'priority', expected value >= 0."),
        ("timeout", {"double_param": 1.0}, "invalid value type for 'timeout' parameter, expected int64_param or "
         "uint64_param."),
        ("mine", {}, "invalid value type for 'mine' parameter, expected int64_param, bool_param, string_param, or "
         "double_param."),
        ("triton_x", {"bool_param": True}, "parameter keys starting with 'triton_' are reserved for Triton usage. Only "
         "the following keys starting with 'triton_' are allowed: triton_enable_empty_final_response"),
        ("triton_enable_empty_final_response", {"int64_param": 1}, "invalid value type for "
         "'triton_enable_empty_final_response' parameter, expected bool_param."),
    ],
)  # fmt: skip
def test_parameters_that_say_nothing(client: Client, key: str, value: dict[str, Any], says: str) -> None:
    inputs = [one("FP32", [1, 1])]
    failed = refusal(lambda: client.infer("same_FP32", inputs, [bytes(4)], parameters={key: value}))
    assert failed == ("INVALID_ARGUMENT", says)


@pytest.mark.parametrize("value", [{"string_param": "2"}, {"bool_param": True}, {"int64_param": -1}])
def test_classes_that_are_no_number(client: Client, value: dict[str, Any]) -> None:
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": value}}]
    code, says = refusal(lambda: client.infer("same_FP32", [one("FP32", [1, 1])], [bytes(4)], outputs=outputs))
    assert code == "INVALID_ARGUMENT" and "for 'classification' parameter" in says


def test_statistics_are_those_of_http(client: Client, url: str) -> None:
    for n in (1, 3):
        client.infer("same_INT8", [one("INT8", [n, 2])], [bytes(2 * n)])
    infer_over_http(url, "same_INT8", {"inputs": [{**one("INT8", [3, 2]), "data": [0] * 6}]})
    (told,) = client.call("ModelStatistics", name="same_INT8").model_stats
    assert told.inference_count >= 7 and told.inference_stats.success.count >= 3
    assert [b.batch_size for b in told.batch_stats][-1] == 3 and told.batch_stats[-1].compute_infer.count == 2
    assert len(client.call("ModelStatistics").model_stats) == 23
    failed = refusal(lambda: client.call("ModelStatistics", name="gone"))
    assert failed == ("NOT_FOUND", "Request for unknown model: 'gone' is not found")


def test_index_and_what_is_not_there(client: Client) -> None:
    states = {m.name: (m.version, m.state) for m in client.call("RepositoryIndex").models}
    assert states["simple"] == ("1", "READY") and len(states) == 23
    named = ("UNIMPLEMENTED", "'repository_name' specification is not supported")
    assert refusal(lambda: client.call("RepositoryIndex", repository_name="here")) == named
    assert refusal(lambda: client.call("RepositoryModelLoad", repository_name="x", model_name="simple")) == named
    what = "explicit model load / unload is not allowed if polling is enabled"
    assert refusal(lambda: client.call("RepositoryModelUnload", model_name="simple")) == ("UNAVAILABLE", what)
    wrong = {"unload_dependents": {"string_param": "yes"}}
    what = "invalid value type for 'unload_dependents' parameter, expected bool_param."
    failed = refusal(lambda: client.call("RepositoryModelUnload", model_name="simple", parameters=wrong))
    assert failed == ("INVALID_ARGUMENT", what)
    for key, value, code, says in (
        ("config", {"bytes_param": b"{}"}, "INVALID_ARGUMENT", "invalid value type for load parameter 'config', "
         "expected string_param."),
        ("file:1/model.onnx", {"string_param": ""}, "INVALID_ARGUMENT", "invalid value type for load parameter "
         "'file:1/model.onnx', expected bytes_param."),
        ("dry_run", {"bool_param": True}, "UNIMPLEMENTED", "a dry run has no answer over gRPC: ask over HTTP"),
        ("config", {"string_param": "{"}, "INVALID_ARGUMENT", "failed to load 'simple', its config: failed to parse "
         "the request JSON buffer: Input data was truncated"),
    ):  # fmt: skip
        parameters = {key: value}
        failed = refusal(lambda: client.call("RepositoryModelLoad", model_name="simple", parameters=parameters))  # noqa: B023
        assert failed == (code, says)


def test_calls_of_what_is_not_there_yet(client: Client) -> None:
    def refused(name: str) -> tuple[str, str]:
        call = client.channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
        return refusal(lambda: call(b"", timeout=20))

    shared = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
    for kind in ("System", "Cuda"):
        for action in ("Status", "Register", "Unregister"):
            assert refused(f"{kind}SharedMemory{action}") == ("UNIMPLEMENTED", shared)
    assert refused("Nothing") == ("UNIMPLEMENTED", "Method not found!")


def test_messages_that_are_none(client: Client) -> None:
    for name in ("ModelInfer", "ModelConfig", "RepositoryIndex"):
        call = client.channel.unary_unary(f"/inference.GRPCInferenceService/{name}")
        code, says = refusal(lambda: call(b"\xff\xff", timeout=20))  # noqa: B023
        assert code == "INTERNAL" and says.startswith(f"failed to parse the message {name}Request: "), says
