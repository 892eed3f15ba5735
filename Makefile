# Everything from nothing but Python >= 3.11 and make. BACKEND=metal|cuda|cpu overrides the choice.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11,\
  $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BACKEND ?= $(shell if [ "$$(uname -s)" = Darwin ]; then echo metal; \
  elif nvidia-smi -L 2>/dev/null | grep -q GPU; then echo cuda; else echo cpu; fi)

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(BACKEND)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Every package with its hashes, for all systems and Pythons; on macOS the CPU's file brings Metal.
LOCK := requirements$(if $(filter cuda,$(BACKEND)),-cuda).lock

.PHONY: run chat test lint format bench soak mutants install lock backend clean

run: install
	$(BIN)/keepwarm pull smollm2
	$(BIN)/keepwarm serve $(ARGS)

chat: install
	$(BIN)/keepwarm pull smollm2
	$(BIN)/keepwarm chat $(ARGS)

test: install
	PYTHONDONTWRITEBYTECODE= MLX_DISABLE_COMPILE=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile $(ARGS)

lint: install
	$(BIN)/ruff format --check src tests benchmarks examples experiments
	$(BIN)/ruff check src tests benchmarks examples experiments
	$(BIN)/mypy

format: install
	$(BIN)/ruff format src tests benchmarks examples experiments
	$(BIN)/ruff check --fix src tests benchmarks examples experiments

bench: install
	$(BIN)/keepwarm bench $(ARGS)

soak: install
	PYTHONDONTWRITEBYTECODE= MLX_DISABLE_COMPILE=1 $(BIN)/python -m pytest --soak $(ARGS)

mutants: install
	nice -n 19 $(BIN)/python -m benchmarks.mutation $(ARGS)

install: $(READY)

$(READY): pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "keepwarm needs Python 3.11 or newer; none of python3, python3.11 … python3.14 is one. Install it, or name it: make PYTHON=/path/to/python"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments; install its venv package (Debian: apt install python3-venv)."; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes --only-binary :all: --requirement $(LOCK)
	$(PIP) --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-* && touch $@

lock: install
	$(PIP) uv
	$(call locked,requirements.lock,cpu)
	$(call locked,requirements-cuda.lock,cuda)

locked = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
  --no-annotate --custom-compile-command 'make lock' --extra $(2) --extra dev --output-file $(1) pyproject.toml

backend:
	@echo $(BACKEND)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
