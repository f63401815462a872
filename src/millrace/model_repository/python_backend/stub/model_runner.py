"""Runner of a model.py's `TritonPythonModel`: loads, executes and finalises it, in the server or a stub process."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import ModelConfig
from .errors import ReturnedError, TritonError
from .host_interface import EXECUTION, Execution, Host, Incoming, ModelResponse
from .importing import import_model, remove_modules
from .pb_utils import NAMES, make_pb_utils
from .requests import InferenceRequest
from .responses import InferenceResponse, deliver
from .tensors import NAMES as TYPE_NAMES
from .tensors import TYPES

_CLASS = "TritonPythonModel"
_READINESS_METHODS = ("is_model_ready", "is_ready")  # as in Triton's tests, and in its documentation
_ERROR = 2  # log level of `Host.log`
_MAX_LISTED = 8  # requests listed in a log line
_INSTALL = (
    "; install its package into the environment that runs the model: that of millrace serve, or the one that "
    "EXECUTION_ENV_PATH in config.pbtxt names"
)
EVENT_LOOP_TIMEOUT_S = 5.0  # for the thread of a blocked event loop


class PythonModelError(Exception):
    """A failed load or batch of a Python model; the message is what clients read."""


@dataclass(frozen=True)
class ModelDescription:
    """A model to run. arguments: for `initialize`. outputs: all output names"""

    file: Path
    arguments: Mapping[str, str]
    outputs: Sequence[str]
    is_decoupled: bool

    @property
    def name(self) -> str:
        return self.arguments["model_name"]


class PythonModelRunner:
    """One instance. Everything except sending happens in the thread that creates it."""

    def __init__(self, description: ModelDescription, host: Host) -> None:
        """Import and initialise the model. raises PythonModelError"""
        self._description, self._host = description, host
        self._loop: asyncio.AbstractEventLoop | None = None  # for an async `execute`
        self._thread: threading.Thread | None = None  # runs the loop of a decoupled model
        self._module_name = ""
        try:
            if TYPE_NAMES.index("BF16") not in TYPES and '"TYPE_BF16"' in description.arguments["model_config"]:
                raise PythonModelError(
                    f"model '{description.name}' has tensors of BF16: install ml_dtypes where it runs"
                )
            pb_utils = make_pb_utils(host)
            self._request = pb_utils.InferenceRequest
            self._module_name, model_class = _model_class(description.file, pb_utils, host.is_alone)
            self._model = model_class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(description.arguments))
            if not hasattr(self._model, "execute"):
                raise PythonModelError(f"{_CLASS} of model '{description.name}' has no function execute")
        except BaseException as error:  # sys.exit, too
            remove_modules(self._module_name)
            if isinstance(error, PythonModelError):
                raise
            raise PythonModelError(describe_error(error, description.file)) from error
        host.is_executing = True

    def execute(self, requests: Sequence[Incoming]) -> None:
        """Execute a batch. raises PythonModelError, the response of unanswered requests"""
        model_requests = [
            self._request.from_incoming(
                request, self._description.outputs, self._description.name, self._description.is_decoupled
            )
            for request in requests
        ]
        token = EXECUTION.set(Execution(self._host, requests))
        try:
            answers = self._model.execute(model_requests)
            if inspect.iscoroutine(answers):
                if self._description.is_decoupled:
                    self._run_async(answers, model_requests)
                    return
                answers = self._await(answers, requests)
            self._host.begin_sending()
            self._answer(requests, model_requests, answers)
        except BaseException as error:  # sys.exit, too
            failed = self._failed(error)
            self._log_undelivered(model_requests, failed)
            for model_request in model_requests:
                model_request.mark_answered()
            raise PythonModelError(failed) from error
        finally:
            EXECUTION.reset(token)

    def _failed(self, error: BaseException) -> str:
        words = describe_error(error, self._description.file)
        if self._description.is_decoupled:  # as Triton has it
            return words
        return f"Failed to process the request(s) for model instance '{self._host.name}', message: {words}"

    def _log_undelivered(self, model_requests: Sequence[InferenceRequest], failed: str) -> None:
        """Log an exception after the final response, which the client can no longer receive."""
        unheard = [
            model_request.request_id() or "<id_unknown>"
            for model_request in model_requests
            if model_request.is_answered
        ]
        if unheard:
            message = f"model '{self._description.name}' failed after its final response to request"
            self._host.log(f"{message} {', '.join(unheard[:_MAX_LISTED])}: {failed}", _ERROR)

    def _run_async(self, work: Coroutine[Any, Any, Any], model_requests: Sequence[InferenceRequest]) -> None:
        """Run an async `execute` of a decoupled model in the event loop, with any number of requests at a time."""
        loop = self._running_loop()
        requests = [model_request._incoming for model_request in model_requests if model_request._incoming is not None]

        async def run() -> None:
            EXECUTION.set(Execution(self._host, requests))
            try:
                self._answer(requests, model_requests, await work)
            except BaseException as error:  # noqa: BLE001  as in `execute`: sys.exit, too, is the answer
                failed = ModelResponse(error=TritonError(self._failed(error)))
                self._log_undelivered(model_requests, self._failed(error))
                if not any(model_request.is_answered for model_request in model_requests):  # Triton logs it, too
                    self._host.log(f"model '{self._description.name}' failed: {self._failed(error)}", _ERROR)
                for model_request, request in zip(model_requests, requests, strict=True):
                    model_request.mark_answered()
                    request.send(failed, True)

        asyncio.run_coroutine_threadsafe(run(), loop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, running in its own thread."""
        self._loop = self._loop or asyncio.new_event_loop()
        if self._thread is None:
            name = f"millrace-{self._host.name}-async"
            self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
            self._thread.start()
        return self._loop

    def _await(self, work: Coroutine[Any, Any, Any], requests: Sequence[Incoming]) -> Any:
        """Return the result of a coroutine of a non-decoupled model. Tasks it leaves behind continue in a thread."""
        if self._thread is not None:
            execution = Execution(self._host, requests)

            async def run() -> Any:
                EXECUTION.set(execution)
                return await work

            return asyncio.run_coroutine_threadsafe(run(), self._running_loop()).result()
        self._loop = self._loop or asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(work)
        finally:
            if asyncio.all_tasks(self._loop):
                self._running_loop()

    def _answer(self, requests: Sequence[Incoming], model_requests: Sequence[InferenceRequest], answers: Any) -> None:
        if self._description.is_decoupled:
            if answers is not None:
                raise ReturnedError(_ONLY_NONE.format(self._host.name))
            for model_request in model_requests:
                if model_request.is_rescheduled:
                    model_request.reschedule()
            return
        if answers is None and all(
            model_request.has_sender or model_request.is_rescheduled for model_request in model_requests
        ):
            answers = [None] * len(model_requests)
        if not isinstance(answers, list | tuple):
            raise ReturnedError(f"Expected a list in the execute return, found type '{type(answers).__name__}'.")
        if len(answers) != len(requests):
            raise ReturnedError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}"
            )
        for model_request, answer in zip(model_requests, answers, strict=True):
            if model_request.is_rescheduled and answer is not None:
                raise ReturnedError(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(answer).__name__}'."
                )
        for request, model_request, answer in zip(requests, model_requests, answers, strict=True):
            if model_request.is_rescheduled:
                model_request.reschedule()
            elif isinstance(answer, InferenceResponse):
                if model_request.is_answered:
                    self._log_undelivered([model_request], "it returned a second response, which no client gets")
                else:
                    deliver(request, answer, True)
                model_request.mark_answered()
            elif answer is not None or not model_request.has_sender:
                raise ReturnedError(
                    f"Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(answer).__name__}'."
                )

    @property
    def reports_readiness(self) -> bool:
        """Whether the model has a readiness method."""
        return any(hasattr(self._model, name) for name in _READINESS_METHODS)

    def is_ready(self) -> bool:
        """Call the model's readiness method, from any thread. raises PythonModelError"""
        try:
            name = next(name for name in _READINESS_METHODS if hasattr(self._model, name))
            answer = getattr(self._model, name)()
            answer = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
            if not isinstance(answer, bool):
                raise ReturnedError(f"{name} returned {type(answer).__name__}, where a bool is expected")
            return answer
        except BaseException as error:  # sys.exit, too
            raise PythonModelError(describe_error(error, self._description.file)) from error

    def close(self) -> None:
        self._host.is_executing, self._host.is_closing = False, True
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(EVENT_LOOP_TIMEOUT_S)
            if self._loop is not None and not self._loop.is_running():
                self._loop.close()
            remove_modules(self._module_name)


