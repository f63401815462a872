"""The rows of docs/performance.md's table of what is no speed of a language model beside others."""

import statistics
from collections.abc import Iterable, Iterator

from benchmarks.runs import label, of_kind
from millrace.compress.presets import SAMPLES


def other_rows() -> Iterator[list[str]]:
    """What was measured, the figure, and the run."""
    for of_a_kind in (
        _embeddings, _contexts, _starts, _serving, _busy, _sampling, _products, _hadamard, _tensors, _backends,
        _children, _batching, _routes, _grammars, _calibrations, _mmlu, _versions, _triton_tests, _loops,
        _gpu_kernels, _gpu,
    ):  # fmt: skip
        yield from of_a_kind()


def _embeddings() -> Iterator[list[str]]:
    for _, r in of_kind("embeddings"):
        low, high = r["lengths"]
        for name, e in r["engines"].items():
            speed = e["tokens_per_s"]
            rate = f"{speed['median']:,.0f} ({speed['low']:,.0f}-{speed['high']:,.0f})"
            who = f"{r['shape']}, {name}: embeddings of {low} to {high} tokens, tok/s"
            yield [who, f"{rate}, at most {e['distance']:.0e} from transformers", label(r)]


def _versions() -> Iterator[list[str]]:
    for _, r in of_kind("versions"):
        for run in r["runs"]:
            for one in run["work"]:
                who = f"{run['shape']} {run['precision']}, {one['work']}: speed of this commit, of {r['old']}'s"
                tokens = "same tokens" if one["same_tokens"] else "OTHER TOKENS"
                figure = (
                    f"{one['speed_of_old']:.3f}; of itself in a second process {one['speed_of_itself']:.3f}; {tokens}"
                )
                yield [who, figure, label(r)]


def _contexts() -> Iterator[list[str]]:
    for _, r in of_kind("contexts"):
        d, m, who = r["decode"], r["mixed"], f"{r['shape']} {r['precision']}, KV {r['kv_cache_dtype']}"
        depths = ", ".join(f"{rate:,.0f} at {depth}" for depth, rate in d["tokens_per_s"].items())
        cold = f", both from memory {d['from_memory']['share']:.0%}" if "from_memory" in d else ""
        yield [f"{who}: decode by depth, tok/s", f"{depths}: {d['share']:.0%}{cold}", label(r)]
        yield [f"{who}: p99 of a stream's gaps beside a prompt, in medians", f"{m['p99_to_median_gap']:.2f}", label(r)]
        together = m["total_to_one_after_the_other"] - 1
        yield [f"{who}: both together, of one after the other", f"{together:+.0%}", label(r)]


def _starts() -> Iterator[list[str]]:
    for _, r in of_kind("start"):
        who = f"{r['shape']} {r['precision']}"
        for what, samples in (("build", r["builds_s"]), ("process start to first token", r["starts_s"])):
            middle = r["build_s"] if what == "build" else r["start_to_first_token_s"]
            spread = f"{middle:.2f} ({min(samples):.2f}-{max(samples):.2f})"
            yield [f"{who}: {what}, s", spread, label(r)]
        yield [f"{who}: beyond weights and KV, MiB", f"{r['resident_beyond_bytes'] / 2**20:.0f}", label(r)]


def _serving() -> Iterator[list[str]]:
    for _, r in of_kind("serving"):
        for load in r["loads"]:
            rates = f"{load['http_tokens_per_s']:,.0f} over HTTP, {load['in_process_tokens_per_s']:,.0f} in process"
            yield [
                f"{r['shape']} {r['precision']}: {load['users']} users, tok/s",
                f"{rates}: {load['cost']:.1%}",
                label(r),
            ]


def _tensors() -> Iterator[list[str]]:
    for _, r in of_kind("tensors"):
        for protocol in ("http", "http, an id each", "grpc"):  # the second since clients that number are measured
            for name, samples in r.get(protocol, {}).items():
                rates = [one["per_s"] for one in samples]
                user, system = (statistics.median(one[what] for one in samples) for what in ("user_us", "system_us"))
                figure = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
                who = f"{r['model']} over {protocol}, {name}: requests/s"
                yield [who, f"{figure}; CPU a request {user:.0f} us, in the kernel {system:.0f} us", label(r)]
        beyond = statistics.median(one["request_us"] - one["backend_us"] for one in r["in_process"])
        yield [f"{r['model']} in process: CPU a request beyond its arithmetic", f"{beyond:.1f} us", label(r)]


