"""Backend `repeat`: a decoupled model that sends a response for each element of IN after DELAY milliseconds.

As in Triton's own, OUT is the element, IDX its index, and WAIT the milliseconds until the next request is accepted.
"""

import threading
import time
from collections.abc import Sequence

import numpy as np

from millrace.model_repository.backends.backend import Instance, InstanceContext, ModelBackend
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import invalid

_MAX_ELEMENTS, _MAX_MS = 10_000, 60_000


class _Repeat(Instance):
    responds_async = True

    def __init__(self, context: InstanceContext) -> None:
        config = context.config
        policy = config.model_transaction_policy
        if not (policy and policy.decoupled):
            raise invalid(f"model '{config.name}' must have the decoupled transaction policy")
        names = ({t.name for t in config.input}, {t.name for t in config.output})
        if names != ({"IN", "DELAY", "WAIT"}, {"OUT", "IDX"}) or config.max_batch_size:
            raise invalid(f"model '{config.name}' must have inputs IN, DELAY and WAIT, outputs OUT and IDX, no batches")

    def execute(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            values, delays_ms = request.inputs["IN"].reshape(-1), request.inputs["DELAY"].reshape(-1).tolist()
            if len(values) != len(delays_ms) or len(values) > _MAX_ELEMENTS or sum(delays_ms) > _MAX_MS:
                raise invalid(
                    f"expected IN and DELAY to have the same elements, at most {_MAX_ELEMENTS}, {_MAX_MS} ms in all"
                )
            wait_ms = min(_MAX_MS, int(request.inputs["WAIT"].reshape(-1)[0]))
            threading.Thread(target=_answer, args=(request, values, delays_ms), daemon=True).start()
            time.sleep(wait_ms / 1e3)


def _answer(request: InferRequest, values: "np.ndarray[tuple[int], np.dtype[np.int32]]", delays_ms: list[int]) -> None:
    for i, delay_ms in enumerate(delays_ms):
        time.sleep(delay_ms / 1e3)
        if request.cancelled:
            break
        index = np.array([i], dtype=np.uint32)
        request.send(InferResponse({"OUT": values[i : i + 1], "IDX": index}), final=False)
    request.send(None)


class RepeatBackend(ModelBackend):
    def instance(self, context: InstanceContext) -> Instance:
        return _Repeat(context)
