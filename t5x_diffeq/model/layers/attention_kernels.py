"""Attention kernels, and the one place that chooses between them and says why."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel,
)
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from t5x_diffeq.model.layers.array_types import Order, Segments
from t5x_diffeq.model.layers.context import (
    attend_in_order,
    length_shards,
    on_local_tokens,
    zigzag_order,
)
from t5x_diffeq.model.layers.mesh import mesh_axes, on_shards, spec_of
from t5x_diffeq.system.errors import InputError

HEADS = ("batch", "length", "heads", "head_dim")
LANES = 128  # width of a TPU's vector registers; splash blocks are multiples of it
_LEAST_OF_TRITON = 16  # the narrowest head: Triton's products are at least this wide
_CHECKPOINT_NAME = "attention"  # name of the kernel's output for remat policies

Queries = Float[Array, "B L H G"]
KeysOrValues = Float[Array, "B L K G"]


def choose(
    platform: str,
    dtype: DTypeLike,
    head_dim: int,
    length: int,
    segments: bool = False,
    shards: int = 1,
    capability: str | None = None,
) -> tuple[str, str]:
    """The fastest kernel that the platform has for these shapes, and the reason.

    Args:
      platform: "cpu", "gpu" or "tpu".
      segments: whether a row holds several documents, which attention must not cross.
      shards: the number of devices that share each sequence.
      capability: CUDA's compute capability of the GPU, such as "9.0"; None if unknown.
    """
    if platform == "gpu":
        widest = 256 if str(capability).startswith("9.") else 128  # cuDNN's widest head
        if shards > 1:
            return "xla", (
                "the flash attention of cuDNN and Triton takes whole sequences, not "
                f"mesh.context={shards}"
            )
        if jnp.dtype(dtype).itemsize != 2:
            return "xla", f"cuDNN's flash attention takes 16-bit numbers, not {jnp.dtype(dtype)}"
        if head_dim > widest or head_dim % 8:
            return "xla", (
                f"cuDNN's flash attention takes heads up to {widest} wide here, in steps of 8, not "
                f"{head_dim}"
            )
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
        if length % (chunks := _chunks(shards)) or length // chunks % LANES:
            part = "lengths" if shards == 1 else f"1/{chunks} of a sequence per chunk,"
            return "xla", f"splash attention takes {part} divisible by {LANES}, not {length}"
        size = splash_block("splash", length, head_dim, shards)
        return "splash", f"the TPU's flash attention; blocks of {size}"
    return "xla", f"there is no other for {platform}"


def check_kernel(
    kernel: str,
    platform: str,
    dtype: DTypeLike,
    head_dim: int,
    length: int,
    segments: bool = False,
    shards: int = 1,
    capability: str | None = None,
) -> str:
    """The reason why the kernel named in the config runs as it does on this platform.

    Raises:
      InputError: if the platform lacks the kernel for these shapes, or the block doesn't fit.
    """
    shapes = (platform, dtype, head_dim, length)
    best, reason = choose(*shapes, segments, shards, capability)
    name, _, block = kernel.partition(":")
    # cuDNN's kernel and Triton's both take rows with and without segments, so either can be named.
    usable = {"xla", *(choose(*shapes, packed, shards, capability)[0] for packed in (False, True))}
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
    chunk = length // _chunks(shards)
    if chunk % int(block):
        divided = "the length" if shards == 1 else f"the chunks of mesh.context={shards}"
        raise InputError(
            f"model.attention={kernel}: the block doesn't divide {divided}, {chunk}; set "
            "model.attention to auto"
        )
    return f"as model.attention says; blocks of {block}"


def _chunks(shards: int) -> int:
    """The number of parts of a sequence that blocks must divide (see `layers.context`)."""
    return 2 * shards if shards > 1 else 1


def splash_block(kernel: str, length: int, head_dim: int, shards: int = 1) -> int:
    """The number of queries, and of keys, in a block of the kernel `splash`, or `splash:SIZE`.

    SIZE divides the length of training (see `check_kernel`). For a length that SIZE doesn't divide,
    such as the length of a shorter text, the largest size that fits is chosen. Blocks of 2048 don't
    fit a TPU's VMEM; if a head is wider than the lanes, blocks of 1024 don't fit on every TPU.
    """
    _, _, block_size = kernel.partition(":")
    fitting = (1024, 512, 256, LANES) if head_dim <= LANES else (512, 256, LANES)
    chunk = length // _chunks(shards)
    if block_size and chunk % int(block_size) == 0:
        return int(block_size)
    return next(size for size in fitting if chunk % size == 0)


def causal_attention(
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    kernel: str,
    segments: Segments | None = None,
    order: Order | None = None,
) -> Queries:
    """softmax(q k^T / sqrt(G)) v, each token over itself and the tokens before it.

    Args:
      q: queries, in the dtype of the keys or in float32.
      k: keys; K divides H, and each key head serves H / K query heads in a row.
      kernel: one of `values.KERNELS`, or splash with a block size, such as `splash:512`.
      segments: a token attends only to its own segment; None stands for a single segment.
      order: see `Places`; with it, each device gathers the keys and values of its rows, and
        computes the attention of its own tokens.
    """
    if kernel == "triton":
        return triton_attention(q, k, v, segments)
    if kernel.startswith("splash"):
        return splash_attention(q, k, v, segments, order, kernel)
    q = q.astype(k.dtype)  # unlike splash, these kernels scale the scores themselves, in float32
    if order is not None:
        by_token = spec_of(HEADS[:2])
        mixed = on_local_tokens(attend_in_order, (order, by_token), q, k, v, segments)
        return checkpoint_name(mixed, _CHECKPOINT_NAME)
    mask = None if segments is None else (segments[:, None, :, None] == segments[:, None, None, :])
    name = cast(Literal["xla", "cudnn"], kernel)  # the kernels that are left
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=name)
    # `ode.integrate` keeps the results of cuDNN's primitive; a name would keep the output twice.
    return mixed if kernel == "cudnn" else checkpoint_name(mixed, _CHECKPOINT_NAME)


def triton_attention(
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None = None,
    interpret: bool = False,
) -> Queries:
    """Attention by JAX's kernel in Triton; each device computes its own rows and heads.

    Args:
      interpret: interpret the kernel, so that tests need no GPU.
    """
    mixed = _on_local_rows(partial(_local_triton, interpret=interpret), q, k, v, segments)
    return checkpoint_name(mixed, _CHECKPOINT_NAME)


def splash_attention(
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None = None,
    order: Order | None = None,
    kernel: str = "splash",
    interpret: bool = False,
) -> Queries:
    """Attention by the Pallas kernel; each device computes its own rows and heads.

    Args:
      kernel: `splash`, or `splash:SIZE` with a block size.
      interpret: interpret the kernel, so that tests need no TPU.
    """
    if order is not None:
        attend = _zigzag_splash(q.shape, kernel, interpret)
        return on_local_tokens(_apply_splash, attend, q, k, v, segments)
    return _on_local_rows(
        partial(_local_splash, kernel=kernel, interpret=interpret), q, k, v, segments
    )


def _on_local_rows(
    local: Callable[..., Array],
    q: Queries,
    k: KeysOrValues,
    v: KeysOrValues,
    segments: Segments | None,
) -> Queries:
    """`local(q, k, v, segments)` on each device's own rows, with all their tokens, and heads."""
    spec = spec_of((HEADS[0], None, *HEADS[2:]))
    in_specs = (spec, spec, spec, PartitionSpec(*spec[:2]))
    # The kernel doesn't declare over which mesh axes its outputs vary, so nothing can check it.
    return on_shards(local, in_specs, spec, check_vma=False)(q, k, v, segments)


