"""Listening sockets: a TCP port or a Unix socket, and a check of the TLS files."""

import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

from millrace.errors import ConfigError
from millrace.serve.settings import ServerSettings

_BOUND: "WeakSet[socket.socket]" = WeakSet()  # of this process's servers
_ONLY_US = 0o600  # mode of a Unix socket: users who may write to it may send requests
_PROBE_S = 1.0


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[tuple[socket.socket, str]]:
    """Yield a socket, bound but not yet listening, and its URL for clients. raises ConfigError"""
    check_tls(settings)
    if settings.uds is None:
        with bind(settings.host, settings.port, shared=settings.reuse_port) as sock:
            yield sock, url_of(sock, settings)
        return
    path = Path(settings.uds)
    with unix_socket(path) as sock:
        _BOUND.add(sock)
        yield sock, f"unix:{path}"


def _close_inherited() -> None:
    """Close the sockets in a forked child, which would otherwise keep the port after the server has ended."""
    for sock in list(_BOUND):
        if (fd := sock.detach()) < 0:  # closed
            continue
        os.close(fd)  # whatever else refers to it: `close` waits for the event loop, which runs no more here


os.register_at_fork(after_in_child=_close_inherited)


def bind(host: str, port: int, flag: str = "--port", *, shared: bool = False) -> socket.socket:
    """Return a TCP socket, bound but not yet listening. flag: the one that sets the port. raises ConfigError

    shared: other servers of this user may bind the port, too; the kernel gives each new connection to one of them
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name that is none
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}",
            "a free port at an address of this machine",
            f"choose another --host or {flag}, or stop what listens there",
        ) from None
    _BOUND.add(sock)
    return sock


@contextlib.contextmanager
def unix_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a bound Unix socket that only this user can open; replace a stale one, and remove it afterwards.

    raises ConfigError
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            if _is_left_behind(path):
                path.unlink()
            before = os.umask(0o777 & ~_ONLY_US)
            try:
                sock.bind(str(path))
            finally:
                os.umask(before)
            own = path.stat().st_ino
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise ConfigError(
                f"cannot listen on the Unix socket {str(path)!r:.200}: {error}",
                "a path that is free, of at most 107 bytes", "choose another --uds, or stop what listens there",
            ) from None  # fmt: skip
        try:
            yield sock
        finally:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == own:  # another process may have replaced it
                    path.unlink()


def check_tls(settings: ServerSettings) -> None:
    """Check the TLS files. raises ConfigError for a certificate or a key that cannot be used"""
    if settings.ssl_certfile is None:
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def no_password() -> bytes:  # or OpenSSL would ask on the terminal
        raise ConfigError(f"the key of {settings.ssl_certfile} has a password", "a key without one", "decrypt it")

    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, no_password)
    except OSError as error:  # ssl.SSLError is one
        files = " and ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile)))
        raise ConfigError(
            f"cannot speak TLS with {files}: {error.strerror or error}", "a certificate and its key, as PEM",
            "name other files",
        ) from None  # fmt: skip


def _is_left_behind(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def url_of(sock: socket.socket, settings: ServerSettings) -> str:
    """Return the URL of a TCP socket of this server."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
