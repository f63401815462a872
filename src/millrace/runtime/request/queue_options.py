"""Queueing options of a request (priority, tenant, queue timeout). `admission_policy.py` applies them."""

from dataclasses import dataclass

from millrace.errors import RequestError

MAX_PRIORITY = (
    100  # in either direction: with aging (`admission_policy.py`), every request eventually becomes its tenant's first
)
MAX_WAIT_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Queueing options of a request. raises RequestError naming the field

    priority: lower goes first, as in vLLM; tenant: whose share the request uses
    queue_timeout_s: seconds to wait for the first step, after which the request is aborted
    """

    priority: int = 0
    tenant: str = ""
    queue_timeout_s: float | None = None

    def __post_init__(self) -> None:
        priority, timeout_s = self.priority, self.queue_timeout_s
        if not isinstance(priority, int) or isinstance(priority, bool) or not abs(priority) <= MAX_PRIORITY:
            raise RequestError(
                f"priority is {priority!r:.60}",
                f"an integer from {-MAX_PRIORITY}, which goes first, to {MAX_PRIORITY}",
                "change priority, or leave it out", "priority",
            )  # fmt: skip
        if timeout_s is not None and not 0 < timeout_s <= MAX_WAIT_S:
            raise RequestError(
                f"queue_timeout_s is {timeout_s!r:.60}", f"seconds: above 0, and at most {MAX_WAIT_S:.0f}",
                "change queue_timeout_s, or leave it out", "queue_timeout_s",
            )  # fmt: skip


DEFAULT_QUEUE_OPTIONS = QueueOptions()
