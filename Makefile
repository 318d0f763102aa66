# Every target sets up .venv by itself when it is missing, or older than the files that say what goes into it.
PYTHON ?= python3
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count()))')
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help reproduce test notebooks export

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile | expand -t 18

.venv/ready: settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"$(PYTHON) is Python {sys.version.split()[0]}: make PYTHON=... takes 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -e '.[notebooks,dev]'
	touch $@

reproduce: .venv/ready ## regenerate the width experiment offline, from embedded digits, into runs/mlp_width
	$(BIN)/sparse-irm reproduce mlp_width --preset quick --out runs/mlp_width

test: .venv/ready ## run every check: the notebooks, the package, the project's own rules
	$(BIN)/python -m pytest tests -q -n $(WORKERS)

notebooks: .venv/ready ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab nbs $(if $(filter 0,$(shell id -u)),--allow-root)

export: .venv/ready ## after editing notebooks: strip outputs, write the package and README.md
	$(BIN)/jupyter nbconvert --clear-output --inplace $(wildcard nbs/*.ipynb nbs/reproduce/*.ipynb)
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/jupyter nbconvert --to markdown --output-dir . --output README nbs/index.ipynb
