"""A model.py and its `TritonPythonModel`: loaded, asked and finalised; what runs it is the same in every process."""

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
from .host_interface import EXECUTION, Answer, Execution, Host, Incoming
from .importing import forget, imported
from .pb_utils import NAMES, utils_of
from .requests import InferenceRequest
from .responses import InferenceResponse, deliver
from .tensors import NAMES as TYPE_NAMES
from .tensors import TYPES

_CLASS = "TritonPythonModel"
_SAYS = ("is_model_ready", "is_ready")  # of Triton's tests, and of its documentation
_ERROR = 2  # a level of the log, as `Host.log` has them
_MOST_NAMED = 8  # requests in a line of the log
_INSTALL = (
    "; install its package into the environment that runs the model: that of millrace serve, or the one that "
    "EXECUTION_ENV_PATH in config.pbtxt names"
)
_PATIENCE_S = 5.0  # with the thread of an event loop that a model holds up


class GuestError(Exception):
    """A model that cannot be loaded, or a batch that has no answer; the words are those that a client reads."""


@dataclass(frozen=True)
class RaisedByModelError:
    """arguments: of `initialize`. outputs: all that it has"""

    file: Path
    arguments: Mapping[str, str]
    outputs: Sequence[str]
    is_decoupled: bool

    @property
    def name(self) -> str:
        return self.arguments["model_name"]


class PythonModelRunner:
    """One instance. All but what it sends happens in the thread that makes it."""

    def __init__(self, said: RaisedByModelError, host: Host) -> None:
        """raises GuestError"""
        self._said, self._host = said, host
        self._loop: asyncio.AbstractEventLoop | None = None  # of a model whose `execute` is async
        self._thread: threading.Thread | None = None  # that runs the loop of a decoupled one
        self._module_name = ""
        try:
            if TYPE_NAMES.index("BF16") not in TYPES and '"TYPE_BF16"' in said.arguments["model_config"]:
                raise GuestError(f"model '{said.name}' has tensors of BF16: install ml_dtypes where it runs")
            pb_utils = utils_of(host)
            self._request = pb_utils.InferenceRequest
            self._module_name, made = _model_class(said.file, pb_utils, host.is_alone)
            self._model = made()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(said.arguments))
            if not hasattr(self._model, "execute"):
                raise GuestError(f"{_CLASS} of model '{said.name}' has no function execute")
        except BaseException as error:  # sys.exit, too
            forget(self._module_name)
            if isinstance(error, GuestError):
                raise
            raise GuestError(told(error, said.file)) from error
        host.is_executing = True

    def execute(self, requests: Sequence[Incoming]) -> None:
        """raises GuestError, which is the answer of those that have none"""
        asked = [
            self._request.given(request, self._said.outputs, self._said.name, self._said.is_decoupled)
            for request in requests
        ]
        token = EXECUTION.set(Execution(self._host, requests, threading.get_ident()))
        self._host.is_busy = True
        try:
            answers = self._model.execute(asked)
            if inspect.iscoroutine(answers):
                if self._said.is_decoupled:
                    self._go_on(answers, asked)
                    return
                answers = self._awaited(answers, requests)
            self._host.answering()
            self._answer(requests, asked, answers)
        except BaseException as error:  # sys.exit, too
            failed = self._failed(error)
            self._log_unheard(asked, failed)
            for one in asked:
                one.answered()
            raise GuestError(failed) from error
        finally:
            self._host.is_busy = False
            EXECUTION.reset(token)

    def _failed(self, error: BaseException) -> str:
        words = told(error, self._said.file)
        if self._said.is_decoupled:  # as Triton has it
            return words
        return f"Failed to process the request(s) for model instance '{self._host.name}', message: {words}"

    def _log_unheard(self, asked: Sequence[InferenceRequest], failed: str) -> None:
        """An exception after the final response: its client hears of it no more, so the log has it."""
        unheard = [one.request_id() or "<id_unknown>" for one in asked if one.is_answered]
        if unheard:
            what = f"model '{self._said.name}' failed after its final response to request"
            self._host.log(f"{what} {', '.join(unheard[:_MOST_NAMED])}: {failed}", _ERROR)

    def _go_on(self, work: Coroutine[Any, Any, Any], asked: Sequence[InferenceRequest]) -> None:
        """A decoupled model whose `execute` is async has any number of requests at a time, in one event loop."""
        loop = self._running_loop()
        requests = [one._incoming for one in asked if one._incoming is not None]

        async def run() -> None:
            EXECUTION.set(Execution(self._host, requests, None))
            try:
                self._answer(requests, asked, await work)
            except BaseException as error:  # noqa: BLE001  as in `execute`: sys.exit, too, is the answer
                failed = Answer(error=TritonError(self._failed(error)))
                self._log_unheard(asked, self._failed(error))
                if not any(one.is_answered for one in asked):  # Triton logs it, too
                    self._host.log(f"model '{self._said.name}' failed: {self._failed(error)}", _ERROR)
                for one, request in zip(asked, requests, strict=True):
                    one.answered()
                    request.send(failed, True)

        asyncio.run_coroutine_threadsafe(run(), loop)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """In a thread of its own, from now on."""
        self._loop = self._loop or asyncio.new_event_loop()
        if self._thread is None:
            name = f"millrace-{self._host.name}-async"
            self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
            self._thread.start()
        return self._loop

    def _awaited(self, work: Coroutine[Any, Any, Any], requests: Sequence[Incoming]) -> Any:
        """What a coroutine of a model that is not decoupled returns. Tasks that it leaves behind go on in a thread."""
        if self._thread is not None:
            of = Execution(self._host, requests, self._thread.ident)

            async def run() -> Any:
                EXECUTION.set(of)
                return await work

            return asyncio.run_coroutine_threadsafe(run(), self._running_loop()).result()
        self._loop = self._loop or asyncio.new_event_loop()
        try:
            return self._loop.run_until_complete(work)
        finally:
            if asyncio.all_tasks(self._loop):
                self._running_loop()

    def _answer(self, requests: Sequence[Incoming], asked: Sequence[InferenceRequest], answers: Any) -> None:
        if self._said.is_decoupled:
            if answers is not None:
                raise ReturnedError(_ONLY_NONE.format(self._host.name))
            for one in asked:
                if one.is_rescheduled:
                    one.execute_again()
            return
        if answers is None and all(one.has_sender or one.is_rescheduled for one in asked):
            answers = [None] * len(asked)
        if not isinstance(answers, list | tuple):
            raise ReturnedError(f"Expected a list in the execute return, found type '{type(answers).__name__}'.")
        if len(answers) != len(requests):
            raise ReturnedError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}"
            )
        for one, answer in zip(asked, answers, strict=True):
            if one.is_rescheduled and answer is not None:
                raise ReturnedError(
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(answer).__name__}'."
                )
        for request, one, answer in zip(requests, asked, answers, strict=True):
            if one.is_rescheduled:
                one.execute_again()
            elif isinstance(answer, InferenceResponse):
                if one.is_answered:
                    self._log_unheard([one], "it returned a second response, which no client gets")
                else:
                    deliver(request, answer, True)
                one.answered()
            elif answer is not None or not one.has_sender:
                raise ReturnedError(
                    f"Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(answer).__name__}'."
                )

    @property
    def has_say(self) -> bool:
        """Whether it says itself if it is ready."""
        return any(hasattr(self._model, name) for name in _SAYS)

    def is_ready(self) -> bool:
        """From any thread. raises GuestError"""
        try:
            name = next(name for name in _SAYS if hasattr(self._model, name))
            answer = getattr(self._model, name)()
            answer = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
            if not isinstance(answer, bool):
                raise ReturnedError(f"{name} returned {type(answer).__name__}, where a bool is expected")
            return answer
        except BaseException as error:  # sys.exit, too
            raise GuestError(told(error, self._said.file)) from error

    def close(self) -> None:
        self._host.is_executing, self._host.is_closing = False, True
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        finally:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_PATIENCE_S)
            if self._loop is not None and not self._loop.is_running():
                self._loop.close()
            forget(self._module_name)


