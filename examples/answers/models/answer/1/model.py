"""Guard, retrieve, answer: the first response has the sources, the others what the language model adds as it goes."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

REFUSAL = "I cannot help with that."
MAX_TOKENS = 64


class TritonPythonModel:
    def initialize(self, args):
        self.prompt = Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")

    async def execute(self, requests):
        for request in requests:  # decoupled and async: other requests are begun while this one waits
            sender = request.get_response_sender()
            try:
                await self._answer(request, sender)
            except pb_utils.TritonModelException as error:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    async def _answer(self, request, sender):
        question = pb_utils.get_input_tensor_by_name(request, "question").as_numpy()
        (refused,) = await ask("guard", ["REFUSED"], QUESTION=question)
        if refused[0]:
            sender.send(said(REFUSAL))
            return
        (passages,) = await ask("retrieve", ["PASSAGE"], QUESTION=question)
        sender.send(said("", passages))
        facts = "\n".join(passage.decode() for passage in passages)
        prompt = self.prompt.format(passages=facts, question=question[0].decode())
        asked = pb_utils.get_input_tensor_by_name(request, "max_tokens")
        tensors = {
            "text_input": np.array([prompt.encode()], dtype=object),
            "max_tokens": asked.as_numpy() if asked is not None else np.array([MAX_TOKENS], np.int32),
            "temperature": np.array([0], np.float32), "stream": np.array([True]),
        }  # fmt: skip
        asking = requested("llm", ["text_output"], tensors)
        async for response in await asking.async_exec(decoupled=True):
            if response.has_error():
                raise pb_utils.TritonModelException(f"llm: {response.error().message()}")
            for tensor in response.output_tensors():  # none where it only says that it ends
                sender.send(said(tensor.as_numpy()[0].decode()))


def said(text, sources=()):
    tensors = {
        "text_output": np.array([text.encode()], dtype=object), "source": np.array(list(sources), dtype=object)
    }  # fmt: skip
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def requested(model, outputs, tensors):
    inputs = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=inputs)


async def ask(model, outputs, **inputs):
    """Its outputs as arrays. raises TritonModelException"""
    response = await requested(model, outputs, inputs).async_exec()
    if response.has_error():
        raise pb_utils.TritonModelException(f"{model}: {response.error().message()}")
    return [pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in outputs]
