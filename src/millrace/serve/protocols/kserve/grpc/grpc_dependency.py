"""Check for the optional dependency grpcio, to be made before anything is imported from it."""

import importlib.util

from millrace.errors import ConfigError

EXTRA = "millrace[grpc]"


def check_grpc(flag: str, fix: str) -> None:
    """Check that grpcio is installed. flag: the one that needs it; fix: the alternative. raises ConfigError if not"""
    for package in ("grpc", "google", "google.protobuf"):  # one after another: the last is looked for in the second
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{flag} without grpcio", f'pip install "{EXTRA}"', f"install it, or {fix}")
