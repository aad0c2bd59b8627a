# A node's GPU manager: `gpufaas gpu-manager`. With torch; CUDA comes with torch's wheel.
#
#   docker build -f deploy/docker/manager.Dockerfile -t gpufaas/manager .
#
# A plain Python base is enough for emulated GPUs, and for real ones, too: torch's default wheel for
# Linux brings the CUDA libraries, the driver's comes from the NVIDIA container toolkit. For a site
# that wants them from a CUDA image, or that has torch in its base:
#   --build-arg BASE_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 (with python3 and python3-venv in it)
#   --build-arg BASE_IMAGE=your/torch --build-arg VENV_OPTIONS=--system-site-packages
# A wheel without CUDA, for nodes that emulate GPUs (2 GB instead of 7):
#   --build-arg TORCH_INDEX=(the index of torch's wheels for CPUs) --build-arg TORCH="torch==2.15.0+cpu ..."
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG PYTHON=python3
ARG PIP_INDEX_URL
ARG VENV_OPTIONS=""
# An index beside the usual one, and what to install from it before anything else.
ARG TORCH_INDEX=""
ARG TORCH=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_WARN_SCRIPT_LOCATION=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY deploy/docker/requirements.py ./
RUN ${PYTHON} -m venv ${VENV_OPTIONS} /opt/gpufaas \
 && ${PYTHON} -m venv /opt/build \
 && /opt/build/bin/pip install --quiet --constraint constraints.txt hatchling
RUN if [ -n "${TORCH}" ]; then \
      grep -v '^torch' constraints.txt > without-torch.txt && mv without-torch.txt constraints.txt \
      && /opt/gpufaas/bin/pip install --quiet --constraint constraints.txt \
           ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} ${TORCH}; \
    fi \
 && /opt/build/bin/python requirements.py gpu > requirements.txt \
 && /opt/gpufaas/bin/pip install --quiet --constraint constraints.txt --requirement requirements.txt
# What .dockerignore lets in: our packages. The commit that they are of is not among them.
ARG COMMIT=""
COPY . .
RUN GPUFAAS_COMMIT="${COMMIT}" /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /opt/wheel . \
 && /opt/gpufaas/bin/pip install --quiet --no-deps --no-index /opt/wheel/*.whl \
 && /opt/gpufaas/bin/pip uninstall --quiet --yes pip

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gpufaas GPU manager" \
      org.opencontainers.image.licenses="Apache-2.0"
# Root may own the folders and need no right to pass over modes: it keeps none (docs/compose.md).
RUN groupadd --gid 10000 gpufaas \
 && useradd --uid 10000 --gid gpufaas --no-create-home --home-dir /var/lib/gpufaas --shell /usr/sbin/nologin gpufaas \
 && install --directory --group gpufaas --mode 0770 /var/lib/gpufaas \
 && install --directory --group gpufaas --mode 0775 /run/gpufaas
COPY --from=build /opt/gpufaas /opt/gpufaas
COPY deploy/docker/healthy.py /opt/gpufaas/healthy.py
# The NVIDIA container toolkit reads the last one.
ENV PATH=/opt/gpufaas/bin:$PATH \
    HOME=/tmp \
    GPUFAAS_STATE=/var/lib/gpufaas \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /var/lib/gpufaas
USER 10000:10000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s \
    CMD ["/opt/gpufaas/bin/python", "-I", "/opt/gpufaas/healthy.py", "unix:/run/gpufaas/node.sock"]
ENTRYPOINT ["gpufaas", "gpu-manager"]
CMD ["--listen", "unix:/run/gpufaas/node.sock"]
