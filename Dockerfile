# Two images: docker build --target cpu -t bapo:cpu .      docker build --target cuda -t bapo:cuda .
#             docker run --rm bapo:cpu                      docker run --rm --gpus all -v "$PWD:/work" bapo:cuda train mine.toml
# Both hold bapo with the versions of constraints/base.txt. Runs are written to /work/runs; mount a directory to keep them.

FROM python:3.12-slim AS base
# A compiler is for Triton, which builds a small launcher when a kernel runs for the first time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/bapo
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
RUN useradd --create-home trainer && mkdir /work && chown trainer /work

# PyPI's torch for Linux holds the CUDA libraries, which a CPU does not need. PyTorch's own package index for CPUs, given as
# --build-arg TORCH_INDEX=…, makes this image several gigabytes smaller.
FROM base AS cpu
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -c constraints/base.txt torch \
    && pip install -c constraints/base.txt ".[math,data,lora]"
USER trainer
WORKDIR /work
ENTRYPOINT ["bapo"]
CMD ["train"]

# The CUDA libraries come with torch, so the host needs only the driver and the container toolkit.
FROM base AS cuda
RUN pip install -c constraints/base.txt torch && pip install -c constraints/base.txt ".[math,data,lora,ray]"
USER trainer
WORKDIR /work
ENTRYPOINT ["bapo"]
CMD ["train"]
