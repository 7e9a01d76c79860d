# Two commands do everything, each by itself: `make train` and `make test`. To work on it: `make check`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Processes that run tests; auto is one a core.
PROCESSES ?= auto
ONE_MORE ?= $(shell expr $$(nproc) + 1)
TRAIN_FLAGS ?= --model=OneBillionWordTiny --mesh_shape=layers:2 --num_microbatches=8 --steps=300
LOGDIR ?= runs/OneBillionWordTiny

.PHONY: train check few test test-all gpu gpu-bench lint style types docs release clean

train: $(STAMP)
	$(BIN)/python -m models.one_billion_word.train $(TRAIN_FLAGS) --logdir=$(LOGDIR)

# Who has nothing left to do takes over half of what another process has: no core is idle at the end,
# and nearly every file stays in one process, which makes what its tests share once.
PYTEST := $(BIN)/python -m pytest
TOGETHER := -m "not serial" --numprocesses=$(PROCESSES) --dist=worksteal

# Types are checked beside the tests: pyright takes one core for half a minute.
check: style
	$(MAKE) --no-print-directory --jobs=2 types few

few: $(STAMP)
	$(PYTEST) $(TOGETHER) --cases=few

# In two parts, each in processes of its own, as what a process has traced partly stays with it. The
# second part has one process more than cores: programs that tests start are waited for.
FIRST := tests/layers tests/lowering tests/recurrent
SERIAL := -m serial $(shell grep -rl --include='*.py' 'mark\.serial' tests)
SECOND := -m "not serial" --numprocesses=$(ONE_MORE) --dist=worksteal $(FIRST:%=--ignore=%)

test: $(STAMP)
	$(PYTEST) $(TOGETHER) $(FIRST)
	$(PYTEST) $(SECOND)
	$(PYTEST) $(SERIAL)

test-all: $(STAMP)
	$(PYTEST) $(TOGETHER) $(FIRST) --cases=all
	$(PYTEST) $(SECOND) --cases=all
	$(PYTEST) $(SERIAL) --cases=all

# The tests marked `gpu` on the GPUs of this machine; without one all are skipped.
gpu: $(STAMP)
	PIPEMESH_TEST_DEVICES=GPU $(PYTEST) -m gpu --cases=all

# One table of speeds of a GPU.
gpu-bench: $(STAMP)
	$(BIN)/python benchmarks/gpu/run.py

lint: style types

style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

# The first page is docs/_build/index.html.
docs: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python -m sphinx -b html -c docs -d docs/_build/.doctrees -W --keep-going -n -q . docs/_build

# Source archive, wheel and documentation of the tag of HEAD, in dist/; REHEARSE=1 needs no tag.
release: $(STAMP)
	PYTHON=$(PYTHON) $(BIN)/python .ci/release.py $(if $(REHEARSE),--rehearse)

# Python compiles what it imports; all of it would take half of the time of an installation.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13) and "pipemesh needs Python 3.10 to 3.13; choose one with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) docs/_build dist runs
