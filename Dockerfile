# Two images from one file:
#   docker build --target triton -t dflash-triton .
#   docker build --target openai --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 -t dflash-openai .
# BASE needs Python 3.11 or newer; a Triton base must be 24.11 or newer (numpy 2 in its Python backend).
# EXTRAS: serve, tensorrt-rtx, harmony (gpt-oss); engines for the CPU need neither CUDA nor TensorRT.
ARG BASE=nvcr.io/nvidia/tritonserver:25.10-py3

# hadolint ignore=DL3006
FROM ${BASE} AS python
# Root installs; the stages that serve are user 1000.
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/dflash/bin:${PATH}

FROM python AS installed
ARG EXTRAS=serve
RUN python3 -m venv /opt/dflash
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY build build
COPY drafters drafters
COPY plugins plugins
COPY dflash_trt dflash_trt
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

FROM python AS serving
COPY --from=installed /opt/dflash /opt/dflash
# User 1000 owns the server in Triton's images, whose Python backend will not start for others.
USER 1000
ENV HOME=/tmp
WORKDIR /tmp

# Engine directories are mounted at /engines, read-only.
FROM serving AS openai
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["dflash-trt", "serve"]
CMD ["/engines", "--host", "0.0.0.0"]

# A repository made by `dflash-trt triton --copy` is mounted at /models, read-only.
FROM serving AS triton
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
ENTRYPOINT ["tritonserver"]
CMD ["--model-repository=/models"]
