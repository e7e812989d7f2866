# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# What CI runs. Any torch from 2.10 on works: make TORCH=torch==2.11.0 test
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: install demo test bench lint doctor clean

install: $(STAMP)

# torch comes first and by itself: a requirement without a version would let pip fetch a build with CUDA.
$(STAMP): pyproject.toml setup.py $(wildcard csrc/*.h csrc/cpu/* csrc/cuda/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "setuptools>=77" wheel ninja
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]" "$(TORCH)"
	touch $@

demo: install
	$(BIN)/python -m bench.demo $(DEMO)

# One process a processor, so each with one thread; tests of threads set their own number.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical $(PYTEST)

bench: install
	$(BIN)/python -m bench --quick $(BENCH)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
	$(BIN)/mypy

doctor: install
	$(BIN)/python -m fusedaccum doctor

clean:
	rm -rf $(VENV) build *.egg-info fusedaccum/_build.json fusedaccum/*.so
