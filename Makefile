# Everything from a fresh clone:   make quickstart   |   make test
# Needs Python 3.11 or newer, git, make and (for offload by DeepSpeed only) a C++ compiler.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup quickstart docs test test-all test-distributed test-real test-browser fuzz bench bench-full \
	bench-real real real-train lint test-engines engine-exports

help:
	@echo "make setup             create $(VENV) from constraints.txt"
	@echo "make quickstart        train heads on the embedded model for two minutes, then decode with them"
	@echo "make test              lint, types and the default tests"
	@echo "make test-all          the slow tests too"
	@echo "make test-distributed  the tests that start several processes"
	@echo "make fuzz              other random examples for the tests; keeps those that fail"
	@echo "make bench             measure every figure of the README again (about 50 minutes)"
	@echo "make bench-full        train and measure all of BENCHMARKS.md again (about a day)"
	@echo "make real              SmolLM2 (fetched, 93 MB) with the heads that ship: an answer, a short bench"
	@echo "make real-train        train those heads again (twice 100 minutes at most)"
	@echo "make bench-real        measure all figures on SmolLM2 again (90 minutes at most)"
	@echo "                       all of these but real go on where they were stopped with BENCH=--resume"
	@echo "make test-real         the tests that need SmolLM2"
	@echo "make test-browser      the race of specheads serve in Chromium, which has to be there"
	@echo "make test-engines      let engines decode what we export, beside our own decoding; installs them (8 GB)"
	@echo "make docs              the pages as a site in build/site, links checked"
	@echo "make lint              ruff and mypy"

# The stamp is written last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "specheads: needs Python 3.11 or newer; say which: make PYTHON=/path/to/python3"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@

setup: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/python scripts/quickstart.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python scripts/build_docs.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A process per core, each with one thread; a file's tests share what they build. In the order of
# their names, the slow ones of end_to_end come first, and no core waits at the end. SHUFFLE=seed
# takes files and their tests in another order, in which they must be green too. The programs that
# they start by the hundred would compile the project each time where byte code is not kept.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
	$(if $(SHUFFLE),--shuffle $(SHUFFLE))

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m "not gpu and not real and not browser"

test-distributed: $(STAMP)
	$(BIN)/pytest -q -m distributed

test-real: $(STAMP)
	$(BIN)/pytest -q -m real

# Needs Chromium: apt install chromium
test-browser: $(STAMP)
	$(BIN)/python -m pip install -q "playwright>=1.50"
	$(BIN)/pytest -q -m browser tests/serve

# The default tests draw the same examples every time; here it is FUZZ="--seed N" that repeats them.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py $(FUZZ)

bench: $(STAMP)
	$(BIN)/python scripts/bench_readme.py $(BENCH)

bench-full: $(STAMP)
	$(BIN)/python scripts/bench_full.py $(BENCH)

# Engines in environments of their own, gigabytes; results that are there are kept.
engine-exports: $(STAMP)
	$(BIN)/python scripts/engines.py --base tinycode --train-only $(ENGINES)
	$(BIN)/python scripts/engines.py --base smollm2 --train-only $(ENGINES)

test-engines: engine-exports
	$(BIN)/python scripts/engines.py --base tinycode $(ENGINES)
	$(BIN)/python scripts/engines.py --base smollm2 $(ENGINES)
	$(BIN)/python scripts/render.py

bench-real: $(STAMP)
	$(BIN)/python scripts/bench_real.py $(BENCH)

real: $(STAMP)
	$(BIN)/python scripts/real.py

real-train: $(STAMP)
	$(BIN)/python scripts/real.py --train $(BENCH)
