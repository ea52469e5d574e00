# Two commands: `make run` starts the gateway with a simulated Neuron fleet, `make test` runs the whole suite.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: run test check format bench soak study prime-day lock clean

run: $(VENV)/.run
	@$(BIN)/warmroute demo $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python -m bench $(ARGS)

# docs/study.md; `make study ARGS="--traces DIR"` with the public traces in DIR.
study: $(VENV)/.dev
	$(BIN)/python -m bench.study $(ARGS)

# Half an hour of faults under 300 clients, of which a third leaves early.
soak: $(VENV)/.dev
	$(BIN)/python -m bench.soak --schedule all --seconds 1800 --clients 300 $(ARGS)

# docs/prime-day.md: a surge and a flood in virtual time, with admission and without; some five minutes.
prime-day: $(VENV)/.dev
	$(BIN)/python -m bench.prime_day docs/prime-day.md

# Hash-pinned locks without index addresses.
lock: $(VENV)/.dev
	for name in requirements requirements-dev; do \
	  $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-header --no-emit-index-url \
	    --no-emit-trusted-host --no-emit-find-links --output-file $$name.lock $$name.in || exit 1; done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: requirements.lock pyproject.toml | $(VENV)/bin/python
	@echo "installing warmroute into $(VENV)"
	@$(PIP) install --quiet --require-hashes -r requirements.lock
	@PYTHONWARNINGS=ignore $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.run
	@echo "installing what tests and checks need into $(VENV)"
	@$(PIP) install --quiet --require-hashes -r requirements-dev.lock
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache
