"""What mypy sees of the Python interface: strictly checked with the package, and never run."""

from pathlib import Path
from typing import assert_type

import numpy as np

import t5x_diffeq as td

config = td.load_config("configs/tiny.py", {"train.total_steps": 10})
assert_type(config, td.Config)
run = td.train(config, Path("workdirs/tiny"))
assert_type(td.load("examples/smooth", checkpoint="best", num_steps=3), td.TrainedRun)
assert_type(run.generate("def main():", max_tokens=24), str)
assert_type(run.generate(["def main():", "class"], temperature=0.5), list[str])
assert_type(run.at_depth(12).evaluate(), dict[str, float])
assert_type(run.loss("def main():"), float)
assert_type(run.pieces("def main():"), list[str])
table = td.compare([run, "workdirs/tiny", Path("workdirs/other")])
assert_type(table, td.Comparison)
assert_type(table.rows, list[dict[str, str]])
sampling = td.Sampling(temperature=0.8, top_k=40)
states = td.integrate(lambda t, y: -t * y, lambda t: t, np.ones(2), scheme="rk4", num_steps=4)
assert_type(float(states[0]), float)
run.generate(3)  # type: ignore[type-var]
td.load_config("configs/tiny.py", "compact")  # type: ignore[arg-type]
td.load("examples/smooth", checkpoint="1000")  # type: ignore[arg-type]
td.lode  # type: ignore[attr-defined]  # noqa: B018
