"""The ops of ``numba_engine.backends.base.Backend`` in float64, written to be read rather than run fast."""

from __future__ import annotations

import numpy as np

from numba_engine.backends.layers import Activation


def embedding(token_ids: np.ndarray, table: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """[T, hidden] of table [vocab, hidden]."""
    return table[token_ids].astype(np.float64) * scale


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    out = x.astype(np.float64) @ weight.astype(np.float64).T
    return out if bias is None else out + bias


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations [R, N] float32 as integers [R, N / 32, 32] within ±32512 and scales [R, N / 32], in float32 steps."""
    blocks = np.ascontiguousarray(x, dtype=np.float32).reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(32512) / largest
    inverse[~(inverse <= 3e38)] = 0
    return np.rint(blocks * inverse[..., None]).astype(np.int32), largest / np.float32(32512)


def linear_int8(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """linear with activations rounded by ``quantize_rows``; the rest is exact."""
    q, scales = quantize_rows(x)
    return linear((q * scales[..., None].astype(np.float64)).reshape(x.shape), weight, bias)


def rope(
    qkv: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, num_rotated_heads: int
) -> np.ndarray:
    """qkv [T, *] with its first heads rotated; cos, sin [positions, D / 2]."""
    half = cos.shape[1]
    out = qkv.astype(np.float64)
    heads = out[:, : num_rotated_heads * 2 * half].reshape(len(qkv), num_rotated_heads, 2, half)
    a, b = heads[:, :, 0].copy(), heads[:, :, 1].copy()
    c, s = cos[positions].astype(np.float64)[:, None], sin[positions].astype(np.float64)[:, None]
    heads[:, :, 0], heads[:, :, 1] = a * c - b * s, b * c + a * s
    return out


def head_norm(
    qkv: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray, num_heads: int, num_kv_heads: int, eps: float
) -> np.ndarray:
    out = qkv.astype(np.float64)
    d = q_norm.size
    q, k = out[:, : num_heads * d], out[:, num_heads * d : (num_heads + num_kv_heads) * d]
    q[...] = rms_norm(q.reshape(-1, d), q_norm, eps).reshape(q.shape)
    k[...] = rms_norm(k.reshape(-1, d), k_norm, eps).reshape(k.shape)
    return out


def store_kv(
    k_cache: np.ndarray, v_cache: np.ndarray, qkv: np.ndarray, slot_mapping: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of the caches [B, KV, block_size, D] with the k and v heads of qkv in their slots."""
    num_kv_heads, block_size, d = k_cache.shape[1:]
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    k, v = (part.reshape(-1, num_kv_heads, d) for part in np.split(qkv[:, -2 * num_kv_heads * d :], 2, axis=1))
    k_cache[slot_mapping // block_size, :, slot_mapping % block_size] = k.astype(k_cache.dtype)
    v_cache[slot_mapping // block_size, :, slot_mapping % block_size] = v.astype(v_cache.dtype)
    return k_cache, v_cache


def attention(
    qkv: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    cu_seqlens_q: np.ndarray,
    context_lens: np.ndarray,
    block_tables: np.ndarray,
    num_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """[T, H D]: every token over the keys of its sequence up to itself, at most ``window`` of them."""
    num_kv_heads, _, d = k_cache.shape[1:]
    group = num_heads // num_kv_heads
    out = np.empty((len(qkv), num_heads, d))
    for s in range(len(context_lens)):
        keys, values = (
            cache[block_tables[s]].transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, d).astype(np.float64)
            for cache in (k_cache, v_cache)
        )
        for t in range(cu_seqlens_q[s], cu_seqlens_q[s + 1]):
            end = context_lens[s] - (cu_seqlens_q[s + 1] - t) + 1
            begin = 0 if window is None else max(0, end - window)
            for head in range(num_heads):
                q = qkv[t, head * d : (head + 1) * d].astype(np.float64)
                scores = soft_capped(keys[head // group, begin:end] @ q * scale, softcap)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights / weights.sum() @ values[head // group, begin:end]
    return out.reshape(len(qkv), num_heads * d)


def gated_activation(gate_up: np.ndarray, activation: Activation = "silu") -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    return gate / (1 + np.exp(-gate)) * up


def add(residual: np.ndarray, x: np.ndarray, scale: float) -> np.ndarray:
    return residual.astype(np.float64) + x.astype(np.float64) * scale


def cap_logits(logits: np.ndarray, scale: float, softcap: float | None) -> np.ndarray:
    return soft_capped(logits.astype(np.float64) * scale, softcap)


def soft_capped(x: np.ndarray, softcap: float | None) -> np.ndarray:
    return x if softcap is None else softcap * np.tanh(x / softcap)


def linear_norm_add(
    residual: np.ndarray, x: np.ndarray, weight: np.ndarray, out_norm: np.ndarray | None, eps: float, scale: float
) -> np.ndarray:
    product = linear(x, weight)
    return add(residual, product if out_norm is None else rms_norm(product, out_norm, eps), scale)


def gather_rows(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return x[rows]