def _local_triton(
    q: Queries, k: KeysOrValues, v: KeysOrValues, segments: Segments | None, interpret: bool
) -> Queries:
    # Imported here, because jax 0.12 warns at this import that the kernel will move to tokamax. The
    # public function of tokamax 0.0.12 takes no segments. JAX's kernel in Mosaic GPU takes none
    # either, and its backward pass isn't causal (jax 0.10, 0.12).
    from jax.experimental.pallas.ops.gpu.attention import mha

    heads, head_dim = q.shape[2:]
    # The kernel has as many key heads as query heads.
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
    length, heads, head_dim = q.shape[1:]
    size = splash_block(kernel, length, head_dim)
    attend = _splash_kernel(heads, splash.CausalMask((length, length)), size, 1, interpret)
    return _apply_splash(attend, q, k, v, segments, segments)


def _zigzag_splash(
    shape: tuple[int, ...], kernel: str, interpret: bool
) -> tuple[SplashAttentionKernel, SplashAttentionKernel]:
    """The kernel for queries `[B, L, H, G]` in zig-zag order, and how it is split over devices."""
    _, length, heads, head_dim = shape
    shards, mesh = length_shards(), jax.sharding.get_abstract_mesh()
    mask = splash.CausalMask((length, length))
    # The mask compares indices in the row, and queries are not in the order of the row.
    mask.q_sequence = zigzag_order(length, shards)
    heads //= prod(mesh.shape[axis] for axis in mesh_axes("heads"))
    size = splash_block(kernel, length, head_dim, shards)
    attend = _splash_kernel(heads, mask, size, shards, interpret)
    by_query = NamedSharding(mesh, PartitionSpec(None, *spec_of(("length",))))
    return attend, attend.manual_sharding_spec(by_query)


def _apply_splash(
    attend: SplashAttentionKernel,
    q: Queries,
    k: Float[Array, "B M K G"],
    v: Float[Array, "B M K G"],
    query_segments: Segments | None,
    key_segments: Int[Array, "B M"] | None,
) -> Queries:
    """The kernel on one device. Heads narrower than the lanes are padded with zeros: exact."""
    head_dim = q.shape[-1]
    missing = -head_dim % LANES
    widen = partial(jnp.pad, pad_width=((0, 0), (0, 0), (0, 0), (0, missing)))
    # The kernel doesn't scale the scores: q is divided in float32, then rounded to k's dtype.
    scaled = (q.astype(jnp.float32) / head_dim**0.5).astype(k.dtype)
    by_head = [widen(x).transpose(0, 2, 1, 3) for x in (scaled, k, v)]
    ids = None
    if query_segments is not None and key_segments is not None:
        ids = splash.SegmentIds(q=query_segments, kv=key_segments)
    mixed = cast(Array, jax.vmap(attend)(*by_head, ids))
    return mixed.transpose(0, 2, 1, 3)[..., :head_dim]


def _splash_kernel(
    heads: int, mask: splash.CausalMask, size: int, shards: int, interpret: bool
) -> SplashAttentionKernel:
    """The kernel of a device's heads, for all of the `shards` devices that share each row."""
    # The backward pass runs in two kernels, which compute the scores twice. A single kernel would
    # write a partial gradient of q for each block of keys. Summing these costs more
    # (docs/lab/tpu_step.md), and their memory grows with the square of the length.
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
        use_fused_bwd_kernel=False,
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=_CHECKPOINT_NAME,
        interpret=interpret,
    )
