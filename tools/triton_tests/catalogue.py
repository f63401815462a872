"""Which files of Triton's `qa` folder are run, with which server beside them, and what cannot run here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tools.triton_tests import repositories as made
from tools.triton_tests.repositories import Repository

GPU = "needs a GPU"
DEBUG = "needs delays that only a debug build of Triton has"
TENSORRT = "needs TensorRT"


@dataclass(frozen=True)
class Run:
    """One server, and the tests that are run against it."""

    models: Callable[[Repository], None]
    flags: tuple[str, ...] = ()
    only: tuple[str, ...] = ()  # names of test functions; without: all
    variables: Mapping[str, str] = field(default_factory=dict)
    log: str = "server.log"  # in the folder of the tests: some read it


@dataclass(frozen=True)
class Suite:
    file: str  # below qa/
    runs: tuple[Run, ...]
    cannot: Mapping[str, str] = field(default_factory=dict)  # why a test function cannot run here
    is_model: bool = False  # the file's tests are run within a model, as they ask pb_utils


EXPLICIT = ("--model-control-mode", "explicit")
CACHE = ("--cache-config", "local,size=1048576")
INSENSITIVE = "MY_HEADER_.*"


def _metrics(model: str, *settings: str, only: tuple[str, ...], cache: bool = False, quantiles: str = "") -> Run:
    flags = [*EXPLICIT, "--load-model", model, *(CACHE if cache else ())]
    for setting in settings:
        flags += ["--metrics-config", setting]
    return Run(made.metrics, tuple(flags), only, {"SUMMARY_QUANTILES": quantiles} if quantiles else {})


COUNTERS, NO_COUNTERS = "test_inf_counters_exist", "test_inf_counters_missing"
SUMMARIES, NO_SUMMARIES = "test_inf_summaries_exist", "test_inf_summaries_missing"
CACHED, NOT_CACHED = "test_cache_counters_exist", "test_cache_counters_missing"
CACHED_TIMES, NO_CACHED_TIMES = "test_cache_summaries_exist", "test_cache_summaries_missing"
QUANTILES = "0.1:0.0.1,0.7:0.01,0.75:0.01"

METRICS = (
    _metrics("identity_cache_off", only=(COUNTERS, NO_SUMMARIES, NOT_CACHED, NO_CACHED_TIMES)),
    _metrics("identity_cache_off", "summary_latencies=true",
             only=(COUNTERS, SUMMARIES, NOT_CACHED, NO_CACHED_TIMES)),
    _metrics("identity_cache_off", "summary_latencies=true", "counter_latencies=false",
             only=(NO_COUNTERS, SUMMARIES, NOT_CACHED, NO_CACHED_TIMES)),
    _metrics("identity_cache_on", "summary_latencies=true", "counter_latencies=true", cache=True,
             only=(COUNTERS, CACHED, "test_inf_summaries_exist_with_cache", CACHED_TIMES)),
    _metrics("identity_cache_off", "summary_latencies=true", f"summary_quantiles={QUANTILES}",
             only=("test_summaries_custom_quantiles",), quantiles=QUANTILES),
)  # fmt: skip

RATE_LIMITED = ("test_instance_resource_increase", "test_instance_resource_increase_above_explicit",
                "test_instance_resource_decrease")  # fmt: skip


def _headers(pattern: str) -> Run:
    flags = ("--http-header-forward-pattern", pattern, "--grpc-header-forward-pattern", pattern)
    return Run(made.parameters, flags, variables={"TEST_HEADER": "1"})


# A server each: these tests count what is registered, and leave it.
SHARED_TESTS = (
    "test_invalid_create_shm", "test_valid_create_set_register", "test_unregister_before_register",
    "test_unregister_after_register", "test_reregister_after_register", "test_unregister_after_inference",
    "test_register_after_inference", "test_too_big_shm", "test_large_shm_register_offset", "test_mixed_raw_shm",
    "test_unregisterall", "test_infer_offset_out_of_bound", "test_infer_byte_size_out_of_bound",
    "test_infer_integer_overflow", "test_register_out_of_bound", "test_register_reserved_names",
)  # fmt: skip
UNREGISTER = "test_unregister_shm_"
SHARED = (
    *(Run(made.shared_memory, only=(test,), variables={"CLIENT_TYPE": kind})
      for kind in ("http", "grpc") for test in SHARED_TESTS),
    *(Run(made.slow_simple, variables={"CLIENT_TYPE": kind}, only=tuple(
        f"{UNREGISTER}{when}_{kind}"
        for when in ("during_inference_single_req", "during_inference_multiple_req", "after_inference")))
      for kind in ("http", "grpc")),
)  # fmt: skip

SUITES: dict[str, Suite] = {
    "http": Suite("L0_http/http_test.py", (Run(made.http, (*EXPLICIT, "--load-model", "*")),)),
    "http_size": Suite(
        "L0_http/http_input_size_limit_test.py",
        (
            Run(made.http, only=("test_default_limit_rejection_raw_binary", "test_default_limit_rejection_json")),
            Run(
                made.http,
                ("--http-max-input-size", "134217728"),
                ("test_large_input_raw_binary", "test_large_input_json"),
            ),
        ),
    ),
    "generate": Suite("L0_http/generate_endpoint_test.py", (Run(made.generate),)),
    "generate_error_status": Suite("L0_http/generate_error_status_test.py", (Run(made.generate),)),
    "http_restricted": Suite("L0_http/http_restricted_api_test.py", (
        Run(made.simple, ("--http-restricted-api", "model-repository:admin-key=admin-value",
                          "--http-restricted-api", "inference,health:infer-key=infer-value")),
    )),
    "http_aio": Suite("L0_http/python_http_aio_test.py", (Run(made.simple_and(7), ("--model-control-mode", "poll")),)),
    "grpc_aio": Suite("L0_grpc/python_grpc_aio_test.py", (Run(made.simple_and(8), ("--model-control-mode", "poll")),), {
        "test_register_cuda_shared_memory": GPU,
    }),
    "parameters": Suite("L0_parameters/parameters_test.py", (
        Run(made.parameters, variables={"TEST_HEADER": "0"}), _headers("my_header.*"), _headers(INSENSITIVE),
        _headers("(?-i)my_header.*"),
    )),
    "shared_memory": Suite("L0_shared_memory/shared_memory_test.py", SHARED, {
        "test_python_client_leak": "about Triton's client alone",
    }),
    "trace": Suite("L0_trace/trace_endpoint_test.py", (
        Run(made.simple, ("--trace-config", "triton,file=global_unittest.log", "--trace-config", "level=TIMESTAMPS",
                          "--trace-config", "rate=1")),
    )),
    "logging": Suite("L0_logging/logging_endpoint_test.py", (Run(made.simple),)),
    "metrics": Suite("L0_metrics/metrics_config_test.py", METRICS, {
        "test_pinned_memory_metrics_exist": GPU,
        "test_model_namespacing": "has a path of Triton's container in it",
    }),
    "queues": Suite("L0_metrics/metrics_queue_size_test.py", (Run(made.queues),)),
    "histograms": Suite("L0_metrics/histogram_metrics_test.py", (
        Run(made.histograms, ("--metrics-config", "histogram_latencies=true")),
    )),
    "load_times": Suite("L0_metrics/general_metrics_test.py", (
        Run(made.load_times, (*EXPLICIT, "--load-model", "libtorch_float32_float32_float32"),
            only=("test_metrics_load_time", "test_metrics_load_time_explicit_load")),
        Run(made.load_times, EXPLICIT,
            only=("test_metrics_load_time_explicit_unload", "test_metrics_load_time_multiple_version_reload")),
    )),
    "input_validation": Suite("L0_input_validation/input_validation_test.py", (Run(made.validation),), {
        "test_wrong_input_shape_tensor_size": TENSORRT,
    }),
    "cancellation": Suite("L0_request_cancellation/scheduler_test.py", (Run(made.cancelled, CACHE),)),
    "grpc_cancellation": Suite(
        "L0_request_cancellation/grpc_cancellation_test.py", (Run(made.slow_identity(10_000)),), {
            "test_grpc_async_infer_cancellation_at_step_start": DEBUG,
            "test_grpc_async_infer_response_complete_during_cancellation": DEBUG,
            "test_grpc_async_infer_cancellation_before_finish_0": DEBUG,
            "test_grpc_async_infer_cancellation_before_finish_1": DEBUG,
            "test_grpc_async_infer_cancellation_before_response_complete_and_process_after_final_response": DEBUG,
        },
    ),
    "http_cancellation": Suite("L0_request_cancellation/http_cancellation_test.py", tuple(
        Run(made.execute_cancel, only=(name,)) for name in (
            "test_http_infer_client_disconnect", "test_http_generate_client_disconnect",
            "test_http_infer_client_connected",
        )
    )),
    "decoupled": Suite("L0_decoupled/decoupled_test.py", (Run(made.repeats),), {"test_one_to_multi_many": DEBUG}),
    "instance_update": Suite(
        "L0_model_update/instance_update_test.py", (
            Run(made.instances, EXPLICIT, variables={"RATE_LIMIT_MODE": "off"}),
            Run(made.instances, (*EXPLICIT, "--rate-limit", "execution_count"), RATE_LIMITED[:1],
                {"RATE_LIMIT_MODE": "execution_count"}),
            Run(made.instances, (*EXPLICIT, "--rate-limit", "execution_count", "--rate-limit-resource", "R1:10"),
                RATE_LIMITED, {"RATE_LIMIT_MODE": "execution_count_with_explicit_resource", "MODEL_LOG_DIR": "."},
                "instance_update_test.rate_limit_execution_count_with_explicit_resource.server.log"),
        ), {
            "test_gpu_instance_update": GPU, "test_gpu_cpu_instance_update": GPU, "test_instance_name_update": GPU,
            "test_instance_signature": GPU, "test_direct_scheduler_update_with_ongoing_sequences": GPU,
            "test_oldest_scheduler_update_with_ongoing_sequences": GPU,
        },
    ),
    "client_timeout": Suite("L0_client_timeout/client_infer_timeout_test.py", (Run(made.slow_identity(3_000)),)),
    "python": Suite("L0_backend_python/python_test.py", (Run(made.python),), {
        "test_growth_error": "about the shared memory between Triton and its Python processes, which is not used here",
        "test_infer_pytorch": "needs weights of NVIDIA's data set",
    }),
    "python_lifecycle": Suite("L0_backend_python/lifecycle/lifecycle_test.py", (
        Run(made.lifecycle, log="lifecycle_server.log"),
    )),
    "python_decoupled": Suite("L0_backend_python/decoupled/decoupled_test.py", (
        Run(made.decoupled, log="decoupled_server.log"),
    )),
    "python_senders": Suite("L0_backend_python/response_sender/response_sender_test.py", (Run(made.senders),)),
    "python_parameters": Suite("L0_backend_python/parameters/response_parameters_test.py", (
        Run(made.response_parameters, variables={"MODEL_NAME": "response_parameters"}),
    )),
    "python_readiness": Suite("L0_backend_python/model_readiness/test_model_readiness.py", (Run(made.readiness),), {
        "test_model_not_ready": "kills a process that this server does not have",
    }),
    "python_concurrency": Suite(
        "L0_backend_python/async_execute/concurrency_test.py", (Run(made.concurrent),)
    ),
    "python_bls": Suite(
        "python_models/bls/model.py",
        (
            Run(made.unittests, variables={"BLS_KIND": "non_decoupled"}),
            Run(made.unittests, variables={"BLS_KIND": "decoupled"}),
        ),
        {
            "test_bls_sequence": GPU,
            "test_bls_tensor_lifecycle": GPU,
            "test_gpu_bls": GPU,
            "test_preferred_memory": GPU,
        },
        is_model=True,
    ),
    "python_metrics": Suite("python_models/custom_metrics/model.py", (Run(made.unittests),), is_model=True),
    "nan_inf": Suite("L0_nan_inf/nan_inf_test.py", (Run(made.nan_inf),)),
    "python_control": Suite("L0_backend_python/model_control/model_control_test.py", (Run(made.control, EXPLICIT),)),
}  # fmt: skip
