# Baton on NVIDIA GPUs; models come from a volume. From the repository's root:
#     docker build --file deploy/docker/cuda.Dockerfile --tag registry.example/baton:0.1.0-cuda .
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/baton
WORKDIR /src
# The pinned packages come first: they rarely change.
COPY deploy/docker/cuda.lock deploy/docker/
RUN /opt/baton/bin/pip install --require-hashes --no-deps --requirement deploy/docker/cuda.lock
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
RUN /opt/baton/bin/pip install --no-deps --no-build-isolation .

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
# gcc and Python's headers: Triton compiles its launchers. libibverbs, librdmacm: NIXL over RDMA.
# procps: pgrep, for a pod's preStop. wget: health checks, here and Ray's.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        gcc libc6-dev python3.12 python3.12-dev \
        ibverbs-providers libibverbs1 librdmacm1t64 \
        procps tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /tmp baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 8000 8900
# A large model takes minutes to load.
HEALTHCHECK --start-period=600s --interval=10s --timeout=3s --retries=3 \
    CMD wget -q -O /dev/null http://127.0.0.1:8000/health \
        || wget -q -O /dev/null --no-check-certificate https://127.0.0.1:8000/health
ENTRYPOINT ["tini", "-s", "--"]
CMD ["baton", "serve"]
