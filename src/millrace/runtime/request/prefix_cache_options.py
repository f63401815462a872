"""Prefix-cache options of a request: which requests share its prompt, how long it is kept, and pinning."""

from dataclasses import dataclass, fields

from millrace.errors import RequestError
from millrace.runtime.kv.pages import MAX_CACHE_PRIORITY

MAX_SALT_CHARACTERS = 256
MAX_TTL_S = 7 * 86400.0
PIN_S = 3600.0  # default duration of a pin


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of one prompt. raises RequestError naming the field, which is `cache_` and its name here

    salt: only requests with the same salt share pages; the server derives it from the tenant, too
    priority: pages of a lower one are evicted first; None: keep their priority, which is 35 for new pages
    ttl_s: seconds after which priority or pin expire; None: an hour for a pin, never for a priority
    pin: its full pages are not evicted
    """

    salt: str = ""
    priority: int | None = None
    ttl_s: float | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.salt, str) or len(self.salt) > MAX_SALT_CHARACTERS:
            what = f"has {len(self.salt)} characters" if isinstance(self.salt, str) else _is(self.salt)
            raise _refused("salt", what, f"a text of at most {MAX_SALT_CHARACTERS} characters", "send a digest of it")
        if not isinstance(self.pin, bool):
            raise _refused("pin", _is(self.pin), "true or false")
        if self.priority is not None and not (
            _is_number(self.priority, int) and 0 <= self.priority <= MAX_CACHE_PRIORITY
        ):
            raise _refused(
                "priority", _is(self.priority), f"an integer from 0, which goes first, to {MAX_CACHE_PRIORITY}"
            )
        if self.ttl_s is not None and not (_is_number(self.ttl_s, int | float) and 0 < self.ttl_s <= MAX_TTL_S):
            raise _refused("ttl_s", _is(self.ttl_s), f"seconds: above 0, and at most {MAX_TTL_S:.0f}, which is a week")
        if self.pin and self.priority is not None:
            fix = "leave cache_priority out: what is pinned is not given up"
            raise _refused("priority", "and cache_pin are both set", "one of them", fix)
        if self.ttl_s is not None and not self.pin and self.priority is None:
            fix = "send cache_pin or cache_priority, too"
            raise _refused("ttl_s", "is set, and nothing that it could end", "it beside a pin or a priority", fix)

    def until_s(self, now_s: float) -> float | None:
        """Return when priority or pin expire."""
        ttl_s = PIN_S if self.pin and self.ttl_s is None else self.ttl_s
        return None if ttl_s is None else now_s + ttl_s


DEFAULT_CACHE_OPTIONS = CacheOptions()
OPTIONS = frozenset(f"cache_{f.name}" for f in fields(CacheOptions))  # the names in requests and prompts


def _is_number(value: object, kind: type | object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # type: ignore[arg-type]


def _is(value: object) -> str:
    small = isinstance(value, str | float | bool) or (isinstance(value, int) and abs(value) < 10**40)
    return f"is {value!r:.80}" if small else f"is of type {type(value).__name__}"


def _refused(name: str, what: str, expected: str, fix: str = "") -> RequestError:
    field = f"cache_{name}"
    return RequestError(f"{field} {what}", expected, fix or f"change {field}, or leave it out", param=field)
