"""Attention kernels, and the one place that chooses between them and says why."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Segments
from t5x_diffeq.layers.mesh import on_shards, spec_of
from t5x_diffeq.runtime.errors import InputError

HEADS = ("batch", "length", "heads", "head_dim")
LANES = 128  # width of a TPU's vector registers; splash blocks are multiples of it
# Splash's fused backward pass writes a partial gradient of q per block of keys, each as large as q.
# Two separate kernels write none, but compute the scores once more.
MOST_COPIES = 8
STAND_IN = "stand-in"  # for a GPU kernel, in programs compiled on CPU and never run
_LEAST_OF_TRITON = 16  # width of a head: Triton's products are at least so wide
_KEPT = "attention"  # name of the kernel's output for remat policies

Queries = Float[Array, "B L H G"]
KeysOrValues = Float[Array, "B L K G"]


def choose(
    platform: str, dtype: DTypeLike, head_dim: int, length: int, segments: bool = False
) -> tuple[str, str]:
    """The fastest kernel that the platform has for these shapes, and the reason.

    Args:
      platform: "cpu", "gpu" or "tpu".
      dtype: dtype of the computation.
      head_dim: width of a head.
      length: sequence length in tokens.
      segments: whether rows have several segments.
    """
    if platform == "gpu":
        if jnp.dtype(dtype).itemsize != 2:
            return "xla", f"cuDNN's flash attention takes 16-bit numbers, not {jnp.dtype(dtype)}"
        if head_dim > 128 or head_dim % 8:
            return "xla", f"cuDNN's flash attention takes heads up to 128 wide, not {head_dim}"
        if not segments:
            return "cudnn", "cuDNN's flash attention"
        if length % LANES or head_dim < _LEAST_OF_TRITON:
            return "cudnn", (
                "cuDNN's flash attention, with documents as a dense mask; Triton's takes lengths "
                f"divisible by {LANES} and heads from {_LEAST_OF_TRITON} wide, not {length} and "
                f"{head_dim}"
            )
        return "triton", (
            "JAX's flash attention in Triton, which takes the documents' numbers; for cuDNN's they "
            "are a dense mask, of which it computes a gradient"
        )
    if platform == "tpu":
        if length % LANES:
            return "xla", f"splash attention takes lengths divisible by {LANES}, not {length}"
        return (
            "splash",
            f"the TPU's flash attention; {splash_blocks('splash', length, head_dim).reason}",
        )
    return "xla", f"there is no other for {platform}"


def check(
    kernel: str,
    platform: str,
    dtype: DTypeLike,
    head_dim: int,
    length: int,
    segments: bool = False,
) -> str:
    """The reason why the kernel named in the config runs as it does on this platform.

    Raises:
      InputError: if the platform doesn't have the kernel for these shapes, saying why.
    """
    shapes = (platform, dtype, head_dim, length)
    best, reason = choose(*shapes, segments)
    name, _, block = kernel.partition(":")
    # On a GPU either kernel takes rows with and without segments.
    usable = {"xla", *(choose(*shapes, each)[0] for each in (False, True))}
    if name not in usable:
        raise InputError(
            f"model.attention={kernel} can't be used here: {reason}; set it to auto or {best}"
        )
    if not block:
        return "as model.attention says"
    if name != "splash" or not block.isdecimal() or int(block) < LANES or int(block) % LANES:
        raise InputError(
            f"model.attention={kernel}: splash alone takes a block, a multiple of {LANES}, as in "
            "splash:512"
        )
    if length % int(block):
        raise InputError(
            f"model.attention={kernel}: the block doesn't divide the length, {length}; set "
            "model.attention to auto"
        )
    return f"as model.attention says; {splash_blocks(kernel, length, head_dim).reason}"


@dataclass(frozen=True)
class SplashBlocks:
    """How splash attention divides a sequence into blocks.

    Attributes:
      size: number of queries, and of keys, in a block.
      fused: whether one kernel computes the whole backward pass.
      reason: both choices in words, and the reason for them.
    """

    size: int
    fused: bool
    reason: str


def splash_blocks(kernel: str, length: int, head_dim: int) -> SplashBlocks:
    """The blocks of the kernel `splash`, or `splash:SIZE`.

    Large blocks make few partial gradients. Blocks of 2048 don't fit a TPU's VMEM, and if a head is
    wider than the lanes, blocks of 1024 don't fit on every kind of TPU.

    Args:
      kernel: either of these names.
      length: sequence length in tokens.
      head_dim: width of a head.
    """
    _, _, given = kernel.partition(":")
    fitting = (1024, 512, 256, LANES) if head_dim <= LANES else (512, 256, LANES)
    size = int(given) if given else next(b for b in fitting if length % b == 0)
    copies = length // size
    fused = copies <= MOST_COPIES
    backward = (
        f"backward in one kernel, with {copies} partial gradients of q"
        if fused
        else f"backward in two kernels, since one would keep {copies} partial gradients of q"
    )
    return SplashBlocks(size, fused, f"blocks of {size}, {backward}")


def causal_attention(
    q: Queries, k: KeysOrValues, v: KeysOrValues, kernel: str, segments: Segments | None = None
) -> Queries:
    """softmax(q k^T / sqrt(G)) v, each token over itself and the tokens before it.

    Args:
      q: queries, in the dtype of the keys or in float32.
      k: keys; K divides H, and each key head serves H / K query heads in a row.
      v: values.
      kernel: one of `config_keys.KERNELS`, or splash with a block size, such as `splash:512`.
      segments: a token attends only to its own segment; None stands for a single segment.
    """
    if kernel == "triton":
        return triton_attention(q, k, v, segments)
    if kernel.startswith("splash"):
        return splash_attention(q, k, v, segments, kernel)
    q = q.astype(k.dtype)  # these kernels scale the scores, in float32
    if kernel == STAND_IN:
        return checkpoint_name(_on_own_rows(_stand_in, q, k, v, None), _KEPT)
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    name = cast(Literal["xla", "cudnn"], kernel)  # the two others
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=name)
    return checkpoint_name(mixed, _KEPT)


def triton_attention(
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None = None,
    interpret: bool = False,
) -> Queries:
    """Attention by JAX's kernel in Triton; each device computes its own rows and heads.

    Args:
      q: queries.
      k: keys, which the kernel takes once for each query head.
      v: values, likewise.
      segments: a token attends only to its own segment; None stands for a single segment.
      interpret: interpret the kernel, so that tests need no GPU.
    """
    mixed = _on_own_rows(partial(_local_triton, interpret=interpret), q, k, v, segments)
    return checkpoint_name(mixed, _KEPT)


def splash_attention(
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None = None,
    kernel: str = "splash",
    interpret: bool = False,
) -> Queries:
    """Attention by the Pallas kernel; each device computes its own rows and heads.

    Args:
      q: queries.
      k: keys.
      v: values.
      segments: a token attends only to its own segment; None stands for a single segment.
      kernel: `splash`, or `splash:SIZE` with a block size.
      interpret: interpret the kernel, so that tests need no TPU.
    """
    return _on_own_rows(
        partial(_local_splash, kernel=kernel, interpret=interpret), q, k, v, segments
    )


def _on_own_rows(
    local: Callable[..., Array],
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None,
) -> Queries:
    """`local(q, k, v, segments)` on each device's own rows and heads."""
    spec = spec_of(HEADS)
    in_specs = (spec, spec, spec, PartitionSpec(*spec[:2]))
    # The kernel doesn't declare over which mesh axes its outputs vary, so nothing can check it.
    return on_shards(local, in_specs, spec, check_vma=False)(q, k, v, segments)


