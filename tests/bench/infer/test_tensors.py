"""Tensors and requests of KServe's protocol, against bytes packed by `struct` and read back by the null server."""

import asyncio
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from millrace.bench.infer.grpc_transport import GrpcTransport
from millrace.bench.infer.http_transport import HttpTransport
from millrace.bench.infer.inputs import batches, parse_shapes, random_array, read_items, synthetic
from millrace.bench.infer.model import BenchModel, BenchTensor, parse_model
from millrace.bench.infer.settings import numbers
from millrace.bench.infer.target import InferTarget
from millrace.bench.names import GRPC
from millrace.bench.null_server import kserve as kserve
from millrace.errors import ConfigError, MachineError
from millrace.model_repository.request.tensors import DTYPES, Array, InferTensor, from_raw, objects
from millrace.serve.protocols.kserve.grpc.protobuf_messages import message

STRINGS = [b"", b"mill", "r\u00e4ce \U0001f3c1".encode()]
# Of each datatype values on its edges, and their bytes.
EDGES: dict[str, tuple[list[object], bytes]] = {
    "BOOL": ([True, False, True], b"\1\0\1"),
    **{
        name: ([0, 2**bits - 1, 7], struct.pack(f"<3{code}", 0, 2**bits - 1, 7))
        for name, bits, code in (("UINT8", 8, "B"), ("UINT16", 16, "H"), ("UINT32", 32, "I"), ("UINT64", 64, "Q"))
    },
    **{
        name: ([-top, top - 1, -1], struct.pack(f"<3{code}", -top, top - 1, -1))
        for name, top, code in (
            ("INT8", 1 << 7, "b"), ("INT16", 1 << 15, "h"), ("INT32", 1 << 31, "i"), ("INT64", 1 << 63, "q")
        )
    },
    "FP16": ([-0.5, 65504.0, 2**-24], struct.pack("<3e", -0.5, 65504.0, 2**-24)),
    "FP32": ([-0.5, 3.0e38, 1e-45], struct.pack("<3f", -0.5, 3.0e38, 1e-45)),
    "FP64": ([-0.5, 1.7e308, 5e-324], struct.pack("<3d", -0.5, 1.7e308, 5e-324)),
    "BF16": ([-0.5, 1.0, 2.0**127], struct.pack("<3H", 0xBF00, 0x3F80, 0x7F00)),
}  # fmt: skip


def array(values: list[object], datatype: str) -> Array:
    if datatype == "BYTES":
        return objects([bytes(v) for v in values])  # type: ignore[call-overload]
    if datatype == "BF16":
        return np.array(values, ml_dtypes.bfloat16)
    return np.array(values, DTYPES[datatype])


@pytest.mark.parametrize("datatype", EDGES)
def test_the_bytes_of_every_datatype(datatype: str) -> None:
    values, packed = EDGES[datatype]
    tensor = InferTensor("x", datatype, array(values, datatype))
    assert tensor.raw() == packed
    assert from_raw(packed, datatype, (3, 1)).tolist() == tensor.values.reshape(3, 1).tolist()
    if datatype not in ("FP16", "BF16"):
        assert kserve.from_json(json.loads(json.dumps(tensor.to_json_values())), datatype) == packed


def test_strings_have_their_lengths_before_them() -> None:
    tensor = InferTensor("x", "BYTES", objects(STRINGS))
    assert tensor.raw() == b"".join(struct.pack("<I", len(s)) + s for s in STRINGS)
    assert from_raw(tensor.raw(), "BYTES", (3,)).tolist() == STRINGS == kserve.split_bytes(tensor.raw())
    assert [str(s).encode() for s in tensor.to_json_values()] == STRINGS
    with pytest.raises(ValueError):
        from_raw(tensor.raw()[:-1], "BYTES", (3,))
    with pytest.raises(ConfigError, match="no text"):
        InferTensor("x", "BYTES", objects([b"\xff"])).to_json_values()
    with pytest.raises(ConfigError, match="FP16 as JSON"):
        InferTensor("x", "FP16", np.zeros(1, np.float16)).to_json_values()


TWO = [
    InferTensor("A", "INT64", np.arange(-3, 3).reshape(2, 3)),
    InferTensor("B", "BYTES", objects([b"one", b"", b"three"]).reshape(1, 3)),
]


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_a_request_over_http_is_read_as_it_was_meant(binary: bool) -> None:
    body, head = HttpTransport(InferTarget("http://x", "m", binary=binary)).body(TWO)
    n_json = int(head.split(b":")[1]) if head else None
    assert (n_json is None) != binary and head.lower().startswith(
        b"inference-header-content-length: " if binary else b""
    )
    asked, inputs = kserve.read_request(body, n_json)
    assert [(t.name, t.datatype, t.shape, t.data) for t in inputs] == [
        (t.name, t.datatype, t.values.shape, t.raw()) for t in TWO
    ]
    assert asked.get("parameters") == ({"binary_data_output": True} if binary else None)


