"""Which failures are those of machines, told by the texts that the libraries gave."""

import pytest
from jax.errors import JaxRuntimeError

from t5x_diffeq.runtime.errors import is_of_machinery


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed "
            "out with key: cpu:gloo/2048,4096,0,6145/0 and duration: 29.999999838s",
            True,
        ),
        ("DEADLINE_EXCEEDED: Barrier timed out.", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.", False),
        ("INVALID_ARGUMENT: Executable expected shape float32[8]", False),
    ],
)
def test_of_machinery(message, expected):
    assert is_of_machinery(JaxRuntimeError(message)) is expected
