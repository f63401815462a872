"""Asks the decoupled model `square_int32` and sends each of its responses."""

import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=self.ask, args=(request.get_response_sender(), array), daemon=True).start()

    def ask(self, sender, array):
        asked = pb_utils.InferenceRequest(
            model_name="square_int32", inputs=[pb_utils.Tensor("IN", array)], requested_output_names=["OUT"]
        )
        for answer in asked.exec(decoupled=True):
            if answer.output_tensors():
                output = pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", output)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
