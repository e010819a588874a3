# make demo   a fresh machine to the first table    make test   tests, lint and types, as CI runs them
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PYTEST_ARGS ?=

.PHONY: demo test lint format assets clean
.DELETE_ON_ERROR:

demo: assets
	$(BIN)/python -m chai_eval

test: $(VENV)/.installed-dev assets
	HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(PYTEST_ARGS)
	$(MAKE) --no-print-directory lint

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The model and the documents, downloaded once per user, checked, kept in the cache directory.
assets: $(VENV)/.installed
	$(BIN)/python -m chai_eval.data

# A stamp, not the directory, so that an install that was interrupted is started again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
