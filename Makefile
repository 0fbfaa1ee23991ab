# Every target works from a fresh clone: .venv is made and filled on first use, and only what changed is redone.

PYTHON ?= python3
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard native/*.h native/*.cc)
PACKAGES := $(wildcard src/syncline/*/__init__.py src/syncline/*/*/__init__.py)  # an install knows where they are
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadgroup  # most tests wait for processes that wait for each other
HEADING = @printf '\n== %s\n'
COMPILER := $(firstword $(foreach name,$(CXX) c++ clang++,$(shell command -v $(name))))
comma := ,

# Pinned versions also inside pip's own build environments.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo bench test test-all checks lint format native-tests sanitize docs clean distclean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed  ## Make .venv and install syncline into it, editable

demo: .venv/.installed  ## See what synchronization costs and what makes it cheaper
	@$(BIN)/syncline demo

bench: .venv/.installed  ## Measure against the peers on this machine (installs Open MPI and MPICH when root)
	@bash .ci/install
	@$(BIN)/syncline bench

test: checks  ## Format, lint, types, native tests, Python tests without the slow ones
	$(HEADING) "Python tests"
	@$(PYTEST) -m "not slow"

test-all: checks  ## The same with the slow tests
	$(HEADING) "Python tests, slow ones included"
	@$(PYTEST)

checks: lint native-tests

lint: .venv/.installed  ## Check format, lint and types
	$(HEADING) "Format"
	@$(BIN)/ruff format --check
	$(HEADING) "Lint"
	@$(BIN)/ruff check
	$(HEADING) "Types"
	@$(BIN)/mypy --strict src

format: .venv/.installed  ## Format the code and repair what lint can repair
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

# $(call native_tests,BUILD_FOLDER,CMAKE_OPTIONS)
define native_tests
	@mkdir -p $(1)
	@{ $(BIN)/cmake -S . -B $(1) -DSYNCLINE_TESTS=ON $(2) && $(BIN)/cmake --build $(1) --parallel 2; } \
		> $(1)/log 2>&1 || { cat $(1)/log; exit 1; }
	@./$(1)/native_tests
endef

native-tests: .venv/.installed
	$(HEADING) "Native tests"
ifeq ($(COMPILER),)
	@echo "Skipped: there is no C++ compiler here"
else
	$(call native_tests,build/tests)
endif

sanitize: .venv/.installed  ## Run the native tests under the address, undefined-behaviour and thread sanitizers
	$(HEADING) "Native tests, address and undefined behaviour"
	$(call native_tests,build/sanitize-address,-DSYNCLINE_SANITIZE=address$(comma)undefined)
	$(HEADING) "Native tests, threads"
	$(call native_tests,build/sanitize-thread,-DSYNCLINE_SANITIZE=thread)

docs: .venv/.installed  ## Write docs/algorithms.md from the collectives themselves
	@$(BIN)/python -m syncline.collectives.table docs/algorithms.md

clean:  ## Remove what was built; .venv stays
	@rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2> /dev/null || true

distclean: clean  ## Remove .venv as well
	@rm -rf .venv

# The stamps: the environment, what it holds, and syncline itself (again whenever a native source changes).

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "syncline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "Making .venv"; $(PYTHON) -m venv .venv; }
	@touch $@

.venv/.dependencies: .venv/.made constraints.txt
	@echo "Installing dependencies (the first time takes a minute or two)"
	@$(BIN)/pip install -qq -r constraints.txt
	@touch $@

# Where there is a compiler, a native build that fails is an error and not a reason to do without.
.venv/.installed: .venv/.dependencies pyproject.toml $(NATIVE) $(PACKAGES)
	@echo "Building and installing syncline"
	@SYNCLINE_REQUIRE_NATIVE=$(if $(COMPILER),1,0) $(BIN)/pip install -qq --no-build-isolation -e '.[dev,mpi]'
	@ls .venv/lib/python*/site-packages/syncline/_native* > /dev/null 2>&1 || \
		echo "Note: without a C++ compiler there is no native module; the slower Python paths are used"
	@touch $@
