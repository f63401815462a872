"""API keys and their limits. The key file is read again if it changes; limits are per key.

A key is compared with every known key in constant time, so that timing reveals nothing. A minute's allowance may be
used at once and refills evenly; tokens are charged when a request has ended, so one request may overdraw the rest.
"""

import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from starlette.types import Scope

from millrace.errors import ConfigError
from millrace.prometheus import MetricFamily, label_text
from millrace.serve.http.api_key_file import ApiKey, KeyFile, stamp_of
from millrace.serve.http.errors import HttpError
from millrace.serve.http.http_request import CALL, RequestContext, header

LOOK_S = 1.0  # between two looks at the file
LIMITED = "rate_limit_exceeded"  # OpenAI's code
_BEARER = b"bearer "
_NO_TIME_S = 1e-9  # what rounding makes of none
log = logging.getLogger(__name__)


class _Allowance:
    """A token bucket of `per_minute` units, refilled evenly."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute, self._level, self._at_s = per_minute, float(per_minute), now_s

    def wait_s(self, need: float, now_s: float) -> float:
        """Return the seconds until `need` units are available; 0 if they are."""
        rate = self.per_minute / 60
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * rate)
        self._at_s = now_s
        return max(0.0, (need - self._level) / rate)

    def take(self, n: float, now_s: float) -> None:
        self.wait_s(0, now_s)  # what came back until now
        self._level -= n


class _Account:
    """Counters and allowances of one key name; they survive changes of the key file."""

    def __init__(self) -> None:
        self.running = self.requests = self.tokens = 0
        self.refused: Counter[str] = Counter()
        self._allowances: dict[str, _Allowance] = {}

    def allowance(self, limit: str, key: ApiKey, now_s: float) -> _Allowance | None:
        per_minute = key.limits.get(limit)
        allowance = self._allowances.get(limit)
        if per_minute is None:
            self._allowances.pop(limit, None)
            return None
        if allowance is None or allowance.per_minute != per_minute:
            allowance = self._allowances[limit] = _Allowance(per_minute, now_s)
        return allowance

    def tokens_wait_s(self, now_s: float) -> float:
        """Return the seconds until a token may be used."""
        allowance = self._allowances.get("tokens_per_minute")
        return allowance.wait_s(1, now_s) if allowance is not None else 0.0

    def charge(self, n_tokens: int, now_s: float) -> None:
        self.tokens += n_tokens
        if (allowance := self._allowances.get("tokens_per_minute")) is not None:
            allowance.take(n_tokens, now_s)


class Grant:
    """Permission to answer one request. tenant: name of its key, "" if there are not several keys"""

    __slots__ = ("_account", "_clock", "is_admin", "tenant")

    def __init__(
        self, tenant: str, account: _Account | None, clock: Callable[[], float], is_admin: bool = False
    ) -> None:
        self.tenant, self._account, self._clock, self.is_admin = tenant, account, clock, is_admin

    @property
    def owner(self) -> str:
        """Return the tenant whose models it may change; "" for all of them."""
        return "" if self.is_admin else self.tenant

    @property
    def limit_reached(self) -> str:
        """Return why nothing more is computed for an open stream; "" if tokens are left."""
        wait_s = self._account.tokens_wait_s(self._clock()) if self._account is not None else 0.0
        return f"the API key has reached its limit tokens_per_minute; ask again in {math.ceil(wait_s)} s" * (wait_s > 0)

    def charge(self, n_tokens: int) -> None:
        """Charge tokens of a request that continues."""
        if self._account is not None:
            self._account.charge(n_tokens, self._clock())

    def end(self, n_tokens: int = 0) -> None:
        """End the request and charge its tokens; later calls do nothing."""
        if self._account is not None:
            self._account.running -= 1
            self._account.charge(n_tokens, self._clock())
            self._account = None


class ApiKeys:
    """The API keys of one server, for protected routes: `Authorization: Bearer <key>` or `x-api-key: <key>`.

    To be used by one event loop only.
    """

    def __init__(
        self, keys: Sequence[str], file: KeyFile | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """keys: in addition to those of the file"""
        self._own = tuple(ApiKey(key.encode()) for key in keys)
        self._file, self._clock, self._look_at_s = file, clock, 0.0
        self._numbers: dict[bytes, int] = {}  # of keys without a name, as long as the server runs
        self._accounts: dict[str, _Account] = {}
        self._use_keys(file.keys if file is not None else ())

    def _use_keys(self, keys: Sequence[ApiKey]) -> None:
        self._keys = (*self._own, *keys)
        for key in self._keys:
            if not key.name:
                self._numbers.setdefault(key.secret, len(self._numbers))

    @property
    def are_open(self) -> bool:
        """Return whether requests need no key now."""
        return not self._keys

    @property
    def stay_open(self) -> bool:
        """Return whether requests will never need a key: there is none, and no key file."""
        return self._file is None and self.are_open

    def admit(self, scope: Scope) -> None:
        """Admit the request of a scope; its call ends the grant. raises HttpError with 401, or 429 and Retry-After"""
        if self._keys:
            credentials = header(scope, b"authorization"), header(scope, b"x-api-key")
            computes = scope["method"] == "POST" and not scope["path"].endswith("/cancel")
            grant = self.grant(*credentials, computes=computes)
            call: RequestContext = scope[CALL]
            call.tenant, call.is_admin, call.ended = grant.tenant, grant.is_admin, grant.end

    def grant(
        self,
        authorization: bytes | None,
        x_api_key: bytes | None,
        *,
        counts_refusals: bool = True,
        computes: bool = True,
    ) -> Grant:
        """Grant a request by its headers.

        counts_refusals: False if a refused request is tried again on the normal path; computes: False for requests that
        only read or end something, such as a background response: only `requests_per_minute` applies to them
        raises HttpError as `admit`
        """
        if not self._keys:
            return Grant("", None, self._clock)
        now_s = self._clock()
        if now_s >= self._look_at_s:
            self._reload_file(now_s)
        key = self._find_key(authorization, x_api_key)
        name = key.name or f"key {self._numbers[key.secret]}"
        account = self._accounts.setdefault(name, _Account())
        _check(name, key, account, now_s, counts_refusals, computes)
        account.running += 1
        account.requests += 1
        return Grant(name if len(self._keys) > 1 else "", account, self._clock, key.is_admin)

    def _find_key(self, authorization: bytes | None, x_api_key: bytes | None) -> ApiKey:
        credentials = authorization or b""
        token = credentials[len(_BEARER) :].strip() if credentials[: len(_BEARER)].lower() == _BEARER else b""
        if not token and x_api_key is not None:  # Anthropic's clients
            credentials = token = x_api_key.strip()
        matches = [hmac.compare_digest(token, key.secret) for key in self._keys]  # a list: all of them, always
        if any(matches):
            return self._keys[matches.index(True)]
        what = "the API key is wrong" if credentials else "the API key is missing"
        error = HttpError(
            401, "invalid_api_key", what, "Authorization: Bearer <key>", "send a key that the server was given"
        )
        error.headers["www-authenticate"] = "Bearer"
        raise error

    def _reload_file(self, now_s: float) -> None:
        """Read the file again if it has changed; if it cannot be read, the old keys stay valid."""
        self._look_at_s = now_s + LOOK_S
        if self._file is None or not self._file.stamp or (stamp := stamp_of(self._file.path)) == self._file.stamp:
            return
        self._file = replace(self._file, stamp=stamp)  # an invalid file is reported once
        try:
            self._file = KeyFile.read(self._file.path)
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        self._use_keys(self._file.keys)
        log.info("%s has changed: %d API keys", self._file.path, len(self._file.keys))

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all keys, labelled by their names, never by the keys themselves."""
        if not self._keys:
            return
        requests = MetricFamily("millrace:key_requests_total", "counter", "Requests that a key was granted")
        tokens = MetricFamily("millrace:key_tokens_total", "counter", "Prompt and generated tokens of a key")
        refused = MetricFamily("millrace:key_refused_total", "counter", "Requests above a key's limit")
        running = MetricFamily("millrace:key_running", "gauge", "Requests of a key that have not ended")
        for name, account in self._accounts.items():
            labels = label_text({"key": name})
            requests.add(account.requests, labels)
            tokens.add(account.tokens, labels)
            running.add(account.running, labels)
            for limit, n in account.refused.items():
                refused.add(float(n), label_text({"key": name, "limit": limit}))
        yield from (requests, tokens, refused, running)


