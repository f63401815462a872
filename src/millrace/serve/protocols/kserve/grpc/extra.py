"""gRPC is an extra: whether it is installed is asked before anything is imported of it."""

import importlib.util

from millrace.errors import ConfigError

EXTRA = "millrace[grpc]"


def check_grpc(asked: str, mend: str) -> None:
    """asked: the flag that needs it. mend: what to do instead. raises ConfigError where it is not installed"""
    for package in ("grpc", "google", "google.protobuf"):  # one after another: the last is looked for in the second
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{asked} without grpcio", f'pip install "{EXTRA}"', f"install it, or {mend}")
