# make demo, make test, make check, make bench, make docs, make site, make clean: each installs what it needs first.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE := .venv-docs
WORKERS := 2

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench docs site clean

help:
	@echo "make demo | test | check | bench | docs | site | clean"

install: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt scripts/install.sh
	@./scripts/install.sh $(VENV)
	@touch $@

demo: $(STAMP)
	$(BIN)/gossamer demo

# One thread a worker, which does not spin while it waits: two workers on two cores do not compete.
test: $(STAMP)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests

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

# Strict: a link, a heading or a name in a docstring that leads nowhere is an error.
site: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --quiet

$(SITE)/.installed: pyproject.toml scripts/install.sh
	@./scripts/install.sh $(SITE) docs
	@touch $@

clean:
	rm -rf $(VENV) $(SITE) site build dist demo .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
