"""Whether an instance says itself that it is ready, asked again and again: `is_ready` of a model.py, as Triton does."""

import threading
import time
from collections.abc import Callable

from millrace.model_repository.python_backend.stub.model_runner import said

EVERY_S = 0.5  # between two answers
PATIENCE_S = 5.0  # Triton's: whoever has not answered by then is not ready


class ReadinessProbe:
    """Of one instance. `ask` is called in threads of its own, never twice at a time, beside whatever it computes."""

    def __init__(self, name: str, ask: Callable[[], bool], tell: Callable[[str], None]) -> None:
        """tell: called, from another thread, with why it is not ready, or "" once it is; until it is called it is"""
        self._name, self._ask, self._tell, self._told = name, ask, tell, ""
        self._lock, self._stopped, self._has_said = threading.Lock(), threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=f"millrace-{name}-ready", daemon=True).start()

    def stop(self) -> None:
        """Nothing is told any more; does not wait."""
        with self._lock:
            self._stopped.set()

    def wait(self) -> None:
        """For its first answer, or until that is late: whoever is told later that the model is loaded knows it."""
        self._has_said.wait(PATIENCE_S + EVERY_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            began_s, answer = time.monotonic(), list[str]()
            asking = threading.Thread(target=lambda into=answer: into.append(self._answer()), daemon=True)
            asking.start()
            asking.join(PATIENCE_S)
            self._say(answer[0] if answer else f"its is_ready takes more than {PATIENCE_S:g} s")
            self._has_said.set()
            asking.join()
            self._stopped.wait(max(0.0, EVERY_S - (time.monotonic() - began_s)))

    def _answer(self) -> str:
        try:
            return "" if self._ask() else "it says that it is not ready"
        except BaseException as error:  # noqa: BLE001  a model may raise anything; what it raised is why
            return f"its is_ready failed: {said(error)}"

    def _say(self, why: str) -> None:
        with self._lock:
            if why != self._told and not self._stopped.is_set():
                self._told = why
                self._tell(why)
