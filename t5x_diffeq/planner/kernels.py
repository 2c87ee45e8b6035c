"""Whose kernels a GPU's compiled program runs, and how often: cuDNN's, cuBLAS's, Triton's."""

from collections import Counter

from t5x_diffeq.planner.hlo import Instruction, read_program
from t5x_diffeq.planner.trip_count import executions

_LIBRARIES = {"__cudnn$": "cuDNN", "__cublas$": "cuBLAS"}
_FUSIONS = {"__triton": "Triton", "__cudnn": "cuDNN"}  # kinds of fusions that libraries compute


def kernels(text: str) -> dict[str, int]:
    """How often each kind of kernel runs, by a name such as `cuDNN fmhaSoftmax` or `Triton`.

    A loop counts as often as it runs. Fusions that XLA makes itself, and copies, are left out.
    """
    found: Counter[str] = Counter()
    for it, _, times, fused in executions(read_program(text)):
        if not fused and (name := _name_of(it)):
            found[name] += times
    return dict(found)


def _name_of(it: Instruction) -> str | None:
    if it.opcode == "custom-call":
        target = it.required_attribute(r'custom_call_target="([^"]+)"')
        for prefix, library in _LIBRARIES.items():
            if target.startswith(prefix):
                return f"{library} {target.removeprefix(prefix)}"
        return target
    kind = it.attribute(r'"kind":"(__\w+)"') or "" if it.opcode == "fusion" else ""
    return next((name for prefix, name in _FUSIONS.items() if kind.startswith(prefix)), None)
