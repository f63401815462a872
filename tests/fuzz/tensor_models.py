"""What is fuzzed of a repository of tensor models: its configurations, and requests over HTTP and gRPC to the end."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError
from millrace.model_repository.config.config_json import config_json
from millrace.model_repository.config.model_config import ModelConfig
from millrace.model_repository.lifecycle.lifecycle import ModelRepository
from millrace.model_repository.repository.multi_repository import read_repositories
from millrace.model_repository.repository.repository_flags import RepositoryFlags
from millrace.model_repository.request.request_validation import RequestValidator
from millrace.model_repository.request.status_code import StatusError
from millrace.model_repository.scheduling.dynamic_batcher import BatchRules
from millrace.serve.protocols.kserve.grpc import calls
from millrace.serve.protocols.kserve.grpc.protobuf_messages import config_message, message
from millrace.serve.protocols.kserve.http import frontend
from tests.fuzz.driver import Case
from tests.fuzz.mutate import json_bytes, mutate_bytes, mutate_json
from tests.model_repository.config.test_pbtxt_parser import Drawn
from tests.support.ensembles import ensemble
from tests.support.kserve import HEADER
from tests.support.repository import ADD_SUB, identity, write_models
from tests.support.sequences import accumulator

_QUEUES = """dynamic_batching { preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100
priority_levels: 3 default_priority_level: 2 default_queue_policy { timeout_action: DELAY max_queue_size: 9 }
priority_queue_policy [ { key: 1 value: { allow_timeout_override: true default_timeout_microseconds: 5 } } ] }
instance_group [ { count: 2 kind: KIND_CPU rate_limiter { resources [ { name: "R" count: 1 } ] priority: 2 } } ]
model_warmup [ { name: "w" batch_size: 1 inputs { key: "INPUT0" value { data_type: TYPE_INT32 dims: 16
zero_data: true } } } ] version_policy { specific { versions: [ 1 ] } } parameters { key: "a" value {
string_value: "b" } }
model_metrics { metric_control: [ { metric_identifier: { family: "nv_inference_first_response_histogram_ms" }
histogram_options: { buckets: [ 1, 2 ] } } ] } response_cache { enable: true } metric_tags { key: "x" value: "y" }"""
_STEPS = [("n", {"INPUT0": "x"}, {"OUTPUT0": "y"}), ("n", {"INPUT0": "y"}, {"OUTPUT0": "z"})]
CONFIGS = (
    ADD_SUB + _QUEUES, ensemble(["x"], ["z"], _STEPS),
    accumulator("oldest { max_candidate_sequences: 4 }").replace("python", "identity"),
    identity("FP16", "-1, 3", "max_batch_size: 4", "reshape { shape: [ -1, 3, 1 ] }"),
)  # fmt: skip


def pbtxt(folder: Path) -> Case:
    """config.pbtxt: what is said of it, and, where it is taken, what is made of it."""
    file = folder / "models" / "m" / "config.pbtxt"
    write_models(folder / "models", {"m": "", "n": identity("INT32", "4", "max_batch_size: 8")})

    def case(rng: Random) -> None:
        drawn = rng.random() < 0.3
        text = Drawn(rng.getrandbits(32)).message(ModelConfig) if drawn else rng.choice(CONFIGS)
        data = text.encode("utf-8", "surrogatepass")
        file.write_bytes(data if rng.random() < 0.1 else mutate_bytes(rng, data))
        model = next(m for m in read_repositories([folder / "models"])[0].models if m.name == "m")
        msgspec.json.encode(config_json(model.config))
        if not model.is_servable:
            found = model.problems[rng.randrange(len(model.problems))]
            raise ConfigError(f"{found.location.removeprefix(str(folder))}: {found.what}", found.expected, found.fix)
        BatchRules.from_config(model.config)
        RequestValidator(model.config)
        config_message(model.config).SerializeToString()

    return case


MODELS = {
    "simple": ADD_SUB, "strings": identity("STRING", "-1, -1"), "flags": identity("BOOL", "-1", "max_batch_size: 4"),
    "half": identity("FP16", "-1, -1"), "shaped": identity("FP32", "1", "max_batch_size: 2", "reshape { shape: [ ] }"),
    "long": identity("INT64", "-1", "max_batch_size: 4"),
    "label": identity("FP32", "4", "max_batch_size: 2").replace(
        'name: "OUTPUT0"', 'name: "OUTPUT0" label_filename: "labels.txt"'
    ),
}  # fmt: skip
# (model, route, inputs with their data in JSON, outputs)
_ASKED: list[tuple[str, list[tuple[str, str, list[int], list[Any]]], list[dict[str, Any]]]] = [
    ("simple", [("INPUT0", "INT32", [1, 16], [1] * 16), ("INPUT1", "INT32", [1, 16], [*range(16)])], []),
    ("simple", [("INPUT0", "INT32", [1, 16], [1] * 16), ("INPUT1", "INT32", [1, 16], [*range(16)])],
     [{"name": "OUTPUT1", "parameters": {"binary_data": True}}]),
    ("strings", [("INPUT0", "BYTES", [2, 2], ["", "a", "é", "long"])], []),
    ("flags", [("INPUT0", "BOOL", [2, 2], [True, False, False, True])], []),
    ("half", [("INPUT0", "FP16", [1, 2], [0.5, 1.0])], []),
    ("shaped", [("INPUT0", "FP32", [2, 1], [0.5, 1e30])], []),
    ("long", [("INPUT0", "INT64", [1, 3], [1, -(2**63), 2**63 - 1])], []),
    ("label", [("INPUT0", "FP32", [1, 4], [3, 1, 2, 4])], [{"name": "OUTPUT0", "parameters": {"classification": 2}}]),
]  # fmt: skip
_NUMPY = {"INT32": np.int32, "BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "INT64": np.int64}
_MORE = {"id": "a", "parameters": {"priority": 1, "timeout": 1000, "mine": "x", "binary_data_output": True}}
MAX_BYTES = 1 << 20


class Front:
    """A repository behind both protocols, without sockets."""

    def __init__(self, root: Path) -> None:
        write_models(root, MODELS)
        (root / "label" / "labels.txt").write_text("a\nb\n\nd\n")
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._open(root))

    async def _open(self, root: Path) -> None:
        repository = ModelRepository(
            RepositoryFlags(model_repository=(str(root),), http_max_input_size=MAX_BYTES)
        )  # fmt: skip
        assert await repository.start() == []

        async def aside(work: Any, n_bytes: int) -> Any:
            return work()

        self.http = frontend.HttpFrontend(repository, lambda: True, aside)
        self.grpc = calls.GrpcFrontend(repository, lambda: True, aside)

    def ask(self, path: str, headers: dict[bytes, bytes], body: bytes) -> tuple[int, list[bytes]]:
        """Over HTTP: the status, and the body or the events."""
        return self.loop.run_until_complete(self._ask(path, headers, body))

    async def _ask(self, path: str, headers: dict[bytes, bytes], body: bytes) -> tuple[int, list[bytes]]:
        reply = await self.http.answer(frontend.HttpCall("POST", path, headers, body))
        if reply.events is None:
            n_json = dict(reply.headers).get(HEADER.encode())
            return reply.status, [reply.body[: int(n_json)] if n_json is not None else reply.body]
        return reply.status, [event.removeprefix(b"data: ") async for event in reply.events]

    def call(self, data: bytes) -> bytes:
        """ModelInfer. raises StatusError"""
        return self.loop.run_until_complete(self.grpc.answer("ModelInfer", data, calls.GrpcCallContext()))


def raw(datatype: str, values: list[Any]) -> bytes:
    if datatype != "BYTES":
        return np.array(values, _NUMPY[datatype]).tobytes()
    return b"".join(len(v.encode()).to_bytes(4, "little") + v.encode() for v in values)


def over_http(rng: Random, mutated: bool = True) -> tuple[str, dict[bytes, bytes], bytes]:
    """Path, headers, body."""
    model, inputs, outputs = rng.choice(_ASKED)
    path = f"/v2/models/{model}"
    if rng.random() < 0.3 and model != "half":  # whose numbers JSON does not hold
        told: dict[str, Any] = {name: values for name, _, _, values in inputs} | {"id": "a", "parameters": {"b": 1}}
        body = json_bytes(rng, mutate_json(rng, told)) if mutated else json.dumps(told).encode()
        return path + rng.choice(["/generate", "/generate_stream"]), {}, body
    binary, behind, tensors = rng.random() < 0.6 or model == "half", b"", list[dict[str, Any]]()
    for name, datatype, shape, values in inputs:
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        data = raw(datatype, values)
        behind += data if binary else b""
        tensors.append(tensor | ({"parameters": {"binary_data_size": len(data)}} if binary else {"data": values}))
    whole: dict[str, Any] = {"inputs": tensors} | ({"outputs": outputs} if outputs else {})
    whole |= _MORE if rng.random() < 0.4 or model == "half" else {}
    head = json_bytes(rng, mutate_json(rng, whole)) if mutated and rng.random() < 0.7 else json.dumps(whole).encode()
    behind = mutate_bytes(rng, behind) if mutated and behind and rng.random() < 0.3 else behind
    size = len(head) if not mutated or rng.random() < 0.9 else rng.choice([0, len(head) - 1, len(head) + 1, -1, 10**18])
    return f"{path}/infer", {HEADER.lower().encode(): b"%d" % size} if binary else {}, head + behind


def over_grpc(rng: Random, mutated: bool = True) -> bytes:
    model, inputs, outputs = rng.choice(_ASKED)
    made = message("ModelInferRequest")(model_name=model, id="a")
    for name, datatype, shape, values in inputs:
        made.inputs.add(name=name, datatype=datatype, shape=shape)
        made.raw_input_contents.append(raw(datatype, values))
    for output in outputs:
        made.outputs.add(name=output["name"])
    data: bytes = made.SerializeToString()
    return mutate_bytes(rng, data) if mutated else data


def tensors(folder: Path) -> Case:
    """Requests to tensor models, which compute what is right with them: what is told is JSON, or a message."""
    front = Front(folder / "models")

    def case(rng: Random) -> None:
        try:
            if rng.random() < 0.3:
                message("ModelInferResponse").FromString(front.call(over_grpc(rng)))
                return
            status, parts = front.ask(*over_http(rng))
        except StatusError as error:
            raise ConfigError(error.message, "a request", "correct it") from None
        for part in parts:
            told = msgspec.json.decode(part)
            if "error" in told:
                raise ConfigError(told["error"], "a request", "correct it")
            assert status == 200 and told["model_name"] in MODELS, (status, told)

    return case
