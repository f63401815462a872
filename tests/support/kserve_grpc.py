"""Requests of KServe over gRPC, on messages made by hand, by grpcio's own client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from millrace.serve.protocols.kserve.grpc.protobuf_messages import SERVICE, build_message, message

WAIT_S = 20.0
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
Metadata = Sequence[tuple[str, str]]


class Client:
    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def call(self, rpc: str, /, metadata: Metadata = (), service: str = SERVICE, **fields: Any) -> Any:
        """raises grpc.RpcError"""
        kind = rpc if service == SERVICE else "HealthCheck"
        asked = build_message(f"{kind}Request", fields).SerializeToString()
        told = self.channel.unary_unary(service + rpc)(asked, timeout=WAIT_S, metadata=metadata)
        return message(f"{kind}Response").FromString(told)

    def infer(self, model: str, inputs: Sequence[dict[str, Any]], raw: Sequence[bytes] = (), **fields: Any) -> Any:
        return self.call("ModelInfer", model_name=model, inputs=inputs, raw_input_contents=raw, **fields)

    def future(self, name: str, asked: Any) -> Any:
        """A call that is under way."""
        return self.channel.unary_unary(SERVICE + name).future(asked.SerializeToString(), timeout=WAIT_S)

    def stream(self, requests: Iterator[Any], metadata: Metadata = ()) -> Any:
        """An iterator of ModelStreamInferResponse, which is the call, too. requests: ModelInferRequest"""
        call = self.channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            request_serializer=lambda asked: asked.SerializeToString(),
            response_deserializer=message("ModelStreamInferResponse").FromString,
        )
        return call(requests, timeout=WAIT_S, metadata=metadata)


@contextmanager
def connected(place: str) -> Iterator[Client]:
    with grpc.insecure_channel(place, _OPTIONS) as channel:
        yield Client(channel)


def one(datatype: str, shape: Sequence[int], name: str = "INPUT0", **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **more}


def request(model: str, inputs: Sequence[dict[str, Any]], raw: Sequence[bytes] = (), **fields: Any) -> Any:
    return build_message(
        "ModelInferRequest", {"model_name": model, "inputs": inputs, "raw_input_contents": raw, **fields}
    )


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Code and words of the error that it is."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError("it was answered")
