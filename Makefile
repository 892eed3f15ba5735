# Everything from nothing but Python >= 3.11 and make. BACKEND=metal|cuda|cpu overrides the choice.

new_enough = $(shell $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(1))
PYTHON ?= $(or $(call new_enough,python3),$(call new_enough,python3.14),\
  $(call new_enough,python3.13),$(call new_enough,python3.12),$(call new_enough,python3.11))
BACKEND ?= $(shell if [ "$$(uname -s)" = Darwin ]; then echo metal; \
  elif nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda; else echo cpu; fi)

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(BACKEND)
PIP := $(BIN)/python deploy/pip_progress.py
# Every package with its hashes, for all systems and Pythons; on macOS the CPU's file brings Metal.
LOCK := requirements$(if $(filter cuda,$(BACKEND)),-cuda).lock
LOCKED := $(PIP) --require-hashes --only-binary :all: --requirement

.PHONY: run chat demo test lint format docs bench soak mutants install tools lock backend clean

run: install
	$(BIN)/keepwarm pull smollm2
	$(BIN)/keepwarm serve $(ARGS)

chat: install
	$(BIN)/keepwarm pull smollm2
	$(BIN)/keepwarm chat $(ARGS)

demo: install
	$(BIN)/keepwarm pull smollm2
	$(BIN)/python -m benchmarks.demo

test: tools
	PYTHONDONTWRITEBYTECODE= MLX_DISABLE_COMPILE=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder $(ARGS)

lint: tools
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy

format: tools
	$(BIN)/ruff format src tests benchmarks examples
	$(BIN)/ruff check --fix src tests benchmarks examples

# The pages of docs/ as a site, every link checked. URL= is the repository's address.
docs: tools
	$(BIN)/python .ci/docs_site.py build/docs $(URL)

bench: install
	$(BIN)/python -m benchmarks.requests $(ARGS)

soak: tools
	$(PIP) --no-deps --group soak
	PYTHONDONTWRITEBYTECODE= MLX_DISABLE_COMPILE=1 $(BIN)/python -m pytest --soak $(ARGS)

mutants: tools
	nice -n 19 $(BIN)/python -m benchmarks.mutation $(ARGS)

install: $(READY)

$(READY): pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "keepwarm needs Python 3.11 or newer; none of python3, python3.11 … python3.14 is one. Install it, or name it: make PYTHON=/path/to/python"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; install its venv package (Debian: apt install python3-venv)."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(LOCKED) $(LOCK)
	$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-* && touch $@

# What tests, lint and releases need besides.
tools: $(READY)-tools

$(READY)-tools: $(READY) requirements-tools.lock
	$(LOCKED) requirements-tools.lock
	@touch $@

lock: tools
	$(PIP) uv
	$(call build,backend/cpu)
	$(call build,backend/cuda)
	$(call locked,requirements.lock) --extra cpu --group build pyproject.toml
	$(call locked,requirements-cuda.lock) --extra cuda --group build pyproject.toml
	$(call locked,requirements-tools.lock) --group dev --constraints requirements.lock

build = cd $(1) && $(CURDIR)/$(BIN)/python -m hatchling build --target wheel --directory $(CURDIR)/$(VENV)/backend

locked = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
  --find-links $(VENV)/backend --no-emit-package keepwarm-backend --no-emit-find-links \
  --no-annotate --custom-compile-command 'make lock' --output-file $(1)

backend:
	@echo $(BACKEND)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
