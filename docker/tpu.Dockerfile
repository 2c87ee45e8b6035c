# The project on TPU hosts.
#
#   docker build --file=docker/tpu.Dockerfile --tag=t5x_diffeq-tpu .
#   docker run t5x_diffeq-tpu train --config=configs/tiny.py --workdir=/tmp/run
#
# The installation is docker/install.sh, for it to be run without Docker too.
FROM python:3.12-slim-bookworm

# First what changes seldom: this layer is made again only when the dependencies change.
WORKDIR /opt/t5x_diffeq
COPY docker/install.sh docker/constraints.txt pyproject.toml ./
RUN ./install.sh dependencies tpu

COPY README.md LICENSE ./
COPY configs configs
COPY t5x_diffeq t5x_diffeq
COPY docker/verb.sh launch/forward.sh launch/xla_flags.py ./
RUN ./install.sh project && useradd --uid 1000 --create-home trainer

# Without a TPU the program fails, instead of training on the CPU.
ENV JAX_PLATFORMS=tpu,cpu
ENV PYTHONUNBUFFERED=1

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["/opt/t5x_diffeq/verb.sh"]
