"""Attention kernels: one place chooses, and says what it chose and why."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t5x_diffeq.array_types import Segments
from t5x_diffeq.errors import InputError

KERNELS = ("xla", "cudnn", "splash")
HEADS = ("batch", "length", "heads", "head_dim")
LANES = 128  # of a TPU's vector registers: splash blocks are multiples of it

Queries = Float[Array, "B L H G"]
KeysOrValues = Float[Array, "B L K G"]


def choose(platform: str, dtype: DTypeLike, head_dim: int, length: int) -> tuple[str, str]:
    """The fastest kernel that the platform has for these shapes, and why.

    Args:
      platform: "cpu", "gpu" or "tpu".
      dtype: of the computation.
      head_dim: width of a head.
      length: tokens of a sequence.
    """
    if platform == "gpu":
        if jnp.dtype(dtype).itemsize != 2:
            return "xla", f"cuDNN's flash attention takes 16-bit numbers, not {jnp.dtype(dtype)}"
        if head_dim > 128 or head_dim % 8:
            return "xla", f"cuDNN's flash attention takes heads up to 128 wide, not {head_dim}"
        return "cudnn", "cuDNN's flash attention"
    if platform == "tpu":
        if length % LANES:
            return "xla", f"splash attention takes lengths divisible by {LANES}, not {length}"
        return "splash", "splash, the TPU's flash attention"
    return "xla", f"there is no other for {platform}"


def check(kernel: str, platform: str, dtype: DTypeLike, head_dim: int, length: int) -> None:
    """A kernel named in the config is one that the platform has for these shapes.

    Raises:
      InputError: saying why it is not.
    """
    best, reason = choose(platform, dtype, head_dim, length)
    if kernel not in ("xla", best):
        raise InputError(
            f"model.attention={kernel} can't be used here: {reason}; set it to auto or {best}"
        )


def causal_attention(
    q: Queries, k: KeysOrValues, v: KeysOrValues, kernel: str, segments: Segments | None = None
) -> Queries:
    """softmax(q k^T / sqrt(G)) v, each token over itself and those before it.

    Args:
      q: queries, in the dtype of the keys or in float32.
      k: keys; K divides H, and each key head serves H / K query heads in a row.
      v: values.
      kernel: one of `KERNELS`.
      segments: a token attends to its own alone; None: there is but one.
    """
    if kernel == "splash":
        return splash_attention(q, k, v, segments)
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    q = q.astype(k.dtype)  # these kernels scale the products, which are float32
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=kernel)


def splash_attention(
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None = None,
    interpret: bool = False,
) -> Queries:
    """Attention by the Pallas kernel, on each device's own rows and heads.

    Args:
      q: queries.
      k: keys.
      v: values.
      segments: a token attends to its own alone; None: there is but one.
      interpret: run the kernel's program without a TPU, for tests.
    """
    local = partial(local_splash, interpret=interpret)
    if jax.sharding.get_abstract_mesh().empty:
        return local(q, k, v, segments)
    spec = PartitionSpec(*nn.logical_to_mesh_axes(HEADS))
    in_specs = (spec, spec, spec, PartitionSpec(*spec[:2]))
    # The kernel's outputs don't say over which axes they vary, so that can't be checked.
    whole = jax.shard_map(local, in_specs=in_specs, out_specs=spec, check_vma=False)
    return whole(q, k, v, segments)


def local_splash(
    q: Queries, k: KeysOrValues, v: KeysOrValues, segments: Segments | None, interpret: bool
) -> Queries:
    """One device's part. Heads narrower than the lanes are padded with zeros, which is exact."""
    length, heads, head_dim = q.shape[1:]
    missing = -head_dim % LANES
    widen = partial(jnp.pad, pad_width=((0, 0), (0, 0), (0, 0), (0, missing)))
    # The kernel has no scale of its own: q is divided in float32, and then rounded to k's dtype.
    scaled = (q.astype(jnp.float32) / head_dim**0.5).astype(k.dtype)
    by_head = [widen(x).transpose(0, 2, 1, 3) for x in (scaled, k, v)]
    ids = None if segments is None else splash.SegmentIds(q=segments, kv=segments)
    mixed = jax.vmap(splash_kernel(heads, length, interpret))(*by_head, ids)
    return mixed.transpose(0, 2, 1, 3)[..., :head_dim]


def splash_kernel(heads: int, length: int, interpret: bool) -> Callable[..., Array]:
    """The kernel for a causal mask, on `[H, L, G]`."""
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * heads)
    block = next(b for b in (512, 256, LANES) if length % b == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        use_fused_bwd_kernel=True,
    )
    return splash.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )
