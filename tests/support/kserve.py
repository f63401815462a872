"""Requests of KServe over HTTP, packed by `struct`."""

import json
from typing import Any

import httpx

KINDS: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("?", [True, False]),
    "UINT8": ("B", [0, 255]),
    "UINT16": ("H", [0, 65535]),
    "UINT32": ("I", [0, 2**32 - 1]),
    "UINT64": ("Q", [0, 2**64 - 1]),
    "INT8": ("b", [-128, 127]),
    "INT16": ("h", [-32768, 32767]),
    "INT32": ("i", [-(2**31), 2**31 - 1]),
    "INT64": ("q", [-(2**63), 2**63 - 1]),
    "FP16": ("e", [0.5, -65504.0]),
    "FP32": ("f", [0.5, -1.5]),
    "FP64": ("d", [0.1, -1e300]),
    "BF16": ("H", [0x3F80, 0xBFC0]),
}
ID = "[request id: <id_unknown>] "
HEADER = "Inference-Header-Content-Length"


def infer(
    url: str, model: str, body: Any, headers: dict[str, str] | None = None, path: str = "infer"
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/v2/models/{model}/{path}", content=content, headers=headers)


def one(datatype: str, shape: list[int], data: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": "INPUT0", "shape": shape, "datatype": datatype, **({} if data is None else {"data": data}), **more}


def binary(inputs: list[dict[str, Any]], raw: bytes, **more: Any) -> tuple[bytes, dict[str, str]]:
    head = json.dumps({"inputs": inputs, **more}).encode()
    return head + raw, {HEADER: str(len(head))}


def parts(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    assert response.status_code == 200, response.text
    n = int(response.headers.get(HEADER, len(response.content)))
    return json.loads(response.content[:n]), response.content[n:]
