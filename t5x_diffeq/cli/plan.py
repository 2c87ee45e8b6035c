"""Compiles a config's train step for chips that you don't have: --config=FILE --topology=v5p:4x4x4.

Says whether it fits, what it computes and moves, and how long it may take, next to the per-layer
baseline of the same shape. --slices=2 plans two TPU slices. --topology=h100:8x8 plans eight nodes
of eight GPUs (also a100, h200, b200). The compilers are in t5x_diffeq[tpu] and
t5x_diffeq[gpu_compiler], and need neither TPU nor GPU; --topology=cpu:8 is for a quick look.
--sweep searches meshes, remat policies, microbatches and block sizes of attention for plans that
fit, and prints the flags of the fastest. Nothing is run.
Prints tables on standard error and one JSON object per model on standard output. The model and its
baseline are compiled one after the other. For TPUs, compiling takes about 15 CPU seconds for a
tiny model and 120 to 210 for a 1B model (as many seconds on an idle core); for GPUs, about 10 for a
1B model. A sweep compiles up to about twenty steps.
"""

from absl import flags
from ml_collections.config_flags import config_flags

from t5x_diffeq.runtime import command_line
from t5x_diffeq.runtime.config import Config
from t5x_diffeq.runtime.errors import InputError

FLAGS = flags.FlagValues()
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file of the model.", flag_values=FLAGS
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "TPUs, such as v5p:4x4x4; GPUs, such as h100:8 or h100:8x8; or cpu:8.",
    flag_values=FLAGS,
)
_SLICES = flags.DEFINE_integer("slices", 1, "Number of TPU slices.", flag_values=FLAGS)
_SWEEP = flags.DEFINE_bool(
    "sweep", False, "Search for the fastest plan that fits, and print its flags.", flag_values=FLAGS
)


def main() -> None:
    """Runs the verb."""
    if CONFIG.value is None or _TOPOLOGY.value is None:
        raise InputError("plan needs --config=FILE and --topology=v5p:4x4x4; see --help")

    from t5x_diffeq.planner.topology import make_topology
    from t5x_diffeq.verbs.plan import show_plans, sweep

    config = Config.of(CONFIG.value)
    where = make_topology(_TOPOLOGY.value, _SLICES.value)
    (sweep if _SWEEP.value else show_plans)(config, where)


if __name__ == "__main__":
    command_line.run(main, __doc__, FLAGS)
