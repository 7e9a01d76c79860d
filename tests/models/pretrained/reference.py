"""GPT-2 and Llama in NumPy, by the names that weights have in their files: logits of a text."""

import numpy as np


def gpt2(values, weights, ids):
    """Radford et al., 2019."""
    weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
    epsilon, heads = values["layer_norm_epsilon"], values["n_head"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def product(x, name):
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["wte.weight"][ids] + weights["wpe.weight"][: len(ids)]
    for i in range(values["n_layer"]):
        h = f"h.{i}"
        parts = np.split(product(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn"), 3, -1)
        q, k, v = (part.reshape(len(ids), heads, -1) for part in parts)
        x = x + product(_attend(q, k, v), f"{h}.attn.c_proj")
        y = product(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + product(y, f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ weights["wte.weight"].T


def llama(values, weights, ids):
    """Touvron et al., 2023."""
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    heads, keys = values["num_attention_heads"], values["num_key_value_heads"]

    def norm(x, name):
        root = np.sqrt((x**2).mean(-1, keepdims=True) + values["rms_norm_eps"])
        return x / root * weights[f"{name}.weight"]

    def product(x, name):
        return x @ weights[f"{name}.weight"].T

    def rotated(x):
        half = x.shape[-1] // 2
        angles = np.arange(len(ids))[:, None] * values["rope_theta"] ** (-np.arange(half) / half)
        cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cosines - b * sines, b * cosines + a * sines], -1)

    x = weights["embed_tokens.weight"][ids]
    for i in range(values["num_hidden_layers"]):
        h = f"layers.{i}"
        y = norm(x, f"{h}.input_layernorm")
        q, k, v = (
            product(y, f"{h}.self_attn.{letter}_proj").reshape(len(ids), number, -1)
            for letter, number in (("q", heads), ("k", keys), ("v", keys))
        )
        k, v = (np.repeat(each, heads // keys, 1) for each in (rotated(k), v))
        x = x + product(_attend(rotated(q), k, v), f"{h}.self_attn.o_proj")
        y = norm(x, f"{h}.post_attention_layernorm")
        gate = product(y, f"{h}.mlp.gate_proj")
        y = gate / (1 + np.exp(-gate)) * product(y, f"{h}.mlp.up_proj")
        x = x + product(y, f"{h}.mlp.down_proj")
    # One table may be at both ends.
    return norm(x, "norm") @ weights.get("lm_head.weight", weights["embed_tokens.weight"]).T


def greedy(values, weights, ids, number):
    """The most likely tokens behind a text, and the log probability of each."""
    logits = {"gpt2": gpt2, "llama": llama}[values["model_type"]]
    ids, found = list(ids), []
    for _ in range(number):
        last = logits(values, weights, np.array(ids))[-1]
        found.append(float(last.max() - np.log(np.exp(last).sum())))
        ids.append(int(last.argmax()))
    return ids[-number:], found


def _attend(q, k, v):
    """`[length, heads * dim]`: what each token sees of those up to itself."""
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)