def _backends() -> Iterator[list[str]]:
    for _, r in of_kind("tensors.backends"):
        for n, of_n in r["medians"].items():
            for name, one in of_n.items():
                who = f"{name}, {n} connections: CPU of the server a request, us"
                figure = f"{one['cpu_us']:,.0f}; latency {one['p50_ms']:.2f} ms, p99 {one['p99_ms']:.2f} ms"
                yield [who, figure, label(r)]


def _busy() -> Iterator[list[str]]:
    for _, r in of_kind("busy_machine"):
        for budget, one in r["medians"].items():
            who = f"{r['model']}, ISA {r['isa']}, {r['hogs']} hogs, {r['users']} users; prefill budget: {budget}"
            first = f"first token {one['ttft_p50_s']:.2f} s, p95 {one['ttft_p95_s']:.2f} s"
            figure = f"{one['tokens_per_s']:,.0f} tok/s; {first}; gap p99 {one['gap_p99_s'] * 1e3:.0f} ms"
            yield [who, figure, label(r)]


def _children() -> Iterator[list[str]]:
    for _, r in of_kind("tensors.child"):
        for n_bytes in sorted({sample["n_bytes"] for sample in r["samples"]}):
            times = [sample["child_us"] for sample in r["samples"] if sample["n_bytes"] == n_bytes]
            here = statistics.median(sample["here_us"] for sample in r["samples"] if sample["n_bytes"] == n_bytes)
            figure = f"{statistics.median(times):,.0f} ({min(times):,.0f}-{max(times):,.0f}); in process {here:,.0f}"
            yield [
                f"a tensor of {n_bytes:,} bytes to a model.py in a process of its own, and back: us",
                figure,
                label(r),
            ]


def _routes() -> Iterator[list[str]]:
    for _, r in of_kind("tensors.routes"):
        for load in r["loads"]:
            for name, samples in load["samples"].items():
                rates = [load.get("requests", load["users"]) * r["new"] / s["seconds"] for s in samples]
                cpu = statistics.median(s["server_cpu_s"] for s in samples)
                figure = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
                who = f"{r['model']}, {load['users']} users over {name}: tok/s"
                yield [who, f"{figure}; {cpu:.2f} s of the server's CPU", label(r)]


def _batching() -> Iterator[list[str]]:
    names = {"runtime_1": "ONNX Runtime, a line at a time", "runtime_16": "ONNX Runtime, 16 lines in one array",
             "ours_1": "a repository, 1 client", "ours_16": "a repository, 16 clients"}  # fmt: skip
    for _, r in of_kind("tensors.batching"):
        for way, who in names.items():
            rates = [sample[way] for sample in r["samples"]]
            spread = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
            yield [f"{r['model']}, {who}: lines/s", spread, label(r)]
        sizes = sorted(r["batch_sizes"].items(), key=lambda one: -one[1])[:3]
        yield [f"{r['model']}, 16 clients: batches by size", ", ".join(f"{n} of {s}" for s, n in sizes), label(r)]


def _sampling() -> Iterator[list[str]]:
    for _, r in of_kind("alone"):
        shares = "; ".join(f"{s['asked']}: {s['sampling_s'] / s['step_s']:.1%}" for s in r["sampling"])
        rows = r["sampling"][0]["rows"]
        yield [f"{r['shape']} {r['precision']}: sampling of {rows} rows, of a step", shares, label(r)]


def _grammars() -> Iterator[list[str]]:
    for _, r in of_kind("grammars"):
        shares = f"{r['share_of_own_step']:.1%} of its own step" + (
            f", {r['share']:.1%} of one of {r['beside']}" if "share" in r else ""
        )
        yield [f"{r['rows']} masks of {r['rows']} grammars", f"{r['cost_s'] * 1e3:.2f} ms, {shares}", label(r)]


def _loops() -> Iterator[list[str]]:
    for _, r in of_kind("loop"):
        by_answers = ", ".join(f"{seconds * 1e6:.1f} of {n}" for n, seconds in r["token_s"].items())
        yield ["the loop beside the executor, us a token by answers at a time", by_answers, label(r)]


