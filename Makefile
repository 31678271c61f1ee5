# make quickstart   train, fit a placement, resume four ways, compare; writes out/quickstart/
# make test         everything but `gpu` and `slow` tests; their processes start with PyTorch imported (tests/warm)
# make test-full    the full option matrix as well, every process started as usual
# make test-gpu     `gpu` tests, on a machine with GPUs: without Transformer Engine, and with it where it is installed
# make test-upstream MEGATRON_LM_PATH=…   Megatron-LM's own unit tests under our CPU layer (docs/upstream_tests.md)
# make test-versions   the core tests under other releases of Megatron-Core; VERSIONS="0.19.0 …"
# make lint         ruff, as continuous integration runs it
# make venv         only the environment; PYTHON=/path/to/python3.12 chooses the interpreter

VENV ?= .venv
PYTHON ?= $(shell sh scripts/find_python.sh)
BIN := $(VENV)/bin

VERSIONS ?= 0.19.0 0.19.2
CORE_TESTS := tests/test_launch.py tests/cpu tests/compat tests/moe/test_layer.py tests/moe/test_training.py \
	tests/param_gather/test_gather_training.py

.PHONY: quickstart test test-full test-gpu test-upstream test-versions lint venv clean

quickstart: venv
	$(BIN)/python scripts/quickstart.py

test: venv
	$(BIN)/python -m pytest -q -m "not gpu and not slow" --durations 15

test-full: venv
	MEGATRON_CIERA_TEST_COLD=1 $(BIN)/python -m pytest -q -m "not gpu"

test-gpu:
	PYTHONPATH=$(CURDIR)/tests/without_te:$$PYTHONPATH $(PYTHON) -m pytest -q -m gpu
	! $(PYTHON) -c "import transformer_engine" 2>/dev/null || $(PYTHON) -m pytest -q -m gpu

test-upstream: venv
	$(BIN)/python tests/upstream/run.py

# A release of its own before the installed one; everything else stays as it is.
test-versions: venv
	set -e; for version in $(VERSIONS); do \
		$(BIN)/python -m pip install -q --no-deps --upgrade --target out/megatron-core-$$version megatron-core==$$version; \
		PYTHONPATH=$(CURDIR)/out/megatron-core-$$version $(BIN)/python -m pytest -q -m "not gpu and not slow" $(CORE_TESTS); \
	done

lint: venv
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

venv: $(VENV)/.installed

$(VENV)/.installed: setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "megatron-ciera needs Python 3.12 or 3.13; none was found. Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON) (PyTorch is several GB; the first time takes a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,dev,tensorboard]"
	@touch $@

clean:
	rm -rf out $(VENV) build dist *.egg-info
