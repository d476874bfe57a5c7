# make run            install and train the quick start on this machine, about five minutes
# make staleness      train the quick start on responses of up to 0, 1, 2 and 4 steps of age, and compare
# make test           install, lint and run all tests that need no heavy back end, about ten minutes on two cores
# make test-fast      install and run the tests that take less than ten seconds each
# make reference      write docs/reference.md and docs/algorithms anew from types and docstrings
# make families       train each model family under each strategy and write docs/models.md, after `make test-backends`
# make test-lightning run Lightning's own tests of strategies with ours, from a checkout: LIGHTNING=folder
# make test-backends  install vLLM and Megatron for CPUs and run the tests that need them, on Python 3.11 and 3.12
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STEPS ?= 80
SEEDS ?= 0
HERE := not backend and not oracle and not seeds and not real_model
LAUNCHES := tests/ray tests/resume tests/strategies
export OMP_NUM_THREADS ?= 1
# Images often forbid byte code. Each of the tests' many processes would then compile all that it imports, for 10 to 20 s.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install run staleness test test-fast test-slow test-launches test-long test-browser test-lightning test-backends lint docs reference families clean

install: $(VENV)/installed

# pip before 23.3 crashes on some of these packages. Python compiles what it imports; pip would compile all, for a minute.
$(VENV)/installed: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

run: install
	$(BIN)/python examples/quickstart/run.py --steps $(STEPS) --seeds $(SEEDS)

staleness: install
	$(BIN)/python benchmarks/staleness.py

# Two at a time, the longest first, so that two cores are at work to the end.
test: install
	$(MAKE) --jobs=2 --output-sync=target test-launches lint test-fast test-long

test-fast: install
	$(BIN)/python -m pytest -m "not slow and $(HERE)"

# All slow tests: those in folders that start most processes, and the others.
test-slow: test-launches test-long

test-launches: install
	$(BIN)/python -m pytest -m "slow and $(HERE)" $(LAUNCHES)

test-long: install
	$(BIN)/python -m pytest -m "slow and $(HERE)" $(addprefix --ignore=,$(LAUNCHES))

# Each family under each strategy, in vLLM too, after `make test-backends`.
families: install
	$(BIN)/python -m tests.families.matrix auto
	$(BIN)/python -m tests.families.matrix fsdp
	.venv-megatron/bin/python -m tests.families.matrix megatron
	.venv-megatron/bin/python -m tests.families.matrix megatron_tp2
	.venv-backends/bin/python -m tests.families.matrix vllm
	$(BIN)/python docs/make_models.py

test-backends:
	$(PYTHON) tests/run_backends.py

# Needs Chromium, such as `apt-get install chromium`.
test-browser: install
	$(BIN)/python tests/browser_check.py

# LIGHTNING is a checkout of the version that is installed; the wheel has no tests.
test-lightning: install
	$(BIN)/python -m tests.lightning_suite $(LIGHTNING)

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
