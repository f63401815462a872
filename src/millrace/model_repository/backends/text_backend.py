"""What language models and encoders of ours share in a repository: texts as tensors, and errors of the engine."""

from collections.abc import Callable, Sequence

from millrace.errors import BusyError, MachineError, RequestError
from millrace.model_repository.backends.backend import Instance
from millrace.model_repository.request.infer_request import InferRequest
from millrace.model_repository.request.status_code import Code, StatusError, invalid
from millrace.runtime.scheduling.step import EngineThread


class EngineInstance(Instance):
    """An engine whose loop has stopped by itself, for it computes nothing any more, is lost."""

    answers_later = True
    _tell_lost: Callable[[str], None] | None = None

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    def when_lost(self, tell: Callable[[str], None]) -> None:
        self._tell_lost = tell
        self._look()  # it may have stopped as it was warmed up

    def _look(self) -> None:
        """Called by the loop's thread after whatever it told."""
        tell = self._tell_lost
        if self._thread.dead_because and tell is not None:
            self._tell_lost = None
            tell(f"the engine has stopped: {self._thread.dead_because}")


def begin_each(requests: Sequence[InferRequest], begin: Callable[[InferRequest], None]) -> None:
    """begin: raises StatusError, RequestError, BusyError, MachineError, which is the answer of its request alone"""
    for request in requests:
        try:
            begin(request)
        except StatusError as error:
            request.fail(error)
        except RequestError as error:
            request.fail(invalid(f"{request.named}{error.what}; expected: {error.expected}"))
        except (BusyError, MachineError) as error:
            request.fail(StatusError(Code.UNAVAILABLE, f"{request.named}{error.what}"))


def texts_of(request: InferRequest, name: str) -> list[str]:
    """Of its input; none where it has none of that name. raises StatusError"""
    array = request.inputs.get(name)
    try:
        return [] if array is None else [value.decode() for value in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise invalid(f"{request.named}{name} holds bytes that are no UTF-8: {error}") from None
