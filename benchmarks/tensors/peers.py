"""The services that Millrace is measured beside: one model's arithmetic and no more, in the fastest way that is usual.

    python -m benchmarks.tensors.peers http|grpc

Both take the very requests that Millrace takes, and answer with the very bytes. What they leave out is theirs to gain:
names, shapes and sizes are not looked at, nothing is logged or counted, nobody is cancelled. The process prints its
port once it listens.
"""

import asyncio
import socket
import sys
from typing import Any

import numpy as np

from benchmarks.tensors.request import DIMS, GRPC_METHOD, GRPC_SERVICE, HTTP_PATH, NAME, message_classes


def computed(left: bytes, right: bytes) -> tuple[bytes, bytes]:
    a, b = np.frombuffer(left, "<f4"), np.frombuffer(right, "<f4")
    return (a + b).tobytes(), (a - b).tobytes()


def http() -> None:
    """FastAPI on uvicorn with httptools and uvloop; no access log."""
    import uvicorn
    from fastapi import FastAPI, Request, Response

    app = FastAPI()
    n = 4 * DIMS
    told = ",".join(
        f'{{"name":"{name}","datatype":"FP32","shape":[1,{DIMS}],"parameters":{{"binary_data_size":{n}}}}}'
        for name in ("OUTPUT0", "OUTPUT1")
    )
    head = f'{{"model_name":"{NAME}","model_version":"1","outputs":[{told}]}}'.encode()
    headers = {"inference-header-content-length": str(len(head))}

    async def infer(request: Request) -> Response:
        body = await request.body()
        at = int(request.headers["inference-header-content-length"])
        total, difference = computed(body[at : at + n], body[at + n : at + 2 * n])
        return Response(head + total + difference, headers=headers, media_type="application/octet-stream")

    app.post(HTTP_PATH)(infer)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(app, loop="uvloop", http="httptools", ws="none", lifespan="off", access_log=False,
                                log_level="warning")  # fmt: skip
        print(sock.getsockname()[1], flush=True)
        uvicorn.Server(config).run(sockets=[sock])


async def grpc() -> None:
    """grpcio's server for asyncio, with its messages as protobuf's classes."""
    import grpc

    asked, answered = message_classes()

    async def infer(request: Any, context: Any) -> Any:
        total, difference = computed(*request.raw_input_contents)
        found = answered(model_name=NAME, model_version="1", raw_output_contents=[total, difference])
        for name in ("OUTPUT0", "OUTPUT1"):
            found.outputs.add(name=name, datatype="FP32", shape=[1, DIMS])
        return found

    handler = grpc.unary_unary_rpc_method_handler(infer, asked.FromString, answered.SerializeToString)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GRPC_SERVICE, {GRPC_METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def main() -> None:
    if sys.argv[1] == "http":
        http()
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(grpc())


if __name__ == "__main__":
    main()
