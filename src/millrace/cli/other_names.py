"""Options of vLLM, llama.cpp and Triton: what means the same here, and what nothing here needs."""

from collections.abc import Collection

REPOSITORY = "--model-repository"
_LOG, _TLS, _KEY, _TRACE = "--log-level", "--ssl-certfile", "--ssl-keyfile", "--trace-config"
_SAME = {
    "--max-model-len": "--max-context", "--ctx-size": "--max-context", "-c": "--max-context",
    "--max-num-seqs": "--max-batch", "--parallel": "--max-batch", "--dtype": "--precision",
    "--quantization": "--precision", "--n-predict": "--max-tokens", "--temp": "--temperature",
    "--cache-type-k": "--kv-cache-dtype", "--gpu-memory-utilization": "--kv-memory", "--model": "MODEL", "-m": "MODEL",
    # Triton's
    "--model-store": REPOSITORY, "--http-port": "--port", "--http-address": "--host", "--grpc-address": "--host",
    "--metrics-address": "--host", "--reuse-http-port": "--reuse-port", "--reuse-grpc-port": "--reuse-port",
    "--allow-grpc": "--grpc-port", "--allow-metrics": "--metrics-port", "--exit-timeout-secs": "--drain-timeout-s",
    **dict.fromkeys(("--log-verbose", "--log-info", "--log-warning", "--log-error"), _LOG),
    **dict.fromkeys(("--grpc-use-ssl", "--grpc-server-cert"), _TLS), "--grpc-server-key": _KEY,
    **dict.fromkeys((f"--trace-{key}" for key in ("file", "level", "rate", "count", "log-frequency")), _TRACE),
    "--response-cache-byte-size": "--cache-config",
}  # fmt: skip
_GPU, _FOLDER = "there is no GPU that tensor models run on", "backends are packages: docs/extending/tensor-backend.md"
_THREADS, _PARAMETERS = "one event loop takes all requests", "parameters { } in a model's config.pbtxt say it"
_ALWAYS = "configurations are always completed"
# Of Triton's, and some of vLLM's, that have no counterpart: why nothing is lost without them.
_UNNEEDED = {
    "--tensor-parallel-size": "a model runs on one GPU", "-tp": "a model runs on one GPU",
    "--enforce-eager": "decode steps are captured at the start, and nothing else is",
    "--allow-http": "HTTP is always there", "--strict-model-config": _ALWAYS,
    "--disable-auto-complete-config": _ALWAYS,
    "--exit-on-error": "a mistake in a repository ends it, a model that cannot be loaded keeps it from being ready",
    "--strict-readiness": "it is ready when every model is", "--backend-config": _PARAMETERS,
    "--log-file": "the log is on stderr: 2> FILE", "--id": "its name is triton, as clients expect",
    "--allow-cpu-metrics": "/metrics has them", "--metrics-interval-ms": "/metrics is of the moment it is asked",
    "--pinned-memory-pool-byte-size": _GPU, "--cuda-memory-pool-byte-size": _GPU, "--allow-gpu-metrics": _GPU,
    "--model-load-gpu-limit": _GPU, "--min-supported-compute-capability": _GPU,
    "--http-thread-count": _THREADS, "--grpc-infer-thread-count": _THREADS, "--backend-directory": _FOLDER,
    "--grpc-infer-allocation-pool-size": "messages are not pooled",
    "--grpc-max-response-pool-size": "messages are not pooled", "--model-load-thread-count": "models load side by side",
}  # fmt: skip


_SWITCHES = ("--allow-client-shm", "--model-namespacing")


def meant_by(option: str, known: Collection[str]) -> str | None:
    """What was expected in place of another program's option, in a command that has the known ones; None: no idea."""
    if option in _SAME and _SAME[option] in ("MODEL", *known):
        return f"did you mean {_SAME[option]}?"
    return f"nothing, {_UNNEEDED[option]}" if REPOSITORY in known and option in _UNNEEDED else None


def as_here(arguments: list[str]) -> list[str]:
    """A command line; Triton's switches have a value, and an error of its own says `--allow-client-shm=true`."""
    if arguments[:1] != ["serve"]:
        return arguments
    return [one.removesuffix("=true") if one.removesuffix("=true") in _SWITCHES else one for one in arguments]