def _calibrations() -> Iterator[list[str]]:
    for _, r in of_kind("calibration"):
        whole = r["share_of_layers"] == 1 and r["samples"] == SAMPLES
        measured = "" if whole else f" (by {r['share_of_layers']:.0%} of its layers and {r['samples']} samples)"
        for precision, run in r["runs"].items():
            who = f"{r['model']} in {precision}: statistics of {SAMPLES} samples of {r['tokens_each']} tokens, s"
            figure = f"{run['seconds_of_all']:,.0f}{measured}, {run['peak_bytes'] / 2**30:.2f} GiB at most"
            yield [who, figure, label(r)]


def _mmlu() -> Iterator[list[str]]:
    for _, r in of_kind("mmlu"):
        for name, run in r["runs"].items():
            low, high = run["interval"]
            said = f"{run['seconds'] / 60:.1f}; {run['share']:.2%} right ({low:.1%} to {high:.1%})"
            if "against" in run:
                other = run["against"]
                said += (
                    f", {other['difference']:+.2%} beside {other['precision']}, {other['changed']:,} chose otherwise"
                )
            yield [f"{r['model']} in {name}: {run['questions']:,} questions of MMLU, minutes", said, label(r)]


def _triton_tests() -> Iterator[list[str]]:
    for _, r in of_kind("triton_tests"):
        found = r["total"]
        left = f"; {found['cannot run']} cannot run here" if found.get("cannot run") else ""
        said = f"{found['pass']} of {found['ran']}, {found['pass_percent']} %{left}"
        yield [f"Triton's own tests that pass, of {len(r['suites'])} files", said, label(r)]


def _products() -> Iterator[list[str]]:
    for _, r in of_kind("products"):
        who = f"{r['precision']} on {r['isa']}, {r['threads']} threads, {r['n']} x {r['k']}"
        rates = ", ".join(f"{p['operations_per_s'] / 1e9:,.0f} with {p['rows']}" for p in r["products"])
        yield [f"{who}: 10^9 operations/s by rows", rates, label(r)]


def _hadamard() -> Iterator[list[str]]:
    for _, r in of_kind("hadamard"):
        for p in r["prices"]:
            plain, *others = p["ways"]
            who = f"rounding and products of a layer of 1.1B, {p['weights']} on {p['isa']}, {p['rows']} rows"
            told = ", ".join(f"{w['name']} {w['ratio'] - 1:+.1%}" for w in others)
            figure = f"{plain['median_s'] * 1e3:.3f} ms with activations in {plain['name']}; {told}"
            yield [who, figure, label(r)]


def _gpu() -> Iterator[list[str]]:
    """Rows of a GPU's script; how many requests they count stands with them."""
    units = (("tokens_per_s", "tokens/s"), ("ttft_ms", "ms"), ("ready_s", "s from its start until it is ready"))
    for _, r in of_kind("gpu"):
        figures = [f"{r[k]:,.1f} {unit}" for k, unit in units if k in r]
        if r["row"].startswith("profile"):
            figures += [f"{step['what']}: {step['ms']:,.2f} ms" for step in r.get("steps", ())]
        if "share_of_roofline" in r:
            figures.append(f"{r['share_of_roofline']:.0%} of what the device reads and multiplies")
        if "requests" in r:
            figures.append(f"{r['requests']:,} of {r['requests_of_the_table']:,} requests")
        if "ok" in r:
            figures.append("agrees" if r["ok"] else "does not agree")
        yield [
            f"{r['shape']} on {r['device']['name']}: {r['row']}",
            ", ".join(figures or [r.get("refused", "")]),
            label(r),
        ]


def _gpu_kernels() -> Iterator[list[str]]:
    """Runs of the same code are alike: only the newest is told kernel by kernel, and of each before it a line."""
    found = [r for _, r in of_kind("gpu_kernels")]
    for r in found[:-1]:
        kernels = r["kernels"]
        spilled = [k["spilled_bytes"] for k in kernels if k["spilled_bytes"]]
        told = f"{len(kernels)} of them, {max(k['registers'] for k in kernels)} registers at most, "
        told += (
            f"{max(k['shared_bytes'] for k in kernels):,} bytes shared; {len(spilled)} spill, {sum(spilled):,} bytes"
        )
        yield [f"GPU kernels, compiled alone, {_listed(k['architecture'] for k in kernels)}", told, label(r)]
    for r in found[-1:]:
        for k in r["kernels"]:
            name = f"{k['kernel']}, {k['about']}" if k["about"] else k["kernel"]
            told = f"{k['registers']} registers, {k['shared_bytes']:,} bytes shared, {k['spilled_bytes']} spilled"
            yield [f"GPU kernel, compiled alone: {name}, {k['architecture']}", told, label(r)]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
