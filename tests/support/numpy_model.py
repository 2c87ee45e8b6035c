"""The equations once more, in plain NumPy and float64: what every model must compute.

Written from the equations alone: loops over steps and heads, no sharing with the project's code.
Weights are those of one time, as the block's parameter tree; norms, attention and MLP as in
Vaswani et al. 2017, GPT-2 and Llama.
"""

import jax
import numpy as np


def norm(p, y, eps, centred):
    if centred:
        y = y - y.mean(-1, keepdims=True)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + eps) * p["scale"]
    return y + p.get("shift", 0)


def rotary(x, base=10_000.0, scaling=()):
    """[L, G]: the complex number x[i] + i x[i + G/2] is turned by position * base^(-2i/G)."""
    L, G = x.shape
    z = x[:, : G // 2] + 1j * x[:, G // 2 :]
    frequencies, factor = scaled(base ** (-2 * np.arange(G // 2) / G), base, scaling)
    z = z * np.exp(1j * np.arange(L)[:, None] * frequencies) * factor
    return np.concatenate((z.real, z.imag), axis=-1)


def scaled(frequencies, base, scaling):
    """The frequencies for longer sequences, and the factor on queries and keys."""
    if not scaling:
        return frequencies, 1
    name, factor, *rest = scaling
    if name == "linear":
        return frequencies / factor, 1
    if name == "llama3":  # of few turns in the original length: divided; of many: as they were
        low, high, length = rest
        turns = length * frequencies / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (kept + (1 - kept) / factor), 1
    fast, slow, length, attention_factor = rest  # yarn: likewise, but linear in the index
    G = 2 * len(frequencies)
    first, last = (
        G * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (fast, slow)
    )
    first, last = max(np.floor(first), 0), min(np.ceil(last), G - 1)
    divided = np.clip((np.arange(G // 2) - first) / max(last - first, 0.001), 0, 1)
    return frequencies * (1 - divided + divided / factor), attention_factor


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(c, p, y):
    """[L, D] -> [L, D]."""
    L = len(y)
    out = p["output"]["kernel"]
    heads, head_dim = out.shape[:2]
    if c.architecture == "gpt":
        kernel, bias = p["qkv"]["kernel"], p["qkv"]["bias"]
        parts = [np.einsum("ld,dhg->lhg", y, kernel[:, n]) + bias[n] for n in range(3)]
    else:
        parts = [
            np.einsum("ld,dhg->lhg", y, p[name]["kernel"]) + p[name].get("bias", 0)
            for name in ("query", "key", "value")
        ]
    if c.qk_norm != "none":
        over = -1 if c.qk_norm == "head" else (-2, -1)
        for n, name in enumerate(("query_norm", "key_norm")):
            square = (parts[n] ** 2).mean(over, keepdims=True)
            parts[n] = parts[n] / np.sqrt(square + c.norm_eps) * p[name]["scale"]
    mixed = np.zeros((L, heads, head_dim))
    for h in range(heads):
        q, k, v = (part[:, h * part.shape[1] // heads] for part in parts)
        if c.architecture == "llama":
            q, k = (rotary(x, c.rope_theta, c.rope_scaling) for x in (q, k))
        scores = q @ k.T / np.sqrt(head_dim)
        scores[np.triu_indices(L, 1)] = -np.inf
        mixed[:, h] = softmax(scores) @ v
    return np.einsum("lhg,hgd->ld", mixed, out) + p["output"].get("bias", 0)


def activate(c, h):
    if c.activation == "relu":
        return np.maximum(h, 0)
    if c.architecture == "gpt" or c.activation == "gelu":
        return 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    return h / (1 + np.exp(-h))


def mlp(c, p, y):
    if c.architecture == "gpt":
        h = activate(c, y @ p["up"]["kernel"] + p["up"]["bias"])
        return h @ p["down"]["kernel"] + p["down"]["bias"]
    h = activate(c, y @ p["gate"]["kernel"]) * (y @ p["up"]["kernel"])
    return h @ p["down"]["kernel"]


def fields(c):
    """f(W, y) and g(W, y) for the model config c."""
    gpt = c.architecture == "gpt"

    def f(W, y):
        if c.norm_position == "after":
            return norm(W["attention_norm"], attention(c, W["attention"], y), c.norm_eps, gpt)
        return attention(c, W["attention"], norm(W["attention_norm"], y, c.norm_eps, gpt))

    def g(W, y):
        if c.norm_position == "after":
            return norm(W["mlp_norm"], mlp(c, W["mlp"], y), c.norm_eps, gpt)
        if c.mlp_input == "attention_norm":
            y = norm(W["attention_norm"], y, c.norm_eps, gpt)
        return mlp(c, W["mlp"], norm(W["mlp_norm"], y, c.norm_eps, gpt))

    return f, g


def step(c, W, y):
    """One step of the scheme; W(c) is the weights at node c of this step."""
    f, g = fields(c)
    dt = 1.0 if c.step_size == "1" else float(c.step_size.removesuffix("/N")) / c.num_steps

    def both(node, y):
        return f(W(node), y) + g(W(node), y)

    if c.scheme == "euler":
        return y + dt * both(1, y)
    if c.scheme == "lie_trotter":
        y = y + dt * f(W(1), y)
        return y + dt * g(W(1), y)
    if c.scheme == "strang":
        y = y + dt / 2 * f(W(1), y)
        y = y + dt * g(W(1), y)
        return y + dt / 2 * f(W(1), y)
    if c.scheme == "midpoint":
        return y + dt * both(0.5, y + dt / 2 * both(0, y))
    if c.scheme == "heun":
        k1 = both(0, y)
        return y + dt / 2 * (k1 + both(1, y + dt * k1))
    k1 = both(0, y)
    k2 = both(0.5, y + dt / 2 * k1)
    k3 = both(0.5, y + dt / 2 * k2)
    return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + both(1, y + dt * k3))


def time_features(c, t):
    """gamma(t); of polynomials, P_k(2 t - 1)."""
    S, (kind, _, K) = c.num_frequencies, c.time_basis.partition(":")
    if kind == "legendre":
        return np.polynomial.legendre.legval(2 * t - 1, np.eye(int(K)))
    w = 10_000.0 ** (-np.arange(S) / S)
    return np.concatenate(([t], np.sin(c.time_scale * t * w), np.cos(c.time_scale * t * w)))


def hypernetwork(p, gamma):
    """The block's tree at a time from the parameters of `TimeDependentWeights`."""
    tree = {}
    for name, layer in p.items():
        if name == "time_embedding":
            continue
        e = embed(layer.get("time_embedding", p.get("time_embedding")), gamma)
        leaves = tree
        for part in name.split("."):
            leaves = leaves.setdefault(part, {})
        for leaf in ("kernel", "bias", "scale", "shift"):
            if leaf in layer:
                base = layer.get(f"{leaf}_base", 1.0 if leaf == "scale" else 0.0)
                leaves[leaf] = base + np.tensordot(e, layer[leaf], axes=1)
    return tree


def embed(p, gamma):
    if "coefficients" in p:
        return gamma @ p["coefficients"]
    hidden = gamma @ p["hidden_kernel"] + p["hidden_bias"]
    return (hidden / (1 + np.exp(-hidden))) @ p["output_kernel"] + p["output_bias"]


def weights_at(c, params, n, node):
    """The weights that step n reads at its node."""
    source = params["source"]
    if c.weights == "time_dependent":
        return hypernetwork(source, time_features(c, (n + node) / c.num_steps))
    if c.weights == "shared":
        return source["weights"]
    nodes = {"midpoint": (0, 0.5), "heun": (0, 1), "rk4": (0, 0.5, 1)}.get(c.scheme, (1,))
    index = n * len(nodes) + nodes.index(node)
    return jax.tree.map(lambda leaf: leaf[index], source["weights"])


def logits(c, params, tokens):
    """[L] -> [L, V] of the whole model, in float64."""
    gpt = c.architecture == "gpt"
    y = params["token_embedding"]["table"][tokens] * c.embedding_scale
    if gpt:
        y = y + params["position_embedding"]["table"][: len(tokens)] * c.position_scale
    for n in range(c.num_steps):
        y = step(c, lambda node, n=n: weights_at(c, params, n, node), y)
    y = norm(params["final_norm"], y, c.final_norm_eps, gpt)
    head = params["head"] if "head" in params else params["token_embedding"]["table"].T
    return (y @ head)[:, : c.vocab_size]
