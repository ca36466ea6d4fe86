# make demo    install into .venv, then train the digits on two simulated nodes of this machine
# make test    install into .venv, then run the tests (the ones on a real Slurm skip without root or Slurm)
# make test-slurms   the tests on a real Slurm, with each one that this machine has: the packaged one, /opt/slurm-*
#                    (SLURMS=/opt/slurm-26.05 picks some); those that take minutes, marked newest, are here only
# make test-datasets   install Hugging Face's datasets and litData as well (80 MB), and run the tests that need it
# make test-cuda   on a machine with a GPU: what is of GPUs alone, and the zoo there; the other tests do not see it
# make chaos   the long fault runs on a real Slurm of this machine (CHAOS_SEED=1 CHAOS_FAULTS=24)
# make lint    ruff and mypy
# make clean   remove .venv and caches; runs are kept
#
# PYTHON=python3.12 picks another Python (3.10 or newer); PYTEST_ARGS="-k resume" picks tests; UV=uv installs with uv all
# but torch, in a fifth of the time.

PYTHON ?= python3
PYTEST_ARGS ?=
UV ?=
SLURMS ?= "" $(wildcard /opt/slurm-*)
# More workers than cores, because the tests that start a Slurm cluster mostly wait for it.
WORKERS ?= 4

BIN := .venv/bin
# Python compiles what is imported, which is little of what is installed.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile -c constraints.txt
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python -c constraints.txt,$(PIP))
TORCH := $(shell grep '^torch==' constraints.txt)

PYTEST := $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slurms test-datasets test-cuda chaos lint clean

demo: .venv/.package
	$(BIN)/cluster-ddp local quickstart --nodes 2
	@echo "cluster-ddp is installed in .venv: source .venv/bin/activate"

test: .venv/.everything
	$(PYTEST) $(PARALLEL) -m "not chaos and not datasets and not newest" $(PYTEST_ARGS)

test-slurms: .venv/.everything
	@status=0; for slurm in $(SLURMS); do \
	  echo "== Slurm: $${slurm:-the packaged one}"; \
	  TEST_SLURM=$$slurm $(PYTEST) $(PARALLEL) -m "cluster and not chaos" $(PYTEST_ARGS) || status=1; \
	done; exit $$status

# Where it cannot be imported, the tests would be skipped.
test-datasets: build/datasets/.installed
	build/datasets/bin/python -c "import datasets, litdata"
	build/datasets/bin/python -m pytest -o cache_dir=build/datasets/cache $(PARALLEL) -m "datasets and not chaos" \
	  $$(grep -rl --include="*.py" mark.datasets tests) $(PYTEST_ARGS)

test-cuda: .venv/.everything
	$(PYTEST) $(PARALLEL) --cuda -m "not chaos and not datasets" tests/zoo tests/*/test_*_cuda.py $(PYTEST_ARGS)

chaos: .venv/.everything
	CHAOS_TABLES=build/chaos $(PYTEST) -m chaos -s $(PYTEST_ARGS)
	@echo "What each fault cost: build/chaos/"

lint: .venv/.everything
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# The stamps: a second call installs nothing. Torch comes first and pinned, so that nothing pulls another build of it.
.venv/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "cluster_ddp needs Python 3.10 or newer: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv; torch is the large part."
	$(PIP) $(TORCH)
	@touch $@

.venv/.package: .venv/.torch pyproject.toml
	$(PIP) -e .
	@touch $@

.venv/.everything: .venv/.torch pyproject.toml
	$(INSTALL) -e '.[test,dev]'
	@touch .venv/.package $@

# A copy of .venv, by hard links: where datasets is installed, whatever imports transformers imports it too. What
# litData's boto3 asks for (python-dateutil<3) contradicts what there is; it works with it.
build/datasets/.installed: .venv/.everything
	rm -rf build/datasets
	mkdir -p build
	cp -al .venv build/datasets
	$(INSTALL:$(BIN)/%=build/datasets/bin/%) -e '.[datasets]'
	$(INSTALL:$(BIN)/%=build/datasets/bin/%) --no-deps litdata boto3 botocore s3transfer jmespath
	@touch $@