_ONLY_NONE = "Python model '{}' is using the decoupled mode and the execute function must return None."


def completed_by(file: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the model's own `auto_complete_config` makes of its configuration; None: it has none. raises GuestError"""
    name = ""
    try:
        name, found = _model_class(file, utils_of(None), False)
        if not hasattr(found, "auto_complete_config"):
            return None
        made = found.auto_complete_config(ModelConfig(config))
        if not isinstance(made, ModelConfig):
            raise GuestError(f"auto_complete_config of model '{config['name']}' must return a ModelConfig")
        return made.as_dict()
    except BaseException as error:  # sys.exit, too
        if isinstance(error, GuestError):
            raise
        raise GuestError(told(error, file)) from error
    finally:
        forget(name)


def _model_class(file: Path, pb_utils: ModuleType, is_alone: bool) -> tuple[str, Any]:
    """The name of its module, and the class."""
    later = utils_of(None)
    module = imported(file, dict.fromkeys(NAMES, pb_utils), dict.fromkeys(NAMES, later), is_alone)
    found = getattr(module, _CLASS, None)
    if found is None:
        forget(module.__name__)
        raise GuestError(f"{file.name} has no class {_CLASS}")
    return module.__name__, found


def told(error: BaseException, file: Path) -> str:
    """With the last line of the model's own that it came through; not the folder, which is nobody's business."""
    folder = file.absolute().parent.parent  # the import system makes names of files absolute
    if isinstance(error, ReturnedError):
        return str(error)
    lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(folder)]
    at = f"; at {Path(lines[-1].filename).name}({lines[-1].lineno}): {lines[-1].name}" if lines else ""
    missing = isinstance(error, ModuleNotFoundError) and error.name is not None
    return said(error) + at + (_INSTALL if missing else "")


def said(error: BaseException) -> str:
    """Its type and its words, which are a model's own, too, and may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  what was raised first is what matters
        return f"{type(error).__name__}, without words: its __str__ raises"
