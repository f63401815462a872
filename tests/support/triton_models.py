"""model.py files in the way of Triton's own examples (python_backend, examples/), in words of our own."""

ADD_SUB_CONFIG = """%s
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
BLS_CONFIG = """backend: "python" %s
input [ { name: "MODEL_NAME" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
SQUARE_CONFIG = """backend: "python" %s
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"

# As examples/bls/sync_model.py.
BLS_SYNC = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = json.loads(args["model_config"])

    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            model_name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME")
            model_name_string = model_name.as_numpy()[0]
            infer_request = pb_utils.InferenceRequest(
                model_name=model_name_string,
                requested_output_names=["OUTPUT0", "OUTPUT1"],
                inputs=[in_0, in_1],
                preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),
                request_id=request.request_id(),
                trace=request.trace(),
            )
            infer_response = infer_request.exec()
            if infer_response.has_error():
                raise pb_utils.TritonModelException(infer_response.error().message())
            responses.append(pb_utils.InferenceResponse(output_tensors=infer_response.output_tensors()))
        return responses
"""

# As examples/bls/async_model.py.
BLS_ASYNC = """
import asyncio
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0]
            infer_response_awaits = []
            for model_name, output in ((name, "OUTPUT0"), (name, "OUTPUT1")):
                infer_request = pb_utils.InferenceRequest(
                    model_name=model_name, requested_output_names=[output], inputs=[in_0, in_1])
                infer_response_awaits.append(infer_request.async_exec())
            infer_responses = await asyncio.gather(*infer_response_awaits)
            for infer_response in infer_responses:
                if infer_response.has_error():
                    raise pb_utils.TritonModelException(infer_response.error().message())
            found = [pb_utils.get_output_tensor_by_name(infer_responses[i], f"OUTPUT{i}") for i in (0, 1)]
            responses.append(pb_utils.InferenceResponse(output_tensors=found))
        return responses
"""

# As examples/decoupled/square_model.py: IN says how often it is answered with.
SQUARE = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.inflight_thread_count = 0
        self.inflight_thread_count_lck = threading.Lock()

    def execute(self, requests):
        for request in requests:
            self.process_request(request)
        return None

    def process_request(self, request):
        thread = threading.Thread(
            target=self.response_thread,
            args=(request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()))
        thread.daemon = True
        with self.inflight_thread_count_lck:
            self.inflight_thread_count += 1
        thread.start()

    def response_thread(self, response_sender, in_input):
        for _ in range(in_input[0]):
            out_output = pb_utils.Tensor("OUT", np.array([in_input[0]], np.int32))
            response_sender.send(pb_utils.InferenceResponse(output_tensors=[out_output]))
        response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.inflight_thread_count_lck:
            self.inflight_thread_count -= 1

    def finalize(self):
        assert self.inflight_thread_count == 0
"""

# As examples/bls_decoupled/sync_model.py: the sum of what square answers.
BLS_DECOUPLED_SYNC = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            current_id = request.request_id()
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            infer_request = pb_utils.InferenceRequest(
                model_name="square_int32", inputs=[pb_utils.Tensor("IN", value)], requested_output_names=["OUT"])
            infer_responses = infer_request.exec(decoupled=True)
            response_value = np.array([0], np.int32)
            for infer_response in infer_responses:
                if infer_response.has_error():
                    raise pb_utils.TritonModelException(infer_response.error().message())
                if len(infer_response.output_tensors()) > 0:
                    response_value += pb_utils.get_output_tensor_by_name(infer_response, "OUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", response_value)]))
        return responses
"""

# As examples/bls_decoupled/async_model.py.
BLS_DECOUPLED_ASYNC = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            in_tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            awaits = [
                pb_utils.InferenceRequest(
                    model_name="square_int32", inputs=[in_tensor], requested_output_names=["OUT"]
                ).async_exec(decoupled=True)
                for _ in range(2)
            ]
            total = np.array([0], np.int32)
            first, second = await asyncio.gather(*awaits)
            for infer_response in first:
                if len(infer_response.output_tensors()) > 0:
                    total += pb_utils.get_output_tensor_by_name(infer_response, "OUT").as_numpy()
            async for infer_response in second:
                if len(infer_response.output_tensors()) > 0:
                    total += pb_utils.get_output_tensor_by_name(infer_response, "OUT").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total)]))
        return responses
"""

# As examples/custom_metrics.
CUSTOM_METRICS = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.metric_family = pb_utils.MetricFamily(
            name="requests_process_latency_ns",
            description="Cumulative time spent processing requests",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.metric = self.metric_family.Metric(labels={"model": args["model_name"], "version": args["model_version"]})
        self.histogram_family = pb_utils.MetricFamily(
            name="sizes", description="Elements\\nof \\"IN\\"", kind=pb_utils.MetricFamily.HISTOGRAM)
        self.sizes = self.histogram_family.Metric(labels={}, buckets=[0.5, 2])

    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = request.inputs()[0]
            self.sizes.observe(float(tensor.as_numpy()[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]))
        self.metric.increment(2)
        self.metric.increment(1.5)
        assert self.metric.value() >= 3.5
        return responses
"""

# As qa/L0_backend_python's rescheduling: answered by the time it comes again, with the flags and ids it came with.
RESCHEDULED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            seen = self.seen.setdefault(request.correlation_id(), [])
            seen.append(request.flags())
            if len(seen) <= request.inputs()[0].as_numpy()[0]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                found = np.array([1000 * len(seen) + 10 * seen[0] + sum(seen[1:])], np.int32)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)]))
        return responses
"""

# As examples/decoupled with iterative scheduling: one response each time that it is executed, IN of them.
GENERATES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.state = {}

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            n = self.state.get(request.correlation_id(), 0) + 1
            self.state[request.correlation_id()] = n
            is_last = n == request.inputs()[0].as_numpy()[0]
            if not is_last:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n], np.int32))]),
                        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)
"""
ITERATIVE = "sequence_batching { iterative_sequence: true %s } "
