# make train: set up and train on embedded data.   make test: set up, lint, type-check, test.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=
TESTS  ?= not slow

.PHONY: train test lint mutants faults quality agf bench docs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

train: $(READY) ## train infvit_linear_mini on scikit-learn's digits; ARGS="key=value ..." changes anything
	$(RUN)/python train.py $(ARGS)

# One thread per worker: two busy processes of two threads crawl.
test: $(READY) lint ## TESTS=slow for the slow ones, TESTS="slow or not slow" for all, as CI runs them
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest --numprocesses 2 --dist loadgroup -m "$(TESTS)"

lint: $(READY)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

mutants: $(READY) ## plant bugs one by one; each must fail a test
	OMP_NUM_THREADS=1 $(RUN)/python tests/mutants/run.py --jobs 2 $(ARGS)

faults: $(READY) ## kill real runs everywhere and compare; ARGS="-k worker" for some, FAULTS_SEED=7 for others
	FAULTS_WHOLE=1 OMP_NUM_THREADS=1 $(RUN)/python -m pytest tests/faults -vv $(ARGS)

quality: $(READY) ## attention quality of softmax, Pure and Linear on embedded data: 9 small runs and a table
	$(RUN)/python benchmarks/quality.py $(ARGS)

agf: $(READY) ## AGF beside softmax, Pure and Linear on embedded data, with its ablations: 21 small runs, tables, a figure
	$(RUN)/python benchmarks/agf.py $(ARGS)

bench: $(READY)
	$(RUN)/python benchmarks/attention.py
	$(RUN)/python benchmarks/loop_overhead.py

docs: $(READY) ## the pages that are generated from code
	$(RUN)/python -m infvit.reports.configuration > docs/configuration.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
