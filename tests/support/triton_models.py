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
            model_name_string = model_name.as_numpy()[0].decode()
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
            name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0].decode()
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
