# Each verb sets up what it needs: a Python >= 3.11 with venv is all a machine must have.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup fmt lint type test ray long demo bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "heliostat needs Python 3.11 or newer, found " + sys.version.split()[0] + "; run make PYTHON=python3.11 ..."'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[envs,test]'
	@touch $@

fmt: setup  ## rewrite the sources in house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: setup
	$(BIN)/pyright

test: setup lint type  ## everything CI runs
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report= --durations=10
	$(BIN)/coverage report --include='platform/*' --skip-covered --fail-under=90

ray: setup  ## only the tests that start a real Ray
	$(BIN)/pytest -m ray

long: setup  ## a node that dies and one that comes, in minutes
	$(BIN)/pytest -m long

demo: setup  ## train a reasoning policy on a local Ray, three seeds, and write its report
	$(BIN)/python -m cluster.demo

bench: setup
	$(BIN)/python -m benchmarks.pool
	$(BIN)/python -m benchmarks.search
	$(BIN)/python -m benchmarks.rllib
	$(BIN)/python -m benchmarks.engines
	$(BIN)/python -m benchmarks.t1

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .coverage*