def test_a_request_over_grpc_has_the_protocols_numbers() -> None:
    """Field by field, by hand: what the library makes of the table is compared with the wire format itself."""

    async def made() -> bytes:
        async with GrpcTransport(InferTarget("x:1", "m", "3", GRPC), 1) as over:
            return over.body(TWO[:1])

    body = asyncio.run(made())

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    packed_shape = field(3, bytes([2, 3]))
    tensor = field(1, b"A") + field(2, b"INT64") + packed_shape
    assert body == field(1, b"m") + field(2, b"3") + field(5, tensor) + field(7, struct.pack("<6q", *range(-3, 3)))
    parameter = message("InferParameter")(uint64_param=1)
    assert parameter.SerializeToString() == b"\x28\x01" and parameter.WhichOneof("parameter_choice") == "uint64_param"


# What servers tell of models

ONE = {"name": "m", "versions": ["1", "3"], "platform": "p", "outputs": []}


def metadata(*shape: int, datatype: str = "FP32") -> dict[str, object]:
    return {**ONE, "inputs": [{"name": "x", "datatype": datatype, "shape": list(shape)}]}


@pytest.mark.parametrize(
    "shape, config, max_batch, item",
    [
        ((-1, 4), {"max_batch_size": 8}, 8, (4,)), ((-1, 4), {"max_batch_size": 0}, 0, (-1, 4)),
        ((-1, -1), {"max_batch_size": 2}, 2, (-1,)), ((4,), {}, 0, (4,)),
        ((-1, 4), None, None, (4,)), ((2, 4), None, 0, (2, 4)), ((), None, 0, ()),
    ],
)  # fmt: skip
def test_a_models_batch_dimension(
    shape: tuple[int, ...], config: dict[str, object] | None, max_batch: int | None, item: tuple[int, ...]
) -> None:
    model = parse_model(metadata(*shape), config)
    assert (model.max_batch, model.inputs[0].shape, model.version) == (max_batch, item, "3")


def test_instances_are_added_up() -> None:
    groups = [
        {"kind": "KIND_GPU", "count": 2, "gpus": [0, 1]}, {"kind": "KIND_GPU", "count": 1, "gpus": [0]},
        {"kind": "KIND_CPU", "count": 3},
    ]  # fmt: skip
    assert parse_model(metadata(4), {"instance_group": groups}).instances == "5 on GPU, 3 on CPU"
    assert parse_model(metadata(4), {"instance_group": "none"}).instances == ""


@pytest.mark.parametrize(
    "told",
    [{}, {**ONE, "inputs": []}, {**ONE, "inputs": "x"}, {**ONE, "inputs": [{"name": "x"}]}, metadata(4, datatype="X"),
     metadata(-2), metadata(*[1] * 33)],
)  # fmt: skip
def test_metadata_that_is_none(told: dict[str, object]) -> None:
    with pytest.raises(MachineError, match="metadata cannot be read"):
        parse_model(told, None)


def test_batches_that_a_model_does_not_take() -> None:
    parse_model(metadata(-1, 4), {"max_batch_size": 8}).check_batch(8)
    parse_model(metadata(-1, 4), None).check_batch(1000)
    with pytest.raises(ConfigError, match="takes no batches"):
        parse_model(metadata(4), None).check_batch(2)
    with pytest.raises(ConfigError, match="at most 8"):
        parse_model(metadata(-1, 4), {"max_batch_size": 8}).check_batch(9)


def test_shapes_that_are_given() -> None:
    model = parse_model(metadata(-1, -1, 3), {"max_batch_size": 8})
    assert model.with_shapes({"x": (7, 3)}).inputs[0].shape == (7, 3)
    for wrong, says in (
        ({}, "--shape x:16,3"),
        ({"x": (7,)}, "-1,3"),
        ({"x": (7, 4)}, "-1,3"),
        ({"y": (7, 3)}, "an input: x"),
    ):
        with pytest.raises(ConfigError) as caught:
            model.with_shapes(wrong)
        assert says in str(caught.value)
    assert parse_shapes(["a:b:3,224", "c:1"]) == {"a:b": (3, 224), "c": (1,)}
    for text in ("x", "x:", ":3", "x:0", "x:3,", "x:-1", "x:a"):
        with pytest.raises(ConfigError):
            parse_shapes([text])


# What is asked

MIXED = BenchModel("m", "1", "", tuple(BenchTensor(name, name, (50,)) for name in ("BYTES", *EDGES)), (), 8)


def test_random_inputs_are_of_their_range_and_of_their_seed() -> None:
    one, again, other = (synthetic(MIXED, 2, "random", 5, seed) for seed in (1, 1, 2))
    assert len(one) == 16 and [t.raw() for t in one[3]] == [t.raw() for t in again[3]]
    assert [t.raw() for t in one[0]] != [t.raw() for t in one[1]] != [t.raw() for t in other[1]]
    for tensor in one[0]:
        assert tensor.values.shape == (2, 50) and tensor.values.dtype == np.dtype(DTYPES[tensor.datatype])
        if tensor.datatype == "BYTES":
            assert all(len(v) == 5 and v.isalpha() for v in tensor.values.reshape(-1))
            continue
        values = tensor.values.astype(np.float64)
        most = 1 if tensor.datatype[:2] in ("FP", "BF", "BO") else 127
        assert 0 <= values.min() < 0.3 * most and 0.7 * most < values.max() <= most


