"""Warming an instance up before its model is ready: the samples of `model_warmup`, computed and answered to nobody."""

import logging
import queue
from collections.abc import Sequence
from math import prod

import numpy as np

from millrace.model_repository.backends.backend import Instance, InstanceContext
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.model_config import Warmup, WarmupInput
from millrace.model_repository.repository.tensor_files import read_tensor
from millrace.model_repository.request.infer_request import END, START, InferRequest, InferResponse
from millrace.model_repository.request.request_validation import RawInput, RequestValidator, wire_name
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.model_repository.request.tensors import BYTES, DTYPES, Array, objects
from millrace.model_repository.scheduling.sequence_batcher import Sequence as RequestSequence
from millrace.model_repository.scheduling.sequence_controls import Controls
from millrace.model_repository.scheduling.sequence_states import States

log = logging.getLogger(__name__)


def warm_up_instance(instance: Instance, given: InstanceContext) -> Instance:
    """In the instance's thread. raises StatusError, and it is closed, where a sample fails"""
    try:
        for sample in given.config.model_warmup:
            if not sample.batch_size:
                log.warning("%s: warmup sample '%s' has a batch size of 0, and is left out", given.name, sample.name)
                continue
            log.info("%s is running warmup sample '%s'", given.name, sample.name)
            for _ in range(max(1, sample.count)):
                _run(instance, sample, [_request(sample, given) for _ in range(sample.batch_size)])
    except BaseException:
        instance.close()
        raise
    return instance


def _run(instance: Instance, sample: Warmup, requests: Sequence[InferRequest]) -> None:
    """raises StatusError"""
    answers: queue.SimpleQueue[tuple[StatusError | None, bool]] = queue.SimpleQueue()

    def receive(_: InferRequest, response: InferResponse | None, error: StatusError | None, final: bool) -> None:
        answers.put((error, final))

    for request in requests:
        request.send_by = receive
    try:
        instance.execute(requests)
    except StatusError as error:
        raise _failed(sample, error) from error
    n_open = len(requests)
    while n_open:
        if answers.empty() and not instance.answers_later:
            raise _failed(sample, StatusError(Code.INTERNAL, "it was not answered"))
        failed, final = answers.get()
        if failed is not None:
            raise _failed(sample, failed)
        n_open -= final


def _failed(sample: Warmup, error: StatusError) -> StatusError:
    return invalid(f"failed to run warmup sample '{sample.name}': {error}")


def _request(sample: Warmup, given: InstanceContext) -> InferRequest:
    """A request of a batch size of 1. raises StatusError"""
    config, request = given.config, InferRequest({})
    declared = {tensor.name for tensor in config.input}
    batch = (1,) if config.max_batch_size else ()
    try:
        batched = {name: _array(said, given).reshape(batch + said.dims) for name, said in sample.inputs.items()}
        RequestValidator(config).take(
            request,
            [
                RawInput(name, wire_name(sample.inputs[name].data_type), array.shape, array)
                for name, array in batched.items()
                if name in declared or config.sequence_batching is None
            ],
        )
    except StatusError as error:
        raise _failed(sample, error) from None
    if config.sequence_batching is not None:  # a sequence of one request; what the sample says of its controls counts
        request.correlation_id, request.flags, request.sequence = 1, START | END, RequestSequence(("", 1))
        Controls(config).give(request)
        States(config, given.folder).give(request)
        own = {name: array for name, array in batched.items() if name not in declared}
        if unknown := next((name for name in own if name not in request.inputs), None):
            raise _failed(sample, invalid(f"unexpected inference input '{unknown}' for model '{config.name}'"))
        request.inputs.update(own)
    return request


def _array(said: WarmupInput, given: InstanceContext) -> Array:
    """Flat. raises StatusError"""
    datatype, n = wire_name(said.data_type), prod(said.dims)
    if said.input_data_file:
        return read_tensor(given.folder / "warmup" / said.input_data_file, datatype, n)
    if datatype == BYTES:
        return objects([b""] * n)
    dtype = np.dtype(DTYPES[datatype])
    if said.zero_data:
        return np.zeros(n, dtype)
    rng = np.random.default_rng(0)  # the same at each start
    found: Array = rng.random(n)
    if said.data_type is DataType.TYPE_BOOL:
        found = found < 0.5
    elif dtype.kind in "iu":
        found = np.frombuffer(rng.bytes(n * dtype.itemsize), dtype)
    return found.astype(dtype)
