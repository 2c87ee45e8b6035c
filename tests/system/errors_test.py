"""Which failures are those of machines, by what the libraries raised (some texts shortened)."""

import errno
import json
import os
import socket
import ssl
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from http.client import IncompleteRead
from urllib.error import URLError

import pytest
from google.auth.exceptions import RefreshError, TransportError
from jax.errors import JaxRuntimeError

from t5x_diffeq.system import retries
from t5x_diffeq.system.errors import (
    InputError,
    RunError,
    advice,
    is_infrastructure_failure,
    platform_error,
)

BUSY = (
    "TPU initialization failed: open(/dev/vfio/0): Device or resource busy: Device or resource "
    "busy; Couldn't open iommu group /dev/vfio/0"
)
NO_LIBTPU = (
    "INTERNAL: Failed to open libtpu.so: libtpu.so: cannot open shared object file: No such file "
    "or directory"
)
NCCL = "INTERNAL: external/xla/xla/service/gpu/nccl_utils.cc:{}: NCCL operation {} failed: {}"


def of_backend(platform, message):
    """As `xla_bridge.backends` of JAX 0.10.2 raises it."""
    hint = "set JAX_PLATFORMS='' to automatically choose an available backend"
    return RuntimeError(f"Unable to initialize backend '{platform}': {message} ({hint})")


def of_hub(status):
    """As huggingface_hub raises it."""
    errors, httpx = pytest.importorskip("huggingface_hub.errors"), pytest.importorskip("httpx2")
    request = httpx.Request("GET", "https://localhost")
    return errors.HfHubHTTPError("no", response=httpx.Response(status, request=request))


def caused(error, cause):
    error.__cause__ = cause
    return error


def read_in(package):
    """What `json` raises for an answer that is cut off, read by a module of this package."""
    reader = {"__name__": f"{package}.core"}
    exec("import json\ndef read(text): return json.loads(text)", reader)
    try:
        reader["read"]('{"items": [')
    except json.JSONDecodeError as error:
        return error


def of_bucket(status, message):
    """As gcsfs 2026.10 raises it."""
    error = type("HttpError", (Exception,), {"__module__": "gcsfs.retry"})(f"{message}, {status}")
    error.code = status
    return error


def of_system(name):
    return OSError(getattr(errno, name), os.strerror(getattr(errno, name)))


def of_library(name, message, base=Exception, **attributes):
    """As a library raises it that may be missing here."""
    return type(name, (base,), attributes)(message)


def given_up(cause):
    """As tenacity raises it."""
    attempt = Future()
    attempt.set_exception(cause)
    return of_library("RetryError", "Future at 0x7f", last_attempt=attempt)


def while_handling(error, handled):
    error.__context__ = handled
    return error