_ONLY_NONE = "Python model '{}' is using the decoupled mode and the execute function must return None."


def auto_complete(file: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run the model's `auto_complete_config`; None if it has none. raises PythonModelError"""
    name = ""
    try:
        name, model_class = _model_class(file, make_pb_utils(None), False)
        if not hasattr(model_class, "auto_complete_config"):
            return None
        completed = model_class.auto_complete_config(ModelConfig(config))
        if not isinstance(completed, ModelConfig):
            raise PythonModelError(f"auto_complete_config of model '{config['name']}' must return a ModelConfig")
        return completed.as_dict()
    except BaseException as error:  # sys.exit, too
        if isinstance(error, PythonModelError):
            raise
        raise PythonModelError(describe_error(error, file)) from error
    finally:
        remove_modules(name)


def _model_class(file: Path, pb_utils: ModuleType, is_alone: bool) -> tuple[str, Any]:
    """Import model.py; return the name of its module and the model class."""
    later = make_pb_utils(None)
    module = import_model(file, dict.fromkeys(NAMES, pb_utils), dict.fromkeys(NAMES, later), is_alone)
    model_class = getattr(module, _CLASS, None)
    if model_class is None:
        remove_modules(module.__name__)
        raise PythonModelError(f"{file.name} has no class {_CLASS}")
    return module.__name__, model_class


def describe_error(error: BaseException, file: Path) -> str:
    """Describe an error with the last line of the model's own code, without the folder's path."""
    folder = file.absolute().parent.parent  # the import system makes file names absolute
    if isinstance(error, ReturnedError):
        return str(error)
    lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    at = f"; at {Path(lines[-1].filename).name}({lines[-1].lineno}): {lines[-1].name}" if lines else ""
    missing = isinstance(error, ModuleNotFoundError) and error.name is not None
    return error_text(error) + at + (_INSTALL if missing else "")


def error_text(error: BaseException) -> str:
    """Return type and message of an error, whose `__str__` may itself raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  what was raised first is what matters
        return f"{type(error).__name__}, without words: its __str__ raises"
