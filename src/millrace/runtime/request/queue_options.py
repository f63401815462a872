"""What a request says of its turn; `admission_policy.py` says whose it is."""

from dataclasses import dataclass

from millrace.errors import RequestError

MAX_PRIORITY = (
    100  # either way: by ageing (`admission_policy.py`), whoever claims least is first of its tenant's in the end
)
MAX_WAIT_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """What a request says of its turn. raises RequestError naming the field

    priority: lower goes first, as in vLLM; tenant: of whose share it takes
    queue_timeout_s: it is given up when it has waited so long for its first step
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


NO_CLAIM = QueueOptions()
