# Set-up happens once in .venv and is reused; `make quickstart` runs the main job, `make test` the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export RAY_AUTH_MODE ?= disabled
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: quickstart bench test test-unit test-process test-fakegpu test-ray test-net test-long check release-check clean

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory -k test-unit test-process test-fakegpu test-ray

# Three quarters of the process tests' time, and more of the network tests', is waiting for deadlines. Fake GPUs and Ray fill the cores.
test-unit: AT_ONCE := -n 2
test-process: AT_ONCE := -n 3 --dist loadfile
test-net: AT_ONCE := -n 4

test-unit test-process test-fakegpu test-ray test-net: test-%: $(VENV)/.installed-test
	@echo "== tests/$*"
	$(BIN)/python -m pytest tests/$* -q -m "not slow" $(AT_ONCE) $(PYTEST_ARGS)

# An hour more, which is not in the gate: the tests that are marked `long`. Root adds those over network namespaces.
test-long: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests -q -m long $(PYTEST_ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check ray_nccl_guard tests benchmarks examples .ci
	$(BIN)/mypy ray_nccl_guard tests/typing/api.py
	$(BIN)/codespell ray_nccl_guard tests benchmarks examples docs .ci *.md

# Builds sdist and wheel, and runs the quickstart from the wheel in a clean environment outside the checkout.
release-check: $(VENV)/.installed-test
	$(BIN)/python .ci/release_check.py $(RELEASE_ARGS)

# All results under benchmarks/results/ anew: 23 minutes on two cores that do nothing else. Root adds the network lab.
bench: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/all.py

# torch from PyPI is a CUDA build of several GB: the first run takes minutes and shows pip's progress.
$(VENV)/.installed: pyproject.toml tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -r tests/requirements.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install -e '.[test]' -r tests/requirements.txt
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-test
	$(BIN)/pip install -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