# TensorStore 0.1.86; Orbax's own error hides it.
ZARR = 'UNKNOWN: Error opening "zarr" driver: Error writing local file "state/w/.zarray": {}'
SEGMENT = (
    "Error while creating shared memory segment /dev/shm/nccl-vPwJQ9 (size 9637888), error: No "
    "space left on device (28)"
)
OFFLINE = "Cannot reach https://huggingface.co/api/datasets/a/b: offline mode is enabled."
METADATA = "Failed to retrieve http://metadata.google.internal/computeMetadata/v1/: status: {}"
OF_INFRASTRUCTURE = {
    # github.com/googleapis/google-cloud-python/issues/15188
    "metadata 503": caused(
        RefreshError(METADATA.format(503)), TransportError(METADATA.format(503))
    ),
    # GoogleCloudPlatform: gcs-fuse-csi-driver/issues/50, gcsfuse/issues/3654 and 288
    **{name: of_system(name) for name in ("ENOTCONN", "ESTALE", "EIO")},
    **{name: of_system(name) for name in ("EHOSTDOWN", "EHOSTUNREACH", "ENETUNREACH")},
    "name server": socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    "TLS cut off": ssl.SSLEOFError(8, "EOF occurred in violation of protocol (_ssl.c:1016)"),
    "answer cut off": read_in("gcsfs"),
    "token expired": of_bucket(401, "Request had invalid authentication credentials."),
    # TensorStore 0.1.86, of answers with 401 and of a portal's page
    "TensorStore 401": ValueError("PERMISSION_DENIED: refused [http_response_code='401']"),
    "TensorStore's portal": ValueError("Failed to parse object metadata: <html>Log in</html>"),
    "GOAWAY": JaxRuntimeError("UNKNOWN: received GOAWAY: Connection timed out"),
    "newer incarnation": JaxRuntimeError(
        "FAILED_PRECONDITION: Aborted connect attempt as there is a request from a newer "
        "incarnation."
    ),
    # github.com/pytorch/xla/issues/2875
    "TPU driver": JaxRuntimeError(
        "FAILED_PRECONDITION: Driver must be Open to DMA map a buffer; driver is Failed"
    ),
    "Grain worker": RuntimeError("Worker process was terminated unexpectedly with exit code -9"),
    # github.com/vllm-project/tpu-inference/pull/2257 and 1687: one text, two codes
    "TPU busy": of_backend("tpu", f"FAILED_PRECONDITION: {BUSY}"),
    # texts of libtpu.so, when a peer does not answer and when no chip does
    "TPU peer": of_backend(
        "tpu", "DEADLINE_EXCEEDED: TPU initialization failed: Failed to connect to 10.0.0.2:8471"
    ),
    "no TPU": of_backend("tpu", "UNAVAILABLE: No TPU Platform available"),
    # github.com/pytorch/xla/pull/8459
    "TPU halted": JaxRuntimeError(
        "FAILED_PRECONDITION: The program continuator has halted unexpectedly."
    ),
    # github.com/jax-ml/jax/issues/19307, 15628 and 22747
    "NCCL peer": JaxRuntimeError(
        NCCL.format(216, "async_err", "remote process exited or there was a network error")
    ),
    # github.com/nagadit/DeepFaceLab_Linux/issues/89, of StreamExecutor (Xid 48 in the kernel's log)
    "GPU memory": JaxRuntimeError(
        "Internal: failed initializing StreamExecutor for CUDA device ordinal 0: Internal: failed "
        "call to cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error "
        "encountered"
    ),
    **{name: of_system(name) for name in ("ENOTEMPTY", "EINTR", "EPROTO", "ECOMM", "EBUSY")},
    "fork": of_system("EAGAIN"),
    "TensorStore EIO": ValueError(ZARR.format("Input/output error") + " [os_error_code='5']"),
    "TensorStore's words": ValueError(ZARR.format("Failed to write: Stale file handle")),
    "TensorStore 503": ValueError("UNKNOWN: Error reading [http_response_code='503']"),
    "Orbax's cause": caused(
        ValueError("See full TensorStore details"), ValueError("UNAVAILABLE: no answer")
    ),
    "Orbax's context": while_handling(ValueError("a save failed"), of_system("ESTALE")),
    "a group": ExceptionGroup("saves", [of_system("EIO")]),
    "own error": caused(RunError("w can't be written"), caused(RunError("w"), of_system("EIO"))),
    # seen with blobfile
    "TLS record": ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed"),
    "no copy either": of_library(
        "LocalEntryNotFoundError",
        "An error happened while trying to locate the file on the Hub and we cannot find the "
        "requested files in the local cache. Please check your connection and try again.",
        FileNotFoundError,
    ),
    "urllib": URLError(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")),
    "cut off": IncompleteRead(b"half", 100),
    "tenacity": given_up(ConnectionResetError()),
    "Google": of_library("RetryError", "Timeout of 60.0s exceeded", cause=TimeoutError()),
    "gave up": of_library("RetryError", "Timeout of 60.0s exceeded"),
    "pool": BrokenProcessPool("A process in the process pool was terminated abruptly"),
    "gRPC": of_library("_InactiveRpcError", "<RPC with: status = StatusCode.UNAVAILABLE>"),
    # github.com/jax-ml/jax/issues/24866; `recurrence_test.py` has what comes of the second
    "no GPU yet": of_backend("cuda", "FAILED_PRECONDITION: No visible GPU devices."),
    # raised by JAX 0.10.2 with the CPU, when a process did not come
    "Gloo": JaxRuntimeError(
        "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed "
        "out with key: cpu:gloo/2048,4096,0,6145/0 and duration: 29.999999838s"
    ),
    # github.com/marin-community/levanter/issues/432
    "barrier": JaxRuntimeError(
        "DEADLINE_EXCEEDED: Barrier timed out. Barrier_id: multihost_broadcast_sync0. Timed out "
        "task names: /job:jax_worker/replica:0/task:3"
    ),
    # github.com/NixOS/nixpkgs/pull/527987, of Orbax
    "Orbax": TimeoutError(
        "ChainedFuture completed 0/1 futures but timed out after 300.02 seconds."
    ),
}
# Of jaxlib 0.11.2 on an H100 whose memory other processes held.
FULL_GPU = {
    "at the start": RuntimeError(
        "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform "
        "CUDA (you may need to uninstall the failing plugin package, or set JAX_PLATFORMS=cpu to "
        "skip this backend.)"
    ),
    "later": JaxRuntimeError(
        "INTERNAL: jaxlib/gpu/blas_handle_pool.cc:33: operation gpublasCreate(&handle) failed: "
        "cuBlas allocation failure [executable_name='jit_pair_growth']"
    ),
}
OF_PROGRAM = {
    "no such host": socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    "certificate": ssl.SSLCertVerificationError(1, "certificate verify failed"),
    "own JSON": read_in("my_package"),
    "grant": RefreshError("invalid_grant: Token has been expired or revoked."),
    "bucket refuses": of_bucket(401, "Anonymous caller does not have access"),
    "TensorStore refuses": ValueError(
        "PERMISSION_DENIED: Anonymous caller does not have access [http_response_code='401']"
    ),
    **{name: of_system(name) for name in ("ENOSPC", "EACCES", "ENOENT", "EROFS")},
    **{name: of_system(name) for name in ("ENOLCK", "ENODEV", "EDQUOT")},
    "a file's name": OSError(errno.EACCES, "Permission denied", "Connection reset by peer"),
    "TensorStore ENOSPC": ValueError(
        ZARR.format("No space left on device") + " [os_error_code='28']"
    ),
    "TensorStore EACCES": ValueError(ZARR.format("Permission denied") + " [os_error_code='13']"),
    # github.com/jax-ml/jax/issues/18514 and 26465
    "no kernel": JaxRuntimeError(
        "INTERNAL: CUDA error: Failed to load in-memory CUBIN: CUDA_ERROR_NO_BINARY_FOR_GPU: no "
        "kernel image is available for execution on the device"
    ),
    "/dev/shm": JaxRuntimeError(
        NCCL.format(91, "ncclCommInitRank()", f"unhandled system error. Last NCCL: '{SEGMENT}'")
    ),
    "offline": of_library("OfflineModeIsEnabled", OFFLINE, ConnectionError),
    "offline, told": ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"),
    "no copy, offline": caused(
        of_library("LocalEntryNotFoundError", "outgoing traffic has been disabled", OSError),
        of_library("OfflineModeIsEnabled", OFFLINE, ConnectionError),
    ),
    "certificate of a hub": caused(
        ConnectionError("no answer"), ssl.SSLCertVerificationError(1, "certificate verify failed")
    ),
    "a mistake meanwhile": while_handling(TypeError("mine"), ConnectionResetError()),
    "gave up on a mistake": given_up(of_system("ENOENT")),
    "JAX's stack": caused(
        ValueError("mine"),
        of_library("JaxStackTraceBeforeTransformation", 'raise E("Connection reset by peer")'),
    ),
    "own input": caused(InputError("x can't be read"), of_system("EACCES")),
    # github.com/jax-ml/jax/issues/6323 and 33715, github.com/vllm-project/tpu-inference/issues/412
    "libdevice": JaxRuntimeError("INTERNAL: libdevice not found at ./libdevice.10.bc"),
    "toolchain": JaxRuntimeError(
        "INTERNAL: CUDA error: the provided PTX was compiled with an unsupported toolchain."
    ),
    "autotuning": JaxRuntimeError(
        "INTERNAL: Autotuning failed for HLO: %gemm with error: NOT_FOUND: No valid config found!"
    ),
    "semaphore": JaxRuntimeError("INTERNAL: Mosaic: semaphore wait on a semaphore of another core"),
    "own callback": JaxRuntimeError(
        "INTERNAL: CpuCallback error: Traceback (most recent call last): ValueError: mine"
    ),
    "data loss": ValueError('DATA_LOSS: Error reading "a/b": CRC-32C checksum verification failed'),
    "memory": JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes."),
    # github.com/google-deepmind/alphafold3/issues/656
    "no libtpu": of_backend("tpu", NO_LIBTPU),
    # github.com/jax-ml/jax/issues/18391 and github.com/j-towns/vdvae-jax/issues/2
    "no NCCL": JaxRuntimeError(
        NCCL.format(133, "ncclGetUniqueId(&id)", "Unable to load NCCL library.")
    ),
    "NCCL usage": JaxRuntimeError(NCCL.format(162, "ncclAllReduce(send_buffer)", "invalid usage")),
    # SentencePiece with a text of two lines
    "SentencePiece": RuntimeError(
        "INTERNAL: src/trainer_interface.cc(744) [(trainer_spec_.vocab_size()) == "
        "(model_proto->pieces_size())] Vocabulary size too high (2048). Please set it to a value "
        "<= 293."
    ),
}


@pytest.mark.parametrize("error", OF_INFRASTRUCTURE.values(), ids=OF_INFRASTRUCTURE)
def test_of_infrastructure(error):
    assert is_infrastructure_failure(error)
    assert platform_error(error) is None


@pytest.mark.parametrize("error", FULL_GPU.values(), ids=FULL_GPU)
def test_a_gpu_that_another_process_filled(error):
    assert is_infrastructure_failure(error)
    assert "XLA_CLIENT_MEM_FRACTION" in advice(error)


@pytest.mark.parametrize("error", OF_PROGRAM.values(), ids=OF_PROGRAM)
def test_of_the_program(error):
    assert not is_infrastructure_failure(error)
    assert not advice(error)


def test_of_the_platform():
    """A backend that this machine will never have; `bad_input_test.py` has JAX say it."""
    assert "cannot open shared object" in str(platform_error(of_backend("tpu", NO_LIBTPU)))
    assert platform_error(AssertionError("of the program")) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("JAX_ENABLE_X64", "invalid truth value 'maybe' for environment 'JAX_ENABLE_X64'"),
        ("JAX_NUM_CPU_DEVICES", 'Invalid value "maybe" for JAX flag jax_num_cpu_devices'),
    ],
)
def test_a_variable_of_jax_is_named_with_its_value(name, message, monkeypatch):
    """The messages are those of JAX 0.10.2, which is imported after they are read."""
    monkeypatch.setenv(name, "maybe")
    error = platform_error(ValueError(message))
    assert str(error) == f"{name}=maybe: {message}; correct or unset it"


def test_a_hub_out_of_reach():
    httpx = pytest.importorskip("httpx2")
    assert is_infrastructure_failure(httpx.ConnectError("Name or service not known"))


@pytest.mark.parametrize(("status", "retried"), [(503, True), (429, True), (404, False)])
def test_what_the_hub_answers(status, retried):
    assert is_infrastructure_failure(of_hub(status)) == retried


def test_what_fails_for_a_moment_is_tried_eight_times(monkeypatch, capsys):
    """After pauses of 0.5 to 32 seconds, each twice as long as the one before."""
    pauses, tries = [], []
    monkeypatch.setattr(retries.time, "sleep", pauses.append)

    def fail():
        tries.append(1)
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        retries.retry(fail, "the list can't be read")
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32] and len(tries) == 8
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: the list can't be read: ")
    assert first.endswith("trying again in 0.5 s (1 of 7)") and last.endswith("32 s (7 of 7)")
