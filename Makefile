# make run     install what is missing, build the demo model, start the server
#              make run ARGS="--port 9000"   make run MODEL=Qwen/Qwen2.5-VL-7B-Instruct CONFIG=configs/x.toml
# make test    install what is missing and run the tests (PYTEST_ARGS=...);  make test-long: all trials
# make lint    ruff and mypy;  make lock: resolve requirements/*.in anew;  make clean: remove what was installed

VENV ?= .venv
DATA ?= $(or $(REKINDLE_DATA),data)
PYTHON ?= $(shell for p in python3 python3.11 python3.12; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
TRIALS ?= 2000

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
STEP := requirements/step.sh
# A stamp's name is the hash of what was installed, so a changed lock installs again and an unchanged one costs nothing.
hash = $(shell cat $(1) | sha256sum | cut -c1-16)
RUNTIME := $(VENV)/.runtime-$(call hash,requirements/torch.txt requirements/runtime.txt setup.py pyproject.toml)
TEST := $(VENV)/.test-$(call hash,requirements/runtime.txt requirements/test.txt)

unexport PYTHONDONTWRITEBYTECODE

.PHONY: run install install-test deps demo test test-long lint lock clean
.DELETE_ON_ERROR:

run: install $(if $(MODEL),,demo)
	@REKINDLE_DATA=$(DATA) exec $(VENV)/bin/rekindle serve $(if $(MODEL),--model $(MODEL)) $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

install: $(RUNTIME)
install-test: $(RUNTIME) $(TEST)

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Rekindle needs Python 3.11 or 3.12 (make PYTHON=/path/to/python3.11)"; exit 1; }
	@echo "Setting up $(VENV), once:"
	@rm -rf $(VENV)
	@$(STEP) "virtual environment" $(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes by name with its own dependencies: they differ between a CPU wheel and PyPI's CUDA build. All else is locked.
# Byte code is left to the first import of each module: compiling all of it takes longer than all the rest together.
$(RUNTIME): | $(VENV)/.created
	@$(STEP) "packages of requirements/runtime.txt" $(PIP) install --no-compile --no-deps -r requirements/runtime.txt
	@$(STEP) "torch (PyPI's own build is a few GB)" $(PIP) install --no-compile -r requirements/torch.txt -c requirements/runtime.txt
	@$(STEP) "rekindle itself" $(PIP) install --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.runtime-* && touch $@

$(TEST): | $(RUNTIME)
	@$(STEP) "packages of requirements/test.txt" $(PIP) install --no-compile --no-deps -r requirements/test.txt
	@rm -f $(VENV)/.test-* && touch $@

demo: install
	@$(PY) -m server.demo.build $(DATA)/models/demo

deps:
	@requirements/deps.sh

test: install-test deps demo
	@REKINDLE_DATA=$(DATA) $(PY) -m pytest $(PYTEST_ARGS)

test-long: install-test deps demo
	@REKINDLE_DATA=$(DATA) REKINDLE_TRIALS=$(TRIALS) $(PY) -m pytest -m "not gpu" $(PYTEST_ARGS)

lint: install-test
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

lock:
	@requirements/lock.sh $(or $(shell command -v python3.11),$(PYTHON))

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find server sessions kvstore tests -name __pycache__ -prune -exec rm -rf {} +
