"""Asks the two models above and compares the parameters of their responses."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            single = self.said(request, "RESPONSE_PARAMETERS")
            several = self.said(request, "RESPONSE_PARAMETERS_DECOUPLED")
            same = self.single(single) == json.loads(single) and self.several(several) == json.loads(several)
            output = np.array([[str(same)]], dtype=np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)]))
        return responses

    def said(self, request, name):
        return pb_utils.get_input_tensor_by_name(request, name).as_numpy().flatten()[0].decode()

    def asked(self, model, said):
        tensor = pb_utils.Tensor("RESPONSE_PARAMETERS", np.array([[said]], dtype=np.object_))
        return pb_utils.InferenceRequest(model_name=model, inputs=[tensor], requested_output_names=["OUTPUT"])

    def single(self, said):
        return json.loads(self.asked("response_parameters", said).exec().parameters())

    def several(self, said):
        answers = self.asked("response_parameters_decoupled", said).exec(decoupled=True)
        return [json.loads(answer.parameters()) for answer in answers if answer.output_tensors()]