def _check(name: str, key: ApiKey, account: _Account, now_s: float, counts_refusals: bool, computes: bool) -> None:
    """Check a key's limits, and take a request from them. raises HttpError with 429; a refused request costs nothing"""
    requests = account.allowance("requests_per_minute", key, now_s)
    tokens = account.allowance("tokens_per_minute", key, now_s)
    max_concurrent = key.limits.get("concurrent")
    waits_s = {
        "concurrent": 1.0 if computes and max_concurrent is not None and account.running >= max_concurrent else 0.0,
        "requests_per_minute": requests.wait_s(1, now_s) if requests is not None else 0.0,
        "tokens_per_minute": tokens.wait_s(1, now_s) if computes and tokens is not None else 0.0,
    }
    limit = max(waits_s, key=lambda what: waits_s[what])
    wait_s = math.ceil(waits_s[limit] - _NO_TIME_S)
    if wait_s <= 0:
        if requests is not None:
            requests.take(1, now_s)
        return
    account.refused[limit] += counts_refusals
    error = HttpError(
        429, LIMITED, f"the API key '{name}' has reached its limit {limit}",
        f"at most {key.limits[limit]}" + (" requests at a time" if limit == "concurrent" else ""),
        f"ask again in {wait_s} s",
    )  # fmt: skip
    error.headers["retry-after"] = str(wait_s)
    raise error
