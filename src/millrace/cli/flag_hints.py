"""Flags of vLLM, SGLang, TensorRT-LLM, llama.cpp, Ollama, Triton and their load generators: what they mean here.

A group maps a meaning to the flags that have it. `--flag=value` stands for the flag with this value alone, and goes
before `--flag`. Flags are written with dashes: TensorRT-LLM writes underscores, and both are looked up alike.
"""

from collections.abc import Mapping
from enum import StrEnum

Groups = Mapping[str, str]


class FlagKind(StrEnum):
    """Message about a flag; {} is the meaning of its group."""

    SAME = "did you mean {}?"  # what follows a comma in the meaning is said of it
    LEAVE = "leave it out: {}"  # it asks for what happens anyway
    NEEDLESS = "not needed: {}"
    MISSING = "not supported: {}"
    FIELD = "the field {} of a request: it is not a setting of the server"


# A flag of Millrace that means the same, where a command has it; MODEL and URL are arguments.
SAME: Groups = {
    "MODEL": "--model -m --model-path --model-dir --engine-dir --checkpoint-dir --hf-repo -hf -hfr"
    " --model-name-or-path --model-url -mu --tokenizer-dir",
    "--max-context": "--max-model-len --ctx-size -c --max-seq-len --context-length --num-ctx --max-input-len"
    " --max-seq-length --max-position-embeddings",
    "--max-batch": "--max-num-seqs --parallel -np --max-running-requests --max-batch-size --num-parallel",
    "--precision": "--dtype --quantization --weight-only-precision --use-weight-only --qformat",
    "--kv-cache-dtype": "--cache-type-k --cache-type-v -ctk -ctv --kv-cache-type",
    "--kv-memory, it takes a size such as 8G and not a share": "--gpu-memory-utilization --mem-fraction-static"
    " --kv-cache-free-gpu-memory-fraction --free-gpu-memory-fraction --kv-cache-memory-bytes --num-gpu-blocks-override",
    "--kv-tier": "--swap-space --kv-offloading-size --host-cache-size --slot-save-path --cache-ram -cram",
    "--prefix-cache": "--enable-prefix-caching --enable-block-reuse --cache-prompt",
    "--no-prefix-cache": "--no-enable-prefix-caching --disable-radix-cache --no-cache-prompt",
    "--device cuda": "--n-gpu-layers -ngl --gpu-layers --num-gpu", "--device": "--gpus",
    "--hardware": "--gpus --gpu --gpu-type", "--tp": "-tp --tensor-parallel-size --tp-size",
    "--pp": "-pp --pipeline-parallel-size --pp-size",
    "--threads": "-t --threads-http --threads-batch -tb --num-thread --omp-num-threads",
    "--max-tokens": "--n-predict -n --predict --num-predict --max-new-tokens --max-output-len",
    "--temperature": "--temp", "--seed": "-s --random-seed",
    "--system": "-sys --system-prompt --system-prompt-file -sysf", "--output": "--output-dir --output-file -o",
    "--config": "--extra-llm-api-options --config-file", "--random-weights": "--load-format=dummy",
}  # fmt: skip

