"""Waits WAIT_SECONDS; decoupled, it sends RESPONSE_NUM responses."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))

    async def execute(self, requests):
        return [await self.answer(request) for request in requests] if not self.decoupled else await self.all(requests)

    async def all(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "RESPONSE_NUM").as_numpy().flatten()[0])
            response = await self.answer(request)
            for _ in range(count):
                sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def answer(self, request):
        seconds = pb_utils.get_input_tensor_by_name(request, "WAIT_SECONDS").as_numpy()
        await asyncio.sleep(float(seconds.flatten()[0]))
        return pb_utils.InferenceResponse([pb_utils.Tensor("DUMMY_OUT", seconds.astype(np.float32))])
