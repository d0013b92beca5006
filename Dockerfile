# For a machine without a GPU:   docker build -t kenotron .
# For NVIDIA GPUs:               docker build -t kenotron --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime .
#
# The base's torch is kept where it has one. Else pip brings its default, a build for CUDA; for a smaller one give the
# options of the selector's line for CPUs on pytorch.org: --build-arg TORCH_OPTIONS="…". Then:
#   docker run --rm -v "$PWD:/work" kenotron --standalone --nproc-per-node 4 /opt/kenotron/run_train.py --config-file my.yaml
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH_OPTIONS=""
WORKDIR /opt/kenotron
COPY pyproject.toml constraints.txt README.md LICENSE run_train.py ./
COPY src src
RUN python -c "import torch" 2>/dev/null || pip install --no-cache-dir ${TORCH_OPTIONS} torch
RUN pip install --no-cache-dir '.[s3]'

WORKDIR /work
STOPSIGNAL SIGTERM
ENTRYPOINT ["torchrun"]
CMD ["--standalone", "--nproc-per-node", "1", "/opt/kenotron/run_train.py", "--help"]