_ONE = "a model runs on one device of one machine"
_KERNELS = "kernels are chosen and timed when an engine is built"
_STEPS = "how many tokens a step computes follows the measured times of steps"
_TEMPLATE = "the chat template shows how calls and reasoning are written"
_CHECKPOINT = "the checkpoint says it"
_FILES = "the files of a checkpoint show their format"
# Of commands that run a model.
ENGINE: Mapping[FlagKind, Groups] = {
    FlagKind.LEAVE: {
        _ONE: "--tensor-parallel-size=1 -tp=1 --tp=1 --tp-size=1 --pipeline-parallel-size=1 -pp=1 --pp=1 --pp-size=1"
        " --data-parallel-size=1 -dp=1 --dp=1 --dp-size=1 --ep=1 --ep-size=1 --nnodes=1 --node-rank=0 --cluster-size=1"
        " --split-mode=none -sm=none --main-gpu=0 -mg=0 --gpus-per-node=1",
        _FILES: "--load-format=auto --load-format=safetensors --load-format=hf --load-format=pt --load-format=gguf"
        " --config-format=auto --config-format=hf",
        "the checkpoint's own precision is the default": "--dtype=auto --quantization=none",
        "the CPU is the default": "-ngl=0 --n-gpu-layers=0 --gpu-layers=0 --num-gpu=0 --gpus=none",
        "the checkpoint's generation_config.json is used": "--generation-config=auto",
        "the checkpoint's tokenizer is used": "--tokenizer-mode=auto",
        "each answer is one sequence": "--max-beam-width=1", "nothing is offloaded": "--cpu-offload-gb=0",
        "KV pages stay in memory": "--swap-space=0 --kv-offloading-size=0",
        "there is one backend": "--backend=pytorch --backend=tensorrt --backend=auto --backend=_autodeploy",
    },
    FlagKind.NEEDLESS: {
        _CHECKPOINT: "--task --runner --convert --is-embedding --embedding --embeddings --reranking --rerank --pooling"
        " --model-type --override-pooler-config --pooler-config",
        "files are recognised, and no code of a checkpoint decides": "--load-format --config-format"
        " --model-loader-extra-config",
        "it is for models without a native implementation, which are not built: `serve`, `generate`, `chat` and `eval`"
        " take it": "--model-impl",
        "no code of a checkpoint is ever run": "--trust-remote-code --allow-remote-code",
        "the engine is compiled when it is built, and tuned for this machine": "--compilation-config -O0 -O1 -O2 -O3"
        " -O --optimization-level --enable-torch-compile --cudagraph-capture-sizes --max-seq-len-to-capture"
        " --cuda-graph-max-bs --disable-cuda-graph --warmup --no-warmup --cuda-graph-sizes",
        _KERNELS: "--attention-backend --flash-attn -fa --disable-cascade-attn --moe-backend --sampling-backend"
        " --gpt-attention-plugin --gemm-plugin --use-paged-context-fmha --context-fmha --remove-input-padding"
        " --prefill-attention-backend --decode-attention-backend",
        _STEPS: "--max-num-batched-tokens --max-num-tokens --ubatch-size -ub --batch-size -b --chunked-prefill-size"
        " --max-prefill-tokens --long-prefill-token-threshold --max-num-partial-prefills --opt-num-tokens"
        " --max-long-partial-prefills",
        "pages of the KV cache have a size of their own": "--block-size --page-size --tokens-per-block",
        "it is always on": "--enable-chunked-prefill --cont-batching -cb --enable-in-flight-batching --jinja --metrics"
        " --enable-metrics --slots --props --use-jinja",
        "there is one scheduler, and --schedule sets its order": "--async-scheduling --scheduler-cls"
        " --num-scheduler-steps --scheduler-reserve-full-isl --schedule-conservativeness --enable-mixed-chunk"
        " --disable-overlap-schedule --stream-interval --scheduler-delay-factor",
        "decode steps on a GPU run as CUDA graphs, and nothing else does": "--enforce-eager",
        "an engine's kernels decide it": "--calculate-kv-scales --disable-custom-all-reduce --use-v2-block-manager",
        "the checkpoint's tokenizer is used": "--tokenizer-mode --hf-config-path --custom-tokenizer --tokenizer-path",
        "HF_HOME in the environment says where downloads are": "--download-dir",
        "write MODEL as org/name@revision": "--revision --code-revision --tokenizer-revision",
        "there is one backend, and --device says where it runs": "--backend --device-type --platform",
    },
    FlagKind.MISSING: {
        _ONE: "--tensor-parallel-size -tp --tp --tp-size --pipeline-parallel-size -pp --pp --pp-size --ep --ep-size"
        " -ep --data-parallel-size -dp --dp --dp-size --enable-expert-parallel --moe-expert-parallel-size --nnodes"
        " --node-rank --gpus-per-node --cluster-size --moe-cluster-parallel-size --distributed-executor-backend"
        " --master-addr --master-port --dist-init-addr --data-parallel-size-local --data-parallel-address"
        " --data-parallel-rpc-port --data-parallel-backend --data-parallel-rank --data-parallel-start-rank --headless"
        " --split-mode -sm --tensor-split -ts --main-gpu -mg --rpc --auto-parallel --decode-context-parallel-size -dcp"
        " --enable-eplb --max-parallel-loading-workers --ray-workers-use-nsight --worker-cls --cp-size"
        " --context-parallel-size",
        "prefill and decode run in one process": "--server-role --metadata-server-config-file --kv-transfer-config"
        " --disaggregation-mode --kv-events-config --disagg-cluster-uri",
        "adapters are not loaded; merge one into the checkpoint first": "--enable-lora --lora-modules --max-loras"
        " --max-lora-rank --lora --lora-scaled --lora-paths --max-cpu-loras --lora-dtype --fully-sharded-loras"
        " --lora-dir --lora-plugin --control-vector --enable-lora-bias --lora-extra-vocab-size --default-mm-loras",
        "speculative decoding is not implemented; answers are the same without it":
        "--speculative-config --speculative-model --spec-model -sc --num-speculative-tokens --model-draft -md --draft"
        " --draft-max --draft-min --draft-p-min -cd -ngld --gpu-layers-draft --ctx-size-draft --device-draft -devd"
        " --hf-repo-draft -hfd --speculative-algorithm --speculative-num-steps --speculative-eagle-topk"
        " --speculative-draft-model-path --lookup-cache-static -lcs --speculative-num-draft-tokens"
        " --speculative-decoding-mode --spec-type --lookup-cache-dynamic -lcd",
        "beam search is not implemented": "--max-beam-width --beam-width",
        "inputs are text alone": "--limit-mm-per-prompt --mm-processor-kwargs --mmproj --mmproj-url --image -mm -mmu"
        " --allowed-local-media-path --interleave-mm-strings --media-io-kwargs --enable-multimodal --audio --no-mmproj"
        " --mm-encoder-tp-mode --skip-mm-profiling --mm-processor-cache-gb --allowed-media-domains --image-max-tokens",
        "the checkpoint's config.json decides; edit it, or a copy": "--hf-overrides --json-model-override-args"
        " --rope-scaling --rope-theta --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx"
        " --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --disable-sliding-window"
        " --override-kv --hf-token --fail-fast-on-attention-window-too-large --swa-full",
        "the checkpoint's generation_config.json decides; edit it, or send fields with each request":
        "--generation-config --override-generation-config --preferred-sampling-params --sampling-defaults",
        "the checkpoint's chat template is used; put another into it as chat_template.jinja":
        "--chat-template --chat-template-file --completion-template --hf-chat-template",
        "the checkpoint's tokenizer is used; put another into its folder": "--tokenizer --skip-tokenizer-init",
        "weights stay in the memory of the device": "--cpu-offload-gb --cpu-offload-params --n-cpu-moe -ncmoe"
        " --cpu-moe -cmoe --override-tensor -ot --enable-sleep-mode --enable-memory-saver --offload-group-size",
        "start it with numactl": "--numa --cpu-mask -C --cpu-range -cr --cpu-strict --prio --poll --cpu-mask-batch",
        "the KV cache is on the device that computes": "--no-kv-offload -nkvo",
        "how files are mapped cannot be set": "--mlock --no-mmap --mmap",
        "a longer conversation than --max-context is an error": "--context-shift --keep --num-keep",
        "plugins of other programs; docs/extending says what can be added": "--middleware --logits-processors"
        " --custom-module-dirs --logits-processor-pattern --tool-parser-plugin --reasoning-parser-plugin"
        " --worker-extension-cls --additional-config --io-processor-plugin --enable-custom-logit-processor",
    },
}  # fmt: skip

