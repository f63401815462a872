"""Encoders in a model repository (backend `millrace`, as language models): `text_input` -> `embedding`.

Without batching, a request has any number of texts, [n], and gets their vectors, [n, width]; with batching, one text
per row. Texts of all clients share the encoder's steps, so one instance suffices and no batcher is needed. Vectors
equal those of `/v1/embeddings`.
"""

from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path

from millrace.api.offline_generate import prompt_tokens
from millrace.checkpoint.checkpoint import CONFIG
from millrace.checkpoint.config.config_reader import family_of
from millrace.checkpoint.tokenizer.tokenizer import read_json_object
from millrace.engine.artifact.manifest import MANIFEST, read_manifest
from millrace.errors import BusyError, EngineError
from millrace.model_repository.backends.backend import InstanceContext
from millrace.model_repository.backends.text_backend import EngineInstance, begin_each, input_texts
from millrace.model_repository.config.enums import DataType
from millrace.model_repository.config.message_fields import empty
from millrace.model_repository.config.model_config import ModelConfig, ModelInput, ModelOutput
from millrace.model_repository.request.infer_request import InferRequest, InferResponse
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.runtime.encoder_loop import MAX_INPUTS, EmbeddingJob, Vectors, check_ids, truncate_ids, truncation
from millrace.runtime.open_engine import OpenedEncoder

TEXT, OUT = "text_input", "embedding"
CUT = "truncate_prompt_tokens"  # a parameter of requests


def is_encoder(folder: Path) -> bool:
    """Return whether an engine or checkpoint is an encoder. raises EngineError, CheckpointError if it is neither"""
    if (folder / MANIFEST).is_file():
        return read_manifest(folder).is_encoder
    return (folder / CONFIG).is_file() and family_of(read_json_object(folder / CONFIG)).is_encoder


def complete_config(config: ModelConfig) -> ModelConfig:
    """Add the input and the output if the configuration lacks them; the vector width stays variable."""
    texts = replace(empty(ModelInput), name=TEXT, data_type=DataType.TYPE_STRING, dims=_dims(config, texts=True))
    vectors = replace(empty(ModelOutput), name=OUT, data_type=DataType.TYPE_FP32, dims=_dims(config, texts=False))
    return replace(config, input=config.input or (texts,), output=config.output or (vectors,))


def _dims(config: ModelConfig, *, texts: bool) -> tuple[int, ...]:
    if config.max_batch_size:
        return (1,) if texts else (-1,)
    return (-1,) if texts else (-1, -1)


class Encoder(EngineInstance):
    def __init__(self, context: InstanceContext, opened: OpenedEncoder) -> None:
        """opened: closed with the instance, or if it cannot be served. raises StatusError"""
        self._opened, self._running = opened, dict[InferRequest, EmbeddingJob]()
        try:
            if opened.pairs:
                raise invalid(
                    f"model '{context.config.name}' is a cross-encoder, which a repository does not serve: "
                    "millrace serve MODEL has /v1/score and /v1/rerank"
                )
            _check(context.config, opened.limits.width)
        except StatusError:
            opened.close()
            raise
        self._loop = opened.loop()
        super().__init__(self._loop.thread)
        self._loop.start(self._report_dead_engine)

    def execute(self, requests: Sequence[InferRequest]) -> None:
        begin_each(requests, self._begin)

    def _begin(self, request: InferRequest) -> None:
        """Submit a request to the encoder. raises StatusError, RequestError, BusyError"""
        limits, tokenizer, limit = self._opened.limits, self._opened.tokenizer, self._max_tokens(request)
        prompts = []
        for i, text in enumerate(_texts(request)):
            _, ids = prompt_tokens(tokenizer, text)
            prompt = ids if limit is None else truncate_ids(ids, limit, tokenizer.special_around)
            prompts.append(check_ids(prompt, limits, f"text {i}"))
        job = self._loop.submit(prompts)
        self._running[request] = job
        if request.token_usage is not None:
            request.token_usage.add(prompt=sum(map(len, prompts)))
        job.future.add_done_callback(lambda done: self._answer(request, done))
        if request.cancelled:
            job.future.cancel()

    def _max_tokens(self, request: InferRequest) -> int | None:
        """Return the truncation length in tokens; None for no truncation. raises StatusError, RequestError"""
        for name in request.parameters:
            if name != CUT:
                raise invalid(f"{request.error_prefix}unexpected parameter '{name}': {CUT} is the only one")
        cut = request.parameters.get(CUT)
        if cut is not None and not isinstance(cut, int):
            raise invalid(f"{request.error_prefix}{CUT} is {cut!r:.60}, and a number is expected")
        return truncation(cut, self._opened.limits.max_context)

    def _answer(self, request: InferRequest, done: "Future[Vectors]") -> None:
        """Answer a request, in the encoder's thread or in a cancelling one."""
        self._running.pop(request, None)
        try:
            request.send(InferResponse({OUT: done.result()}))
        except CancelledError:
            request.fail(StatusError(Code.CANCELLED, f"{request.error_prefix}the request was cancelled"))
        except (EngineError, BusyError) as error:
            request.fail(StatusError(Code.INTERNAL, f"{request.error_prefix}{error.what}"))

    def on_cancel(self, request: InferRequest) -> None:
        if (job := self._running.get(request)) is not None:
            job.future.cancel()

    def close(self) -> None:
        self._loop.stop()
        self._opened.close()


def _check(config: ModelConfig, width: int) -> None:
    """Check the tensors of the configuration. raises StatusError"""
    names = [t.name for t in config.input], [t.name for t in config.output]
    if names != ([TEXT], [OUT]):
        raise invalid(f"model '{config.name}' must have the input {TEXT} and the output {OUT}: it is an encoder")
    declared_width = config.output[0].dims[-1]
    if declared_width not in (-1, width):
        raise invalid(
            f"model '{config.name}', tensor '{OUT}': its vectors have {width} numbers, and not {declared_width}"
        )


def _texts(request: InferRequest) -> list[str]:
    """Return the texts of a request. raises StatusError"""
    size = request.inputs[TEXT].size
    if size != (request.batch_size or size):
        raise invalid(
            f"{request.error_prefix}{TEXT} has {size} texts in {request.batch_size} rows, and one a row is expected"
        )
    if not 0 < size <= MAX_INPUTS:
        raise invalid(f"{request.error_prefix}{TEXT} has {size} texts, and 1 to {MAX_INPUTS} are expected")
    return input_texts(request, TEXT)
