# The project on GPU nodes: the driver comes from the node, CUDA's libraries from Python packages.
#
#   docker build --file=docker/gpu.Dockerfile --tag=t5x_diffeq-gpu .
#   docker run t5x_diffeq-gpu train --config=configs/tiny.py --workdir=/tmp/run
#
# The installation is docker/install.sh, for it to be run without Docker too.
FROM python:3.12-slim-bookworm

# First what changes seldom: this layer is made again only when the dependencies change.
WORKDIR /opt/t5x_diffeq
COPY docker/install.sh docker/constraints.txt pyproject.toml ./
RUN ./install.sh dependencies gpu

COPY README.md LICENSE ./
COPY configs configs
COPY t5x_diffeq t5x_diffeq
COPY docker/verb.sh launch/forward.sh launch/xla_flags.py ./
RUN ./install.sh project && useradd --uid 1000 --create-home trainer

# Without a GPU the program fails, instead of training on the CPU. The driver is mounted where the last
# line says on GKE; the NVIDIA runtime of Docker reads the other two.
ENV JAX_PLATFORMS=cuda,cpu \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib64
ENV PYTHONUNBUFFERED=1

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["/opt/t5x_diffeq/verb.sh"]
