"""Backend: memory, and the vocabulary of a forward pass: every op once, with its shapes and what it is.

``model/decoder.py`` speaks in the fused ops; a backend has kernels for the unfused ops, and for those fused ones where
that wins. Outputs come first in every signature. Activations are ``[num_tokens, features]``.

Symbols in shapes: T tokens of the step, S sequences of the step, H heads, KV key-value heads, D head_dim, B KV blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from numba_engine.backends import traffic
from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Norm, Weight
from numba_engine.backends.instruments import OpTimer, TrafficCounter
from numba_engine.backends.layers import Activation, Attention, GatedMlp, Layer
from numba_engine.backends.ops import Op, Place, op
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.formats import Format, StoredTensor


class Backend(ABC):
    """Memory, and the ops. They may run asynchronously; ``download`` waits."""

    name: str
    device_name: str
    num_threads: int
    """CPU threads that run the ops; 0 where a GPU does."""
    activation_dtype: np.dtype[Any]
    """Element type of activation arrays (q, k, v, residual, …). Logits are always float32."""
    kv_cache_dtype: np.dtype[Any]
    quantized_matmul_dtype: str
    """What quantised weights are multiplied with: int8 (in two planes) or float32."""
    kv_cache_share: float
    """How much of the memory that the weights leave free a KV cache takes where nothing else is said."""
    timer: OpTimer | None = None
    """Takes the times of ops where they run on a device of their own."""
    counter: TrafficCounter | None = None
    """Counts the bytes of ops where the device can."""

    # ---- memory ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Uninitialised memory."""

    @abstractmethod
    def upload(self, host: np.ndarray) -> Array:
        """The array in the backend's memory. The host array may be reused at once."""

    @abstractmethod
    def download(self, array: Array) -> np.ndarray:
        """A host copy; waits for the ops that write it."""

    @abstractmethod
    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        """Stack matrices of equal in_features by rows, in the layout the kernels stream.

        Copies what it keeps: the tensors' memory may be unmapped afterwards.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every op so far is done."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Memory a KV cache could take now."""

    @abstractmethod
    def read_bandwidth_gbps(self) -> float:
        """Bandwidth of plainly reading memory larger than any cache, GB/s, measured here with the backend's threads."""

    def peak_gflops(self, format: Format) -> tuple[float, str] | None:
        """(GFLOP/s of multiplying matrices of a format without waiting for memory, with which instruction), measured
        here with the backend's threads; None where that is not measured."""
        return None

    # ---- running ops -----------------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        """Every call of an op comes here. A fused op that the backend has no kernel for is composed."""

    def fuses(self, op: Op) -> bool:
        """Whether a fused op runs as one here, and not as the ops that it fuses."""
        return False

    # ---- unfused ops -----------------------------------------------------------------------------------------------

    @op(
        "the tokens' rows of the table",
        source="token_ids",
        outputs=("out",),
        place=Place.START,
        traffic=traffic.embedding,
    )
    def embedding(self, out: Array, token_ids: Array, table: Weight, scale: float) -> None:
        """out [T, hidden] = table[token_ids [T]] * scale."""

    @op(
        "each row divided by its root mean square, times a learned weight",
        source="x",
        outputs=("out",),
        traffic=traffic.rms_norm,
    )
    def rms_norm(self, out: Array, x: Array, norm: Norm) -> None:
        """out [R, N] = x / sqrt(mean(x²) + eps) * weight [N], row by row (Zhang & Sennrich 2019). out may be x."""

    @op(
        "a matrix product",
        source="x",
        outputs=("out",),
        weights=("bias",),
        is_repeatable=True,
        traffic=traffic.linear,
    )
    def linear(self, out: Array, x: Array, weight: Weight, bias: Array | None = None) -> None:
        """out [R, out_features] = x [R, in_features] @ weight.T (+ bias)."""

    @op("a matrix product, added to the residual", source="x", updates=("residual",), traffic=traffic.linear_add)
    def linear_add(self, residual: Array, x: Array, weight: Weight) -> None:
        """residual [R, out_features] += x @ weight.T."""

    @op("a vector times a factor, added to the residual", source="x", updates=("residual",), traffic=traffic.add)
    def add(self, residual: Array, x: Array, scale: float) -> None:
        """residual [R, N] += x * scale."""

    @op("q and k turned to their position", source="qkv", updates=("qkv",), traffic=traffic.rope)
    def rope(self, qkv: Array, positions: Array, shape: Attention) -> None:
        """Rotate the q and k heads of qkv [T, (H + 2 KV) D] in place to their positions, by ``shape.rope``."""

    @op("RMSNorm of each q head and k head by itself", source="qkv", updates=("qkv",), traffic=traffic.head_norm)
    def head_norm(self, qkv: Array, q_norm: Norm, k_norm: Norm, shape: Attention) -> None:
        """RMSNorm of every q head and k head of qkv by itself, in place (Qwen3). Both norms have the same eps."""

    @op("k and v written to the KV cache", source="qkv", updates=("cache",), traffic=traffic.store_kv)
    def store_kv(self, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: Attention) -> None:
        """Write the k and v heads of qkv [T, (H + 2 KV) D] to their slots."""

    @op(
        "each q head against all cached keys of its KV head, softmax, and the values summed by it",
        source="qkv",
        outputs=("out",),
        traffic=traffic.attention,
    )
    def attention(self, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: Attention) -> None:
        """out [T, H D] = softmax(q k^T scale) v over each sequence's cached context, causal, windowed (GQA).

        With a softcap, scores s = q k^T scale become softcap · tanh(s / softcap) before softmax.
        """

    @op("activation(gate) · up (SwiGLU, GeGLU)", source="gate_up", outputs=("out",), traffic=traffic.gated_activation)
    def gated_activation(self, out: Array, gate_up: Array, activation: Activation) -> None:
        """out [T, I] = activation(gate) * up, of gate_up [T, 2 I]."""

    @op(
        "the row that wants logits",
        source="x",
        outputs=("out",),
        place=Place.HEAD,
        traffic=traffic.gather_rows,
    )
    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        """out [L, N] = x[rows [L]]."""

    @op(
        "the logits times a factor, and bounded by tanh",
        source="logits",
        updates=("logits",),
        place=Place.HEAD,
        traffic=traffic.cap_logits,
    )
    def cap_logits(self, logits: Array, scale: float, softcap: float | None) -> None:
        """logits x [L, vocab] become x * scale, and those softcap · tanh(x / softcap) unless that is None (Gemma 2)."""

    @op(
        "the logits to one token",
        source="logits",
        outputs=("out",),
        updates=("logits",),
        place=Place.DRAW,
        traffic=traffic.sample,
    )
    def sample(self, out: Sampled, logits: Array, sampling: Sampling) -> None:
        """Choose a token for every row of logits [L, vocab]; the logits are consumed.

        Log-probabilities go out where ``out`` has arrays for them.

        Top-k keeps every token whose logit is at least the k-th largest; top-p, among those, every token at least as
        likely as the last one needed to reach p; min-p, among those, every token at least min_p times as likely as the
        most likely one. So no rule depends on the order of ties. The draw is the exponential race
        (argmax of p_i / -log u_i, ties to the lower id), with u_i from Philox-4x32-10 (Salmon et al. 2011) keyed by
        the row's seed and counted by (token id // 4, output_index, 0, 0), lane token id % 4, as
        (bits + 0.5) * 2^-32: it depends on nothing else in the batch and needs no order of summation.

        The most likely token is always kept. NaN counts as -inf; where nothing is above -inf the token id is -1.
        """

    # ---- fused ops: what decoder.forward calls ---------------------------------------------------------------------

    @op(
        "RMSNorm, then q, k and v by one matrix; q and k turned to their position (RoPE)"
        "; k and v written to the KV cache",
        source="residual",
        outputs=("qkv",),
        updates=("cache",),
        scratch=("normed",),
        fuses=("rms_norm", "linear", "head_norm", "rope", "store_kv"),
        place=Place.FIRST_OF_LAYER,
        is_repeatable=True,
        traffic=traffic.norm_qkv_rope_store,
    )
    def norm_qkv_rope_store(
        self, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
    ) -> None:
        """RMSNorm → q, k, v projections → (head norm) → (RoPE) → k and v into the cache."""
        self.rms_norm(normed, residual, layer.attn_norm)
        self.linear(qkv, normed, layer.qkv_proj, layer.qkv_bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            self.head_norm(qkv, layer.q_norm, layer.k_norm, layer.attention)
        if layer.attention.rope is not None:
            self.rope(qkv, batch.positions, layer.attention)
        self.store_kv(cache, qkv, batch.slot_mapping, layer.attention)

    @op(
        "a matrix product (its RMSNorm, times a factor), added to the residual",
        source="x",
        updates=("residual",),
        scratch=("normed",),
        fuses=("linear_add", "linear", "rms_norm", "add"),
        traffic=traffic.linear_norm_add,
    )
    def linear_norm_add(
        self, residual: Array, normed: Array, x: Array, weight: Weight, out_norm: Norm | None, scale: float
    ) -> None:
        """residual [R, N] += RMSNorm(x @ weight.T) * scale; in most models there is neither norm nor scale."""
        if out_norm is None and scale == 1.0:
            self.linear_add(residual, x, weight)
            return
        self.linear(normed, x, weight)
        if out_norm is not None:
            self.rms_norm(normed, normed, out_norm)
        self.add(residual, normed, scale)

    @op(
        "RMSNorm, then gate and up by one matrix, activation(gate) · up (SwiGLU, GeGLU)",
        source="residual",
        outputs=("mlp_out",),
        scratch=("gate_up", "normed"),
        fuses=("rms_norm", "linear", "gated_activation"),
        is_repeatable=True,
        traffic=traffic.norm_gate_up_act,
    )
    def norm_gate_up_act(self, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp) -> None:
        """RMSNorm → gate and up projections → gated activation."""
        self.rms_norm(normed, residual, mlp.norm)
        self.linear(gate_up, normed, mlp.gate_up_proj)
        self.gated_activation(mlp_out, gate_up, mlp.activation)

    @op(
        "RMSNorm, then one dot product for each token of the vocabulary",
        source="last",
        outputs=("logits",),
        scratch=("last",),
        fuses=("gather_rows", "rms_norm", "linear"),
        place=Place.HEAD,
        traffic=traffic.norm_lm_head,
    )
    def norm_lm_head(
        self, logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight
    ) -> None:
        """The rows that want logits → RMSNorm → LM head. ``last`` is [L, hidden]."""
        self.gather_rows(last, residual, rows)
        self.rms_norm(last, last, norm)
        self.linear(logits, last, lm_head)


OPS: Mapping[str, Op] = MappingProxyType(
    {name: method.op for name, method in vars(Backend).items() if hasattr(method, "op")}
)
"""Every op by its name, in the order of ``Backend``."""