def _local_triton(
    q: Queries, k: KeysOrValues, v: KeysOrValues, segments: Segments | None, interpret: bool
) -> Queries:
    # Imported here, because jax 0.12 warns at this import that the kernel will move to tokamax. Of
    # tokamax 0.0.12, the public function takes no segments.
    from jax.experimental.pallas.ops.gpu.attention import mha

    heads, head_dim = q.shape[2:]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    scale, causal = head_dim**-0.5, True
    return mha(q.astype(k.dtype), k, v, segments, scale, causal, interpret=interpret)


def _local_splash(
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None,
    kernel: str,
    interpret: bool,
) -> Queries:
    """One device's share. Heads narrower than the lanes are zero-padded, which is exact."""
    length, heads, head_dim = q.shape[1:]
    missing = -head_dim % LANES
    widen = partial(jnp.pad, pad_width=((0, 0), (0, 0), (0, 0), (0, missing)))
    # The kernel doesn't scale the scores: q is divided in float32, then rounded to k's dtype.
    scaled = (q.astype(jnp.float32) / head_dim**0.5).astype(k.dtype)
    by_head = [widen(x).transpose(0, 2, 1, 3) for x in (scaled, k, v)]
    ids = None if segments is None else splash.SegmentIds(q=segments, kv=segments)
    blocks = splash_blocks(kernel, length, head_dim)
    mixed = jax.vmap(_splash_kernel(heads, length, blocks, interpret))(*by_head, ids)
    return mixed.transpose(0, 2, 1, 3)[..., :head_dim]


def _splash_kernel(
    heads: int, length: int, blocks: SplashBlocks, interpret: bool
) -> Callable[..., Array]:
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * heads)
    size = blocks.size
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=None if blocks.fused else size,
        block_kv_dq=None if blocks.fused else size,
        use_fused_bwd_kernel=blocks.fused,
    )
    return splash.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=_KEPT,
        interpret=interpret,
    )


@jax.custom_vjp
def _stand_in(q: Queries, k: KeysOrValues, v: KeysOrValues, segments: None) -> Queries:
    """Allocates the same arrays as cuDNN's kernel, and computes nothing."""
    return _stand_in_forward(q, k, v, segments)[0]


def _stand_in_forward(
    q: Queries, k: KeysOrValues, v: KeysOrValues, segments: None
) -> tuple[Queries, tuple]:
    """The output and the residuals: the arguments, the output and the softmax's sums."""
    sums = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    out, sums = jax.pure_callback(_never, (jax.typeof(q), sums), q, k, v)
    return out, (q, k, v, out, sums)


def _stand_in_backward(kept: tuple, d_out: Queries) -> tuple:
    shapes = tuple(jax.typeof(x) for x in kept[:3])
    return *jax.pure_callback(_never, shapes, *kept, d_out), None


def _never(*_: Array) -> Array:
    """The callback that a program with a stand-in would run."""
    raise AssertionError("a program compiled for planning was run")


_stand_in.defvjp(_stand_in_forward, _stand_in_backward)
