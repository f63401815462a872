# make demo   everything set up, `tiny` compiled, served, asked and measured, in one go
# make test   the whole test suite
# make check  what CI runs: format, lint, types, the tests, and how old the last nightly results are
# make release-check  the same, and fails where a nightly result is older than the files it covers
# make nightly  what is too slow for that; make nightly PARTS=fuzz-gguf for one part
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The folder itself is newer when one of its kernels was removed.
NATIVE := src/millrace/kernels $(shell find native src/millrace/kernels -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name 'declare.py' -o -name 'codegen.py') CMakeLists.txt
# Processes of the suite; each loads models and computes with threads of its own.
WORKERS ?= 2
TOOLS := "cmake>=3.25" "ninja>=1.11" "scikit-build-core>=0.10"

.PHONY: all demo test test-avx2 timing nightly nightly-status check release-check lint wheel wheel-check tiny bench clean

all: $(STAMP)

$(PY):
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip

# Without isolation the build folder stays, so that a change recompiles only what it touches.
$(STAMP): $(PY) pyproject.toml $(NATIVE)
	$(PY) -m pip install --quiet $(TOOLS)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --quiet --no-build-isolation --editable .
	touch $@

# torch first and pinned: the plain name would bring gigabytes of CUDA along.
$(VENV)/.dev: $(STAMP)
	$(PY) -m pip install --quiet "torch==2.13.0"
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pip install --quiet --no-build-isolation --editable ".[dev]"
	touch $@

demo: $(STAMP)
	$(VENV)/bin/millrace demo

test: $(VENV)/.dev
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not alone and not timing and not nightly" $(TEST_FLAGS)
	$(PY) -m pytest -m "alone and not timing and not nightly" $(TEST_FLAGS) tests/bench

# What depends on the instruction set, as a processor with AVX2 alone runs it.
test-avx2: $(VENV)/.dev
	MILLRACE_ISA=avx2 $(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not alone and not timing and not nightly" \
	  -k "not cuda and not gpu" $(TEST_FLAGS) tests/native tests/kernels tests/engine tests/compile tests/runtime tests/evaluate tests/tune tests/e2e

timing: $(VENV)/.dev
	$(PY) -m pytest -m timing -s

# What is too slow for every change, part by part. Results: tools/nightly/results, committed once with the next change.
nightly: $(VENV)/.dev
	$(PY) -m tools.nightly $(PARTS)

# The age of each part's last result; fails if one is absent, or red without a known reason.
nightly-status: $(VENV)/.dev
	$(PY) -m tools.nightly --status

# Before a release: fails also where a result is older than the files it covers, or an instruction set was not exercised.
release-check: check
	$(PY) -m tools.nightly --release

lint: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(PY) -m tools.name_lint

check: TEST_FLAGS = --skips known
check: lint test test-avx2 nightly-status

wheel: $(PY)
	rm -rf dist
	$(PY) -m pip wheel --quiet --no-deps --wheel-dir dist .

# The wheel serves where there is no compiler: installed into a venv of its own, with nothing else on the path.
wheel-check: wheel
	rm -rf build/wheel-check && python3 -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install --quiet dist/millrace-*.whl
	cd build && env -i HOME="$(CURDIR)/build" PATH="$(CURDIR)/build/wheel-check/bin" millrace generate tiny -p "Once" --max-tokens 8
	cd build && env -i HOME="$(CURDIR)/build" PATH="$(CURDIR)/build/wheel-check/bin" millrace demo

tiny: $(VENV)/.dev
	$(PY) -m tools.tiny.make

bench: $(STAMP)
	$(PY) -m benchmarks

clean:
	rm -rf build dist $(VENV)