def test_zeros_are_one_request_of_zeros() -> None:
    (request,) = synthetic(MIXED, 3, "zero", 5, 0)
    assert all(not any(t.raw()) for t in request) and request[0].values.shape == (3, 50)


def test_what_is_too_large_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.bench.infer.inputs.MAX_BYTES", 1000)
    model = BenchModel("m", "1", "", (BenchTensor("x", "FP32", (100,)),), (), None)
    assert len(synthetic(model, 1, "random", 0, 0)) == 2, "as many as fit"
    with pytest.raises(ConfigError, match="1,200 bytes"):
        synthetic(model, 3, "random", 0, 0)
    items = [{"x": random_array(model.inputs[0], "zero", 0, np.random.default_rng(0))}]
    assert len(batches(model, 2, items * 9)) == 1
    with pytest.raises(ConfigError, match="1,200 bytes"):
        batches(model, 3, items)


def test_a_file_as_perf_analyzer_has_it(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    model = BenchModel("m", "1", "", (BenchTensor("a", "INT32", (2,)), BenchTensor("b", "BYTES", (-1,))), (), 8)
    entries: list[object] = [
        {"a": [1, 2], "b": {"content": ["x"], "shape": [1]}},
        [{"a": {"b64": "AwAAAAQAAAA="}, "b": {"content": ["y"], "shape": [1]}}],  # a sequence of one
        {"a": [[5], [6]], "b": {"b64": "AQAAAHo=", "shape": [1]}},
    ]
    path.write_text(json.dumps({"data": entries}))
    first, second, third = batches(model, 2, read_items(path, model))
    assert [t.values.tolist() for t in first] == [[[1, 2], [3, 4]], [[b"x"], [b"y"]]]
    assert [t.values.tolist() for t in second] == [[[5, 6], [1, 2]], [[b"z"], [b"x"]]], "again from the first"
    assert third[0].values.tolist() == [[3, 4], [5, 6]]
    folder = path.parent / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(struct.pack("<2i", 8, 9))
    (folder / "b").write_bytes(b"one\ntwo\n")
    shaped = model.with_shapes({"b": (2,)})
    ((a, b),) = batches(shaped, 1, read_items(folder, shaped))
    assert a.values.tolist() == [[8, 9]] and b.values.tolist() == [[b"one", b"two"]]
    with pytest.raises(ConfigError, match=r"folder/b: .*reshape"):
        read_items(folder, model.with_shapes({"b": (3,)}))


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not JSON"), ("[]", 'no list "data"'), ('{"data": []}', 'no list "data"'),
        ('{"data": [{"b": [1]}]}', "entry 1 of data"), ('{"data": [{"a": [1, 2]}, 5]}', "entry 2 of data: 5"),
        ('{"data": [{"a": [1, 2, 3]}]}', "INT8 of shape 2"), ('{"data": [{"a": [1, 200]}]}', "beyond INT8"),
        ('{"data": [{"a": [1, 2.5]}]}', "no INT8"), ('{"data": [{"a": [1, "2"]}]}', "no INT8"),
        ('{"data": [{"a": {"shape": [2]}}]}', "content"), ('{"data": [{"a": {"b64": "?"}}]}', "entry 1"),
        ('{"data": [{"a": {"b64": "AA=="}}]}', "INT8 of shape 2"),
        ('{"data": [{"a": {"content": [1, 2], "shape": [3]}}]}', "has the shape [3]"),
        ('{"data": [{"a": {"content": [1, 2], "shape": 2}}]}', "has the shape 2"),
        ('{"data": [{"a": [1, 99999999999999999999999]}]}', "entry 1"),
    ],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_items(path, BenchModel("m", "1", "", (BenchTensor("a", "INT8", (2,)),), (), 8))
    assert says in str(caught.value) and "data.json" in str(caught.value)


def test_items_of_a_batch_have_one_shape() -> None:
    model = BenchModel("m", "1", "", (BenchTensor("x", "FP32", (-1,)),), (), None)
    items = [{"x": np.zeros(n, np.float32)} for n in (2, 3)]
    assert [t.values.shape for (t,) in batches(model, 1, items)] == [(1, 2), (1, 3)]
    with pytest.raises(ConfigError, match="different shapes"):
        batches(model, 2, items)


@pytest.mark.parametrize(
    "texts, found",
    [(["4"], [4]), (["1,2,8", "2"], [1, 2, 8]), (["1:4"], [1, 2, 3, 4]), (["2:9:3"], [2, 5, 8]), (["7:7"], [7])],
)  # fmt: skip
def test_levels_as_perf_analyzer_writes_them(texts: list[str], found: list[float]) -> None:
    assert numbers("-b", texts, 100) == found


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.5", "101", "4:2", "1:2:3:4", "1:4:0", "1,,2", "nan", "1:"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="-b is"):
        numbers("-b", [text], 100)
    assert numbers("--request-rate", ["0.5:2:0.5"], 10, integers=False) == [0.5, 1, 1.5, 2]
