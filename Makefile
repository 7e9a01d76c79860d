# Two commands do everything, each by itself: `make train` and `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

TRAIN_FLAGS ?= --model=OneBillionWordTiny --mesh_shape=layers:2 --num_microbatches=8 --steps=300
LOGDIR ?= runs/OneBillionWordTiny

.PHONY: train test lint docs clean

train: $(STAMP)
	$(BIN)/python -m models.one_billion_word.train $(TRAIN_FLAGS) --logdir=$(LOGDIR)

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright

# The first page is docs/_build/index.html.
docs: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m sphinx -b html -c docs -d docs/_build/.doctrees -W --keep-going -n -q . docs/_build

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13) and "pipemesh needs Python 3.10 to 3.13; choose one with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) docs/_build runs
