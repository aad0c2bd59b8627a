# What GPU functions are built on: Python and torch for the function's side, which needs no CUDA.
#
#   docker build -f deploy/docker/function.Dockerfile -t gpufaas/function .
#   faas-cli build -f stack.yml --build-arg BASE_IMAGE=gpufaas/function
#
# The template (template/python3-torch-gpu) adds runtime, shim, the function and the user that it runs
# as; built on this, a function's image is a few megabytes more, and all functions share one torch.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="gpufaas function base" \
      org.opencontainers.image.licenses="Apache-2.0"
ARG PYTHON=python3
ARG PIP_INDEX_URL
# The index of torch's wheels for CPUs (0.7 GB instead of 6), and its version there, as torch==2.15.0+cpu.
ARG TORCH_INDEX=""
ARG TORCH=""
# Also installed, pinned by constraints.txt where it is named there: "transformers timm", for example.
ARG PACKAGES=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
COPY constraints.txt /usr/local/share/gpufaas/constraints.txt
RUN constraints=/usr/local/share/gpufaas/constraints.txt \
 && if [ -n "${TORCH}" ]; then sed -i '/^torch/d' "${constraints}"; fi \
 && ${PYTHON} -m pip install --quiet --constraint "${constraints}" \
      ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} ${TORCH:-torch} msgspec numpy ${PACKAGES}
# The template runs functions as user 10001; the image itself runs as nobody.
STOPSIGNAL SIGTERM
ENTRYPOINT []
CMD ["python3"]
