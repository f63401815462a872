"""Warm-up of an instance before its model is ready: computes the samples of `model_warmup` and drops the responses."""

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
from millrace.model_repository.scheduling.sequence_batcher import InferSequence as RequestSequence
from millrace.model_repository.scheduling.sequence_controls import SequenceControls
from millrace.model_repository.scheduling.sequence_states import SequenceStates

log = logging.getLogger(__name__)


def warm_up_instance(instance: Instance, context: InstanceContext) -> Instance:
    """Compute all samples in the instance's thread. raises StatusError, after closing the instance, if one fails"""
    try:
        for sample in context.config.model_warmup:
            if not sample.batch_size:
                log.warning("%s: warmup sample '%s' has a batch size of 0, and is left out", context.name, sample.name)
                continue
            log.info("%s is running warmup sample '%s'", context.name, sample.name)
            for _ in range(max(1, sample.count)):
                _run(instance, sample, [_request(sample, context) for _ in range(sample.batch_size)])
    except BaseException:
        instance.close()
        raise
    return instance


def _run(instance: Instance, sample: Warmup, requests: Sequence[InferRequest]) -> None:
    """Compute one sample. raises StatusError"""
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
        if answers.empty() and not instance.responds_async:
            raise _failed(sample, StatusError(Code.INTERNAL, "it was not answered"))
        failed, final = answers.get()
        if failed is not None:
            raise _failed(sample, failed)
        n_open -= final


def _failed(sample: Warmup, error: StatusError) -> StatusError:
    return invalid(f"failed to run warmup sample '{sample.name}': {error}")


def _request(sample: Warmup, context: InstanceContext) -> InferRequest:
    """Return a sample's request with a batch size of 1. raises StatusError"""
    config, request = context.config, InferRequest({})
    declared = {tensor.name for tensor in config.input}
    batch = (1,) if config.max_batch_size else ()
    try:
        batched = {
            name: _array(warmup_input, context).reshape(batch + warmup_input.dims)
            for name, warmup_input in sample.inputs.items()
        }
        RequestValidator(config).attach_inputs(
            request,
            [
                RawInput(name, wire_name(sample.inputs[name].data_type), array.shape, array)
                for name, array in batched.items()
                if name in declared or config.sequence_batching is None
            ],
        )
    except StatusError as error:
        raise _failed(sample, error) from None
    if config.sequence_batching is not None:  # a sequence of one request; controls in the sample take precedence
        request.correlation_id, request.flags, request.sequence = 1, START | END, RequestSequence(("", 1))
        SequenceControls(config).add_inputs(request)
        SequenceStates(config, context.folder).add_inputs(request)
        own = {name: array for name, array in batched.items() if name not in declared}
        if unknown := next((name for name in own if name not in request.inputs), None):
            raise _failed(sample, invalid(f"unexpected inference input '{unknown}' for model '{config.name}'"))
        request.inputs.update(own)
    return request


def _array(warmup_input: WarmupInput, context: InstanceContext) -> Array:
    """Return a sample input's values as a flat array. raises StatusError"""
    datatype, n = wire_name(warmup_input.data_type), prod(warmup_input.dims)
    if warmup_input.input_data_file:
        return read_tensor(context.folder / "warmup" / warmup_input.input_data_file, datatype, n)
    if datatype == BYTES:
        return objects([b""] * n)
    dtype = np.dtype(DTYPES[datatype])
    if warmup_input.zero_data:
        return np.zeros(n, dtype)
    rng = np.random.default_rng(0)  # reproducible across starts
    array: Array = rng.random(n)
    if warmup_input.data_type is DataType.TYPE_BOOL:
        array = array < 0.5
    elif dtype.kind in "iu":
        array = np.frombuffer(rng.bytes(n * dtype.itemsize), dtype)
    return array.astype(dtype)
