# The commands a developer types. What they do lives in .ci/, pyproject.toml and the tests.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint pytest soak crossings bench gpu-bundle clean

VENV := .venv/bin

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what is missing: system programs, .venv, CRIU (needs root)
	@bash .ci/setup.sh

demo: setup ## save and restore a sample program, on the GPU if there is one
	@bash .ci/demo.sh

# --foreground: otherwise the terminal's Ctrl-C would not reach the tests.
test: ## lint, then every test this host can run
	@timeout --foreground --kill-after=30 24m $(MAKE) --no-print-directory setup lint pytest

lint: setup ## style, types, and which module may import which
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy --strict gpuckpt
	$(VENV)/lint-imports

# Byte code is kept, as in an installation: the tests start gpuckpt a thousand times and more.
# In three processes where each can have a network and a /run/gpuckpt of its own: two leave a third of two cores idle,
# waiting; a fourth gains nothing.
# The session's own limit comes before that of `make test`, because it still says which tests failed.
pytest: lint
	@if tests/apart -c '' 2>/dev/null; then set -- --dist loadfile --no-loadscope-reorder --tx '3*popen//python=tests/apart'; else set --; fi; \
	exec env -u PYTHONDONTWRITEBYTECODE $(VENV)/python -m pytest --session-timeout=1290 "$$@"

soak: setup ## a thousand dumps and restores with something killed in each (needs root): SOAK="--count 1000 --seed 7 --minutes 90"
	@if tests/apart -c '' 2>/dev/null; then set -- tests/apart; else set -- $(VENV)/python; fi; \
	env -u PYTHONDONTWRITEBYTECODE "$$@" tests/soak/soak.py $(SOAK)

crossings: setup ## a migration with each of its processes killed at each of its steps (needs root)
	$(VENV)/python tests/faults/crossings.py

bench: setup ## gpuckpt against CRIU alone, on this host (needs root): BENCH="--megabytes 2048 --rounds 7"
	$(VENV)/python tests/bench/bench.py $(BENCH)

gpu-bundle: setup ## a folder that runs the GPU tests on a host without network: PYTHON_VERSION=3.12
	@bash .ci/gpu-bundle.sh --python $(or $(PYTHON_VERSION),3.12)

clean: ## remove what the commands above made here; CRIU in /opt/gpuckpt stays
	rm -rf .venv gpu-bundle build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find gpuckpt tests -name __pycache__ -prune -exec rm -rf {} +
