"""Compiled steps kept on disk, so that a run continued compiles nothing anew."""

import jax

from t5x_diffeq.files import AnyPath, absolute


def keep_compiled(workdir: AnyPath) -> str:
    """Switches the persistent compilation cache on; says where it is, or why there is none.

    It lies where JAX_COMPILATION_CACHE_DIR says, else in the workdir. On CPU with several devices
    there is none: a reloaded program runs its collectives in another order on each device, and
    they wait for each other forever (jax 0.10.2).
    """
    if jax.config.jax_compilation_cache_dir:
        return jax.config.jax_compilation_cache_dir
    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        return "off: several CPU devices can't share reloaded programs"
    folder = absolute(workdir) / "compilation_cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return str(folder)