_LOOP = "one event loop takes all requests; for more processes, --reuse-port"
_LOGGED = "prompts are never logged; --log-level warning leaves out a line for each request"
_GPU, _FOLDER = "there is no GPU that tensor models run on", "backends are packages: docs/extending/tensor-backend.md"
_PARAMETERS, _COMPLETED = "parameters { } in a model's config.pbtxt say it", "configurations are always completed"
# Of `millrace serve`.
SERVER: Mapping[FlagKind, Groups] = {
    FlagKind.SAME: {
        "--served-model-name": "--alias -a --model-name --model-alias", "--cors-origin": "--allowed-origins",
        "--api-key-file": "--api-key",
        "--trace-config": "--otlp-traces-endpoint --trace-file --trace-level --trace-rate --trace-count"
        " --trace-log-frequency --collect-detailed-traces",
        "--schedule": "--scheduling-policy --schedule-policy", "--uds": "--unix-socket",
        "--log-level": "--uvicorn-log-level --log-level-http --log-verbose --log-info --log-warning --log-error"
        " --log-verbosity -lv --verbosity",
        "--log-level debug": "--verbose -v", "--log-level error": "--log-disable --quiet",
        "--max-queued": "--max-concurrent-requests --max-queued-requests --max-queue-size",
        "--ssl-certfile": "--grpc-use-ssl --grpc-server-cert --ssl-cert-file",
        "--ssl-keyfile": "--grpc-server-key --ssl-key-file",
        "--drain-timeout-s": "--exit-timeout-secs --timeout-graceful-shutdown --shutdown-timeout",
        "--model-repository": "--model-store --model-repo", "--port": "--http-port",
        "--host": "--http-address --grpc-address --metrics-address", "--metrics-port": "--allow-metrics",
        "--reuse-port": "--reuse-http-port --reuse-grpc-port", "--grpc-port": "--allow-grpc",
        "--cache-config": "--response-cache-byte-size", "--allow-client-shm": "--allow-shared-memory",
    },
    FlagKind.FIELD: {
        "seed": "--seed -s --random-seed", "temperature": "--temperature --temp", "top_p": "--top-p",
        "top_k": "--top-k", "min_p": "--min-p",
        "max_tokens": "--max-tokens --n-predict -n --predict --num-predict",
        "repetition_penalty": "--repetition-penalty --repeat-penalty", "presence_penalty": "--presence-penalty",
        "frequency_penalty": "--frequency-penalty", "logit_bias": "--logit-bias -l",
        "stop": "--stop -r --reverse-prompt",
        "chat_template_kwargs": "--chat-template-kwargs --default-chat-template-kwargs --reasoning --reasoning-budget"
        " --think",
        "response_format": "--format --json-schema -j --json-schema-file -jf --grammar --grammar-file",
        "messages": "--system --system-prompt -sys --prompt -p",
    },
    FlagKind.LEAVE: {
        "it is always assistant": "--response-role=assistant",
        "the default": "--chat-template-content-format=auto",
        "responses are made in this process": "--num-postprocess-workers=0 --api-server-count=1 -asc=1",
        "prompts are not logged": "--max-log-len=0",
    },
    FlagKind.NEEDLESS: {
        _TEMPLATE: "--enable-auto-tool-choice --tool-call-parser --tool-parser --reasoning-parser --reasoning-format"
        " --chat-template-content-format --enable-reasoning --tool-choice-parser",
        _LOGGED: "--disable-log-requests --disable-log-stats --no-enable-log-requests --max-log-len --log-requests"
        " --disable-uvicorn-access-log --log-prompts-file --disable-fastapi-access-log",
        "llguidance compiles all grammars": "--guided-decoding-backend --structured-outputs-config --grammar-backend"
        " --xgrammar-backend --guided-decoding-disable-fallback",
        "a served model stays loaded until the server ends": "--keepalive --keep-alive --models-max"
        " --sleep-idle-seconds --models-autoload",
        "/docs needs no network": "--disable-fastapi-docs",
        "a request may ask for up to 20": "--max-logprobs",
        "--cors-origin allows every method and header that requests need": "--allowed-methods --allowed-headers"
        " --allow-credentials",
        "every answer has x-request-id": "--enable-request-id-headers",
        "usage always has its details": "--enable-prompt-tokens-details --enable-force-include-usage",
        "the page at / is always there": "--webui --no-webui --path",
        _LOOP: "--num-postprocess-workers --api-server-count -asc --workers --uvicorn-workers --tokenizer-worker-num"
        " --disable-frontend-multiprocessing --http-thread-count --grpc-infer-thread-count --num-serve-workers",
        "a reverse proxy can rewrite paths": "--root-path --api-prefix", "HTTP is always there": "--allow-http",
        _COMPLETED: "--strict-model-config --disable-auto-complete-config",
        "a mistake in a repository ends it, a model that cannot be loaded keeps it from being ready": "--exit-on-error",
        "it is ready when every model is": "--strict-readiness", _PARAMETERS: "--backend-config",
        "the log is on stderr: 2> FILE": "--log-file", "its name is triton, as clients expect": "--id",
        "/metrics has them": "--allow-cpu-metrics",
        "/metrics is of the moment it is asked": "--metrics-interval-ms",
        _GPU: "--pinned-memory-pool-byte-size --cuda-memory-pool-byte-size --allow-gpu-metrics --model-load-gpu-limit"
        " --min-supported-compute-capability",
        _FOLDER: "--backend-directory --repoagent-directory --cache-directory",
        "messages are not pooled": "--grpc-infer-allocation-pool-size --grpc-max-response-pool-size",
        "models load side by side": "--model-load-thread-count --model-load-retry-count",
    },
    FlagKind.MISSING: {
        "answers have the role assistant": "--response-role",
        "client certificates are not checked; a reverse proxy can do it": "--ssl-ca-certs --ssl-cert-reqs"
        " --grpc-root-cert --grpc-use-ssl-mutual --ssl-keyfile-password",
        "the client runs the tools": "--tool-server --mcp-config --tools",
    },
}  # fmt: skip
# Of `millrace chat` and `millrace generate`.
LOCAL: Mapping[FlagKind, Groups] = {
    FlagKind.NEEDLESS: {
        "the time for prompt and answer is shown below each answer": "--verbose -v --perf --show-timings",
        "the model stays loaded until the command ends": "--keepalive --keep-alive",
        "the terminal breaks lines": "--nowordwrap --no-wordwrap --multiline-input -mli",
        "`millrace chat` is a conversation, and `millrace generate --chat` one question":
        "--conversation -cnv -no-cnv --no-conversation --single-turn -st --interactive -i --interactive-first -if"
        " --instruct",
        "NO_COLOR in the environment turns colours off": "--color --no-color",
        "what is shown is the answer alone": "--no-display-prompt --log-disable --quiet",
        "downloads use TLS": "--insecure",
        "the whole template of the checkpoint is used": "--chatml --jinja",
    },
    FlagKind.MISSING: {
        "use `millrace serve`, and the field response_format of a request": "--format --json-schema -j --grammar"
        " --grammar-file --json-schema-file -jf",
        "use `millrace serve`, and the field chat_template_kwargs of a request":
        "--think --hidethinking --reasoning-budget --reasoning --chat-template-kwargs --reasoning-format",
        "use `millrace serve`, and fields of a request": "--repeat-penalty --repetition-penalty --presence-penalty"
        " --frequency-penalty --logit-bias -l --repeat-last-n --stop -r --reverse-prompt --typical --mirostat"
        " --dry-multiplier --xtc-probability --samplers --dimensions --truncate",
        "use stdin (`echo TEXT | millrace chat MODEL`), or `millrace generate MODEL -p TEXT`":
        "-p --prompt -q --query",
        "use a file on stdin: < FILE": "--file -f --binary-file -bf",
    },
}  # fmt: skip
_PERCENTILES = "all percentiles are in the results"
_STABLE = "each figure has its interval of 95 %, and a level ends by --duration-s or --request-count"
_RESULTS = "--output, the folder of results"
_SECONDS = "--duration-s, it takes seconds and not milliseconds"
# Of `millrace bench`, `bench sweep` and `bench compare`.
LOAD: Mapping[FlagKind, Groups] = {
    FlagKind.SAME: {
        "--endpoint generate": "--service-kind=triton --backend=triton --backend=tensorrt_llm --backend=tensorrtllm",
        "--engine": "--service-kind=tensorrtllm_engine --service-kind=triton_c_api",
        "--endpoint": "--backend --endpoint-type --task", "URL": "--base-url --host --port --server-url -u",
        _SECONDS: "--measurement-interval -p",
        _RESULTS: "--profile-export-file --save-result --save-detailed --result-dir --result-filename"
        " --profile-export-prefix --append-result --export-level --output-json --output-folder",
        "--output": "--artifact-directory", "--png": "--generate-plots --plot-timeline",
        "--ignore-eos": "--output-tokens-mean-deterministic",
        "--input-file": "--dataset-name --dataset-path --dataset --public-dataset --custom-dataset-type"
        " --input-dataset",
        '--header "authorization:Bearer KEY"': "--api-key", "--isl-stddev": "--random-range-ratio",
        "--osl": "--sharegpt-output-len --custom-output-len --hf-output-len --output-len", "--isl": "--input-len",
        "--prefix-prompt-length": "--random-prefix-len --prefix-len", "--warmup-request-count": "--num-warmups",
        "--arrival-pattern": "--request-rate-mode --request-distribution",
        "--extra-inputs NAME:VALUE": "--temperature --top-p --top-k --min-p --logprobs --presence-penalty --extra-body"
        " --frequency-penalty --repetition-penalty",
        "--model": "--served-model-name --model-name",
        "--concurrency": "--concurrency-range --session-concurrency", "--request-rate": "--request-rate-range",
        "--request-count": "--measurement-request-count",
    },
    FlagKind.LEAVE: {
        "URL is a server of OpenAI's protocol": "--service-kind=openai --service-kind=dynamo_grpc --backend=openai"
        " --backend=vllm --backend=openai-chat",
        "prompts are drawn, of --isl tokens": "--dataset-name=random",
        "requests are counted": "--measurement-mode=count_windows",
        "seconds are counted": "--measurement-mode=time_windows",
    },
    FlagKind.NEEDLESS: {
        "URL and --endpoint say whom it asks, and how": "--service-kind --custom-endpoint --endpoint-path",
        "the server's own counts of tokens are used": "--tokenizer --tokenizer-revision --tokenizer-mode"
        " --tokenizer-trust-remote-code --skip-tokenizer-init --trust-remote-code --use-server-token-counts",
        _STABLE: "--stability-percentage -s --max-trials -r --measurement-mode --max-windows",
        "each request has a text of its own": "--num-dataset-entries --num-entries --dataset-sampling-strategy",
        _PERCENTILES: "--percentile-metrics --metric-percentiles --percentile --slice-duration",
        "two requests try the server before the run": "--ready-check-timeout-sec --skip-initial-test",
        "a trace's own times are kept; --replay-speed 0 ignores them": "--fixed-schedule --fixed-schedule-auto-offset",
        "one process sends all, and proves that it keeps up": "--workers-max --num-workers --max-threads --workers-min"
        " --record-processors",
        "progress is shown, and --json is for programs": "--verbose -v --ui --ui-type --log-level --disable-tqdm",
        "a server's /metrics and its trace are read by themselves": "--server-metrics --server-metrics-url --telemetry"
        " --collect-metrics --metrics-url",
        "the page of results names what was run": "--metadata --label --result-title",
    },
    FlagKind.MISSING: {
        "GPU counters are not read; a server's /metrics are": "--gpu-telemetry --profile --server-profile",
        "inputs are text alone": "--image-width-mean --image-height-mean --image-format --audio-length-mean --images",
        "each request has one text": "--batch-size-text --prompt-batch-size --batch-size -b --random-batch-size",
        "name the adapter as the server knows it with --model": "--lora-modules",
    },
}  # fmt: skip
# Of `millrace bench infer`.
TENSORS: Mapping[FlagKind, Groups] = {
    FlagKind.SAME: {
        _SECONDS: "--measurement-interval -p", "--request-count": "--measurement-request-count",
        _RESULTS: "-f --profile-export-file --verbose-csv --export-file --artifact-dir --artifact-directory",
        "--input-data": "--data-directory -d", "--input-data zero": "--zero-input -z",
        "URL": "--host --port --base-url",
        "--warmup-request-count": "--warmup-requests --num-warmups", "--concurrency": "--max-concurrency",
        "--random-seed": "--seed", "--string-length": "--string-size", "--model": "--model-name",
        "--png": "--generate-plots",
    },
    FlagKind.LEAVE: {
        "tensors go in the request": "--shared-memory=none",
        "seconds are counted": "--measurement-mode=time_windows",
        "URL is a server of KServe's protocol": "--service-kind=triton",
    },
    FlagKind.NEEDLESS: {
        "--concurrency and --request-rate say how many requests are under way": "--async -a --sync --max-threads",
        _PERCENTILES: "--percentile",
        _STABLE: "--stability-percentage -s --max-trials -r --measurement-mode",
        "the server's statistics are read where it has some": "--collect-metrics --metrics-url --metrics-interval"
        " --bls-composing-models",
        "progress is shown, and --json is for programs": "--verbose -v -vv",
        "answers have the format of requests, --tensor-format": "--output-tensor-format",
    },
    FlagKind.MISSING: {
        "tensors go in the request": "--shared-memory --output-shared-memory-size",
        "streams of decoupled models; `millrace bench URL --endpoint generate` measures these": "--streaming",
        "levels are named: START:END:STEP, and the results show where latency rises":
        "--binary-search --latency-threshold -l",
        "only KServe's protocol; `millrace bench` is for OpenAI's": "--service-kind --endpoint",
        "sequences of requests are not measured": "--num-of-sequences --sequence-length --sequence-id-range"
        " --sequence-length-variation --serial-sequences --start-sequence-id",
        "arrivals are drawn by --arrival-pattern": "--request-intervals --periodic-concurrency-range --request-period",
        "gRPC goes without TLS, and requests are not compressed": "--ssl-grpc-use-ssl"
        " --ssl-grpc-root-certifications-file --ssl-https-ca-certificates-file --grpc-compression-algorithm"
        " --ssl-https-verify-peer --ssl-https-verify-host",
        "requests have no parameters": "--request-parameter --model-signature-name --grpc-method",
    },
}  # fmt: skip
# Of `millrace build`.
BUILD: Mapping[FlagKind, Groups] = {
    FlagKind.NEEDLESS: {
        "one process builds, on all cores": "--workers --max-workers",
        "--tune says how long it times": "--profiling-verbosity --builder-opt --builder-optimization-level"
        " --timing-cache --input-timing-cache --output-timing-cache",
        "progress is shown": "--log-level --verbose -v",
        "types are what --precision says": "--strongly-typed",
        "a request's own field asks for log probabilities": "--gather-all-token-logits --gather-generation-logits"
        " --gather-context-logits --logits-dtype",
    },
    FlagKind.SAME: {
        "MODEL": "--checkpoint --outfile", "--calibration": "--calib-dataset --imatrix", "--precision": "--outtype",
    },
}  # fmt: skip
