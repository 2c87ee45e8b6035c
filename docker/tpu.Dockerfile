# The project on TPU hosts.
#
#   docker build --platform=linux/amd64 --file=docker/tpu.Dockerfile --tag=t5x_diffeq-tpu \
#       --build-arg=REVISION="$(git rev-parse HEAD)" .
#   docker run t5x_diffeq-tpu train --config=configs/tiny.py --workdir=/tmp/run
#
# The installation is docker/install.sh, for it to be run without Docker too. The digest is that of the
# tag as published projects quote it; `docker buildx imagetools inspect python:3.12.12-slim-bookworm`
# tells what it is now.
ARG BASE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

# What pyproject.toml asks for, without what it says of linting and tests: the large layer below is made
# again only when a dependency changes.
FROM ${BASE} AS requirements
WORKDIR /requirements
COPY docker/install.sh pyproject.toml ./
RUN ./install.sh requirements tpu >requirements.txt

FROM ${BASE}
WORKDIR /opt/t5x_diffeq
COPY docker/install.sh docker/constraints.txt ./
COPY --from=requirements /requirements/requirements.txt ./
RUN --mount=type=cache,target=/root/.cache ./install.sh dependencies

COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY t5x_diffeq t5x_diffeq
COPY docker/verb.sh launch/forward.sh ./
RUN --mount=type=cache,target=/root/.cache ./install.sh project && useradd --uid 1000 --create-home trainer

# Without a TPU the program fails, instead of training on the CPU.
ENV JAX_PLATFORMS=tpu,cpu \
    PYTHONUNBUFFERED=1

# The commit that it was built from; last, for it makes no layer anew.
ARG REVISION=unknown
LABEL org.opencontainers.image.revision=${REVISION}

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["/opt/t5x_diffeq/verb.sh"]
