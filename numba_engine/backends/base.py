"""The vocabulary of a forward pass: what an op takes, with shapes, and the phases composed of ops.

``model/decoder.py`` speaks in the phases; a backend implements the textbook ops and overrides a phase with a fused
kernel where that wins. Outputs come first in every signature. Activations are ``[num_tokens, features]``.

Symbols in shapes: T tokens of the step, S sequences of the step, H heads, KV key-value heads, D head_dim, B KV blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from numba_engine.backends.instruments import OpTimer, TrafficCounter
from numba_engine.storage import StorageFormat, StoredTensor


class Array(Protocol):
    """Memory of a backend: a NumPy array on ``cpu``, a device array on ``cuda`` and ``ptx``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class WeightSegment:
    """Consecutive rows of a weight that share one format. ``data`` is the backend's own layout."""

    format: StorageFormat
    num_rows: int
    nbytes: int
    """Bytes streamed to read it once; equals the checkpoint's bytes unless the backend pads."""
    data: Any
    looked_up_row_bytes: int | None = None
    """Bytes read to look up one row; None where that is its share of nbytes. More where rows lie interleaved."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix ``[out_features, in_features]`` as a backend keeps it: one segment per run of equal format.

    Stacked projections (q, k, v; gate, up) are one Weight whose rows are the parts one after the other.
    """

    name: str
    shape: tuple[int, int]
    segments: tuple[WeightSegment, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    @property
    def looked_up_row_bytes(self) -> int:
        """Bytes read to look up one row, of a weight of one segment."""
        (segment,) = self.segments
        return segment.looked_up_row_bytes or segment.nbytes // segment.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one decoder layer."""

    input_norm: Array  # [hidden] float32
    qkv_proj: Weight  # [(H + 2 KV) D, hidden]
    qkv_bias: Array | None  # [(H + 2 KV) D] float32 (Qwen2)
    q_norm: Array | None  # [D] float32 (Qwen3)
    k_norm: Array | None  # [D] float32 (Qwen3)
    o_proj: Weight  # [hidden, H D]
    post_attention_norm: Array  # [hidden] float32
    gate_up_proj: Weight  # [2 intermediate, hidden], gate rows first
    down_proj: Weight  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention needs to know of the model, the same in every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    sliding_window: int | None
    """A token sees itself and the window - 1 tokens before it; None sees all."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """cos and sin of every position's rotation, float32 ``[max_model_len, D / 2]`` (Su et al. 2021).

    Dimension i of a head pairs with i + D/2 ("rotate half", the Hugging Face order).
    """

    cos: Array
    sin: Array


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheLayer:
    """Keys and values of one layer: ``[B, KV, block_size, D]`` each."""

    k: Array
    v: Array


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The arrays of one step: S sequences, each with a run of new tokens, laid end to end as T rows."""

    token_ids: Array  # [T] int32
    positions: Array  # [T] int32
    slot_mapping: Array  # [T] int32: block * block_size + offset, where the token's k and v go
    cu_seqlens_q: Array  # [S + 1] int32: sequence s owns rows cu_seqlens_q[s] … cu_seqlens_q[s + 1]
    context_lens: Array  # [S] int32: tokens the sequence has in the cache after this step, new ones included
    block_tables: Array  # [S, max_blocks] int32: the sequence's KV blocks in order, padded with 0
    logit_rows: Array  # [L] int32: rows whose logits are wanted, ascending
    num_tokens: int
    num_seqs: int
    num_logits: int
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Sampling parameters of the L rows of logits, as arrays. Ragged lists are (offsets [L + 1], values)."""

    temperature: Array  # [L] float32, 0 is greedy
    top_k: Array  # [L] int32, 0 keeps all
    top_p: Array  # [L] float32
    min_p: Array  # [L] float32
    repetition_penalty: Array  # [L] float32
    presence_penalty: Array  # [L] float32
    frequency_penalty: Array  # [L] float32
    seed: Array  # [L] uint64
    output_index: Array  # [L] uint32: how many tokens the sequence has put out before this one; the random counter
    history_offsets: Array  # [L + 1] int32 into history; empty for a row whose three penalties are all neutral
    history: Array  # [*] int32: prompt then output token ids of the row
    history_prompt_lens: Array  # [L] int32: how many of the row's history are prompt
    bias_offsets: Array  # [L + 1] int32
    bias_token_ids: Array  # [*] int32
    bias_values: Array  # [*] float32
    num_logits: int
    num_top_logprobs: int
    """n most likely tokens wanted for every row (the most any row asks for); -1 when no row wants log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What the sampler chose, on the host."""

    token_ids: np.ndarray  # [L] int32
    logprobs: np.ndarray | None  # [L] float32: of the chosen tokens, log-softmax of the logits as the model gave them
    top_token_ids: np.ndarray | None  # [L, n] int32, most likely first, ties by lower id
    top_logprobs: np.ndarray | None  # [L, n] float32


class Backend(ABC):
    """Memory, the textbook ops, and the phases composed of them. Ops may run asynchronously; ``sample`` waits."""

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

    def peak_gflops(self, format: StorageFormat) -> tuple[float, str] | None:
        """(GFLOP/s of multiplying matrices of a format without waiting for memory, with which instruction), measured
        here with the backend's threads; None where that is not measured."""
        return None

    # ---- textbook ops ----------------------------------------------------------------------------------------------

    @abstractmethod
    def embedding(self, out: Array, token_ids: Array, table: Weight) -> None:
        """out [T, hidden] = table[token_ids [T]]."""

    @abstractmethod
    def rms_norm(self, out: Array, x: Array, weight: Array, eps: float) -> None:
        """out [R, N] = x / sqrt(mean(x²) + eps) * weight [N], row by row (Zhang & Sennrich 2019). out may be x."""

    @abstractmethod
    def linear(self, out: Array, x: Array, weight: Weight, bias: Array | None = None) -> None:
        """out [R, out_features] = x [R, in_features] @ weight.T (+ bias)."""

    @abstractmethod
    def linear_add(self, residual: Array, x: Array, weight: Weight) -> None:
        """residual [R, out_features] += x @ weight.T."""

    @abstractmethod
    def rope(self, qkv: Array, positions: Array, table: RopeTable, shape: AttentionShape) -> None:
        """Rotate the q and k heads of qkv [T, (H + 2 KV) D] in place to their positions."""

    @abstractmethod
    def head_norm(self, qkv: Array, q_norm: Array, k_norm: Array, shape: AttentionShape) -> None:
        """RMSNorm of every q head and k head of qkv by itself, in place (Qwen3)."""

    @abstractmethod
    def store_kv(self, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: AttentionShape) -> None:
        """Write the k and v heads of qkv [T, (H + 2 KV) D] to their slots."""

    @abstractmethod
    def attention(self, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: AttentionShape) -> None:
        """out [T, H D] = softmax(q k^T scale) v over each sequence's cached context, causal, windowed (GQA)."""

    @abstractmethod
    def silu_and_mul(self, out: Array, gate_up: Array) -> None:
        """out [T, I] = silu(gate) * up, of gate_up [T, 2 I] (Shazeer 2020)."""

    @abstractmethod
    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        """out [L, N] = x[rows [L]]."""

    @abstractmethod
    def sample(self, logits: Array, sampling: SamplingBatch) -> Sampled:
        """Choose a token for every row of logits [L, vocab]; the logits are consumed.

        Top-k keeps every token whose logit is at least the k-th largest; top-p, among those, every token at least as
        likely as the last one needed to reach p; min-p, among those, every token at least min_p times as likely as the
        most likely one. So no rule depends on the order of ties. The draw is the exponential race
        (argmax of p_i / -log u_i, ties to the lower id), with u_i from Philox-4x32-10 (Salmon et al. 2011) keyed by
        the row's seed and counted by (token id // 4, output_index, 0, 0), lane token id % 4, as
        (bits + 0.5) * 2^-32: it depends on nothing else in the batch and needs no order of summation.
        """

    # ---- phases: what decoder.forward calls ------------------------------------------------------------------------

    def norm_qkv_rope_store(
        self,
        qkv: Array,
        normed: Array,
        residual: Array,
        layer: LayerWeights,
        cache: KVCacheLayer,
        batch: Batch,
        table: RopeTable,
        shape: AttentionShape,
    ) -> None:
        """RMSNorm → q, k, v projections → (head norm) → RoPE → k and v into the cache."""
        self.rms_norm(normed, residual, layer.input_norm, shape.rms_norm_eps)
        self.linear(qkv, normed, layer.qkv_proj, layer.qkv_bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            self.head_norm(qkv, layer.q_norm, layer.k_norm, shape)
        self.rope(qkv, batch.positions, table, shape)
        self.store_kv(cache, qkv, batch.slot_mapping, shape)

    def norm_gate_up_silu(
        self, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, layer: LayerWeights, eps: float
    ) -> None:
        """RMSNorm → gate and up projections → SwiGLU. ``gate_up`` and ``normed`` are scratch."""
        self.rms_norm(normed, residual, layer.post_attention_norm, eps)
        self.linear(gate_up, normed, layer.gate_up_proj)
        self.silu_and_mul(mlp_out, gate_up)

    def norm_lm_head(
        self, logits: Array, last: Array, residual: Array, rows: Array, final_norm: Array, lm_head: Weight, eps: float
    ) -> None:
        """The rows that want logits → RMSNorm → LM head. ``last`` [L, hidden] is scratch."""
        self.gather_rows(last, residual, rows)
        self.rms_norm(last, last, final_norm, eps)
        self.linear(logits, last, lm_head)
