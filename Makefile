# make demo    a virtual environment, the package, `mx-driving check` and `mx-driving demo`
# make test    the same environment, linters and the whole test suite
# make native  rebuild the C++ library of an existing environment after a change in native/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
NATIVE := CMakeLists.txt $(wildcard native/src/*) $(wildcard native/include/*)

.PHONY: demo test lint native clean

# torch is pinned because a bare `torch` can bring several GB of CUDA packages; the package itself takes torch >= 2.6.
$(VENV)/made: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch scikit-build-core cmake ninja
	touch $@

# Editable, so that a change in src/ needs no reinstall; a change in native/ or pyproject.toml does.
$(STAMP): $(VENV)/made pyproject.toml $(NATIVE)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
	touch $@

demo: $(STAMP)
	$(BIN)/mx-driving check --quick
	$(BIN)/mx-driving demo --out demo.png

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror native/src/*.cpp native/src/*.h native/include/*.h

native: $(STAMP)

clean:
	rm -rf $(VENV) build
