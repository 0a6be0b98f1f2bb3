# Baton on CPUs, with the embedded model. From the repository's root:
#     docker build --file deploy/docker/cpu.Dockerfile --tag registry.example/baton:0.1.0-cpu .
FROM python:3.12.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 XDG_CACHE_HOME=/opt/baton/cache
RUN python -m venv /opt/baton
WORKDIR /src
# The pinned packages come first: they rarely change.
COPY deploy/docker/cpu.lock deploy/docker/cpu-torch.txt deploy/docker/
RUN /opt/baton/bin/pip install --require-hashes --no-deps --requirement deploy/docker/cpu.lock
# An index that has torch without CUDA, for machines whose default index brings CUDA.
ARG PIP_EXTRA_INDEX_URL=""
RUN /opt/baton/bin/pip install --requirement deploy/docker/cpu-torch.txt
COPY pyproject.toml README.md LICENSE ./
COPY baton baton
COPY core core
COPY kernels kernels
COPY engine engine
COPY kv_transfer kv_transfer
COPY worker worker
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY router router
COPY rpc rpc
COPY planner planner
COPY cluster cluster
COPY cli cli
RUN /opt/baton/bin/pip install --no-deps --no-build-isolation . \
    && /opt/baton/bin/baton model pull

FROM python:3.12.11-slim-bookworm
# procps: pgrep, for a pod's preStop. wget: health checks, here and Ray's.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends procps tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /tmp baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH XDG_CACHE_HOME=/opt/baton/cache \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 8000 8900
HEALTHCHECK --start-period=60s --interval=10s --timeout=3s --retries=3 \
    CMD wget -q -O /dev/null http://127.0.0.1:8000/health \
        || wget -q -O /dev/null --no-check-certificate https://127.0.0.1:8000/health
ENTRYPOINT ["tini", "-s", "--"]
CMD ["baton", "serve"]
