# Everything happens in .venv; a second run sets up nothing.
PYTHON ?= python3
# On a machine without a GPU: make install PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
BENCH_BUDGET_S ?= 400
BIN := .venv/bin
INSTALLED := .venv/installed
BROWSER := .venv/browser

.PHONY: bench browser guide install lint reference test test-all testbed testbed-down clean

bench: $(INSTALLED)  ## tracks A to E, small, on a Ray of its own; writes the report
	$(BIN)/raybench run a b c d e --scale smoke --budget-s $(BENCH_BUDGET_S) --results results
	$(BIN)/raybench report results -o report

install: $(INSTALLED)  ## leaves .venv/bin/raybench

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "raybench needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[test]'
	touch $@

lint: $(INSTALLED)  ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser: $(BROWSER)  ## a headless Chromium for the tests of report.html

# Where it can be neither found nor installed, those tests are skipped.
$(BROWSER): $(INSTALLED)
	for name in chromium-headless-shell chromium chromium-browser google-chrome; do command -v $$name && break; done \
	  || { test "$$(id -u)" = 0 && apt-get update -qq \
	       && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell; } \
	  || echo "no Chromium: the tests of report.html are skipped"
	touch $@

test: $(INSTALLED) $(BROWSER)  ## what every change has to pass
	$(BIN)/python -m pytest -m "not slow"

test-all: $(INSTALLED) $(BROWSER)  ## and what is too long for every change
	$(BIN)/python -m pytest

guide: $(INSTALLED)  ## the numbers and figures of docs/guide.md, from results/
	$(BIN)/python -m raybench.report.guide results docs

reference: $(INSTALLED)  ## results/reference/ anew
	rm -rf results/reference
	$(BIN)/python -c 'from raybench.report.reference import reference_folder, write_references as w; w(reference_folder())'

testbed: $(INSTALLED)  ## a cluster of two hosts on this machine, to play with (needs root); `make testbed-down` ends it
	$(BIN)/python -m tests.testbed up

testbed-down: $(INSTALLED)
	$(BIN)/python -m tests.testbed down

clean:  ## leaves only what git tracks, and results
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis report
