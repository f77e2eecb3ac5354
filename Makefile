# make train   installs everything and trains the default model
# make test    installs everything and runs what CI runs
# make fuzz    tries random configurations for MINUTES
PYTHON ?= python3
VENV ?= .venv
EXTRA ?=
ARGS ?=
WORKERS ?= 4
MINUTES ?= 60
BIN := $(VENV)/bin
# Hides the warning of setuptools on every editable install, but no errors.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check
WHEEL_VENV := build/wheel-venv
ALONE_VENV := build/alone-venv
# The compiler for TPUs, apart: beside a CPU's jax it would slow down every start. The
# version is the one that trainer/plan/fitted.py names.
LIBTPU := build/libtpu-0.0.51

.PHONY: install dev train test checks lint types tests debian slow fuzz tpu-test wheel-test benchmarks clean

# One stamp per set of extras, so that `make train EXTRA=cuda12` installs again.
INSTALLED := $(VENV)/.installed-base$(addprefix -,$(EXTRA))
DEV := $(VENV)/.installed-dev

install: $(INSTALLED)

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "meshloom needs Python 3.11 or newer, this is " + sys.version'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.$(addprefix [,$(addsuffix ],$(EXTRA)))'
	@touch $@

dev: $(DEV)

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed-base

train: $(INSTALLED)
	$(BIN)/meshloom train $(ARGS)

# Checks mostly use one core, so they run beside the tests.
test: $(DEV)
	$(MAKE) --no-print-directory -j5 checks tests

checks: lint types tpu-test wheel-test

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/pyright

# Two workers a core: tests that start processes mostly wait (see tests/conftest.py).
tests: $(DEV) debian
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

# What the tests need besides Python: a browser, Slurm, both MPIs, ssh, and iproute2
# to simulate two hosts.
DEBIAN := chromium slurmctld slurmd slurm-client munge openmpi-bin mpich \
  openssh-server openssh-client iproute2
MISSING = $(filter-out $(shell dpkg-query -W -f='$${db:Status-Status}:$${Package}\n' \
  $(DEBIAN) 2>/dev/null | sed -n 's/^installed://p'),$(DEBIAN))
debian:
	@test -z "$(MISSING)" || (apt-get update -qq && apt-get install -y -qq --no-install-recommends $(MISSING))

# The long forms of tests.
slow: $(DEV)
	$(BIN)/python -m pytest -q -m slow $(ARGS)

$(LIBTPU)/.installed: | $(DEV)
	rm -rf $(LIBTPU)
	$(PIP) install --quiet --no-deps --target $(LIBTPU) $(subst build/libtpu-,libtpu==,$(LIBTPU))
	@touch $@

# The numbers that were fitted to libtpu, against a step that it compiles: 50 s, and
# 590 MB of libtpu that are downloaded once.
tpu-test: $(DEV) $(LIBTPU)/.installed
	PYTHONPATH=$(LIBTPU) $(BIN)/python -c 'import libtpu'
	PYTHONPATH=$(LIBTPU) $(BIN)/python -m pytest -q -k compiler_that_it_names tests/plan/test_fitted.py

# Random products of meshes, plans, schedules, models and data against one device.
# Failures are kept in build/fuzz/failures.jsonl, each with the command that repeats it.
fuzz: $(DEV)
	$(BIN)/python tests/fuzz --minutes $(MINUTES) $(ARGS)

# Tests the wheel in a fresh environment, from another folder; then the sharding library
# in one without the dependencies of the trainer. It is built from a copy of what git
# knows or would add: setuptools writes beside the source, which tests read meanwhile.
wheel-test: $(DEV)
	rm -rf build/wheel build/wheel-source && mkdir -p build/wheel build/wheel-source
	git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- | tar --extract --directory=build/wheel-source
	$(BIN)/python -m build --wheel --outdir build/wheel build/wheel-source > build/wheel.log || (cat build/wheel.log; exit 1)
	test -x $(WHEEL_VENV)/bin/python || $(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt --force-reinstall --no-deps build/wheel/*.whl
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt build/wheel/*.whl
	mkdir -p build/elsewhere && cd build/elsewhere && ../../$(WHEEL_VENV)/bin/python ../../tests/support/wheel_check.py
	test -x $(ALONE_VENV)/bin/python || $(PYTHON) -m venv $(ALONE_VENV)
	$(ALONE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt jax equinox flax optax
	$(ALONE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --force-reinstall --no-deps build/wheel/*.whl
	cd build/elsewhere && ../../$(ALONE_VENV)/bin/python ../../tests/support/alone_check.py

benchmarks: $(DEV)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/saving.py

clean:
	rm -rf $(VENV) build dist *.egg-info
