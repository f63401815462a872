"""Periodic readiness probe of an instance: calls `is_ready` of a model.py, as Triton does."""

import threading
import time
from collections.abc import Callable

from millrace.model_repository.python_backend.stub.model_runner import error_text

INTERVAL_S = 0.5  # between two probes
READINESS_TIMEOUT_S = 5.0  # Triton's: an instance that has not answered by then is not ready


class ReadinessProbe:
    """Probe of one instance. `ask` is called in its own thread, one call at a time, while the instance computes."""

    def __init__(self, name: str, ask: Callable[[], bool], report: Callable[[str], None]) -> None:
        """report: called from another thread with the reason for not being ready, or ""; assumed ready until then"""
        self._name, self._ask, self._report, self._last_reason = name, ask, report, ""
        self._lock, self._stopped, self._has_answered = threading.Lock(), threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=f"millrace-{name}-ready", daemon=True).start()

    def stop(self) -> None:
        """Stop reporting, without waiting."""
        with self._lock:
            self._stopped.set()

    def wait(self) -> None:
        """Wait for the first answer or its timeout, so that readiness is known once the model counts as loaded."""
        self._has_answered.wait(READINESS_TIMEOUT_S + INTERVAL_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            began_s, answer = time.monotonic(), list[str]()
            asking = threading.Thread(target=lambda into=answer: into.append(self._answer()), daemon=True)
            asking.start()
            asking.join(READINESS_TIMEOUT_S)
            self._report_change(answer[0] if answer else f"its is_ready takes more than {READINESS_TIMEOUT_S:g} s")
            self._has_answered.set()
            asking.join()
            self._stopped.wait(max(0.0, INTERVAL_S - (time.monotonic() - began_s)))

    def _answer(self) -> str:
        try:
            return "" if self._ask() else "it says that it is not ready"
        except BaseException as error:  # noqa: BLE001  a model may raise anything; it becomes the reason
            return f"its is_ready failed: {error_text(error)}"

    def _report_change(self, reason: str) -> None:
        with self._lock:
            if reason != self._last_reason and not self._stopped.is_set():
                self._last_reason = reason
                self._report(reason)
