# make run            install and train the quick start on this machine, about five minutes
# make test           install and run the fast core of the tests, slow ones included
# make reference      write docs/reference.md and docs/algorithms anew from types and docstrings
# make test-backends  install vLLM and Megatron for CPUs and run the tests that need them, on Python 3.11 and 3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STEPS ?= 80
SEEDS ?= 0
export OMP_NUM_THREADS ?= 1

.PHONY: install run test test-fast test-slow test-backends lint docs reference clean

install: $(VENV)/installed

# pip before 23.3 crashes on some of these packages.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

run: install
	$(BIN)/python examples/quickstart/run.py --steps $(STEPS) --seeds $(SEEDS)

# Side by side: each takes one of two cores most of the time.
test: install lint
	$(MAKE) --jobs=2 --output-sync=target test-fast test-slow

test-fast: install
	$(BIN)/python -m pytest -m "not slow and not backend and not oracle and not real_model"

test-slow: install
	$(BIN)/python -m pytest -m "slow and not backend and not oracle and not real_model"

test-backends:
	$(PYTHON) tests/run_backends.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/python -m mkdocs build --strict

reference: install
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_algorithms.py

clean:
	rm -rf $(VENV) .venv-backends .venv-megatron build dist *.egg-info
