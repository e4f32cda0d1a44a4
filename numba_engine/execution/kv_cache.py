"""The paged KV cache: how many blocks there are, and the arrays that hold them."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.backends.arrays import KVCacheLayer
from numba_engine.backends.base import Backend
from numba_engine.config import EngineConfig
from numba_engine.errors import ConfigError, OutOfMemoryError
from numba_engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """The cache of an engine, and the longest context it serves."""

    num_blocks: int
    max_model_len: int
    bytes_per_token: int


def kv_cache_size(model: ModelConfig, config: EngineConfig, backend: Backend) -> KVCacheSize:
    """Blocks the configuration asks for or memory allows.

    A context longer than the whole cache could never finish, so ``max_model_len`` shrinks to fit, unless it was asked
    for.

    Raises:
        ConfigError: if the context asked for is longer than the model's.
        OutOfMemoryError: if it, or a minimum of two blocks, does not fit.
    """
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(f"max_model_len must be ≤ {model.max_position} for this model, got {config.max_model_len}")
    max_model_len = config.max_model_len or model.max_position
    bytes_per_token = model.kv_values_per_token * backend.kv_cache_dtype.itemsize
    block_bytes = bytes_per_token * config.block_size
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        full_contexts = config.max_num_seqs * -(-max_model_len // config.block_size)
        budget_bytes = config.kv_cache_bytes or int(backend.free_memory_bytes() * backend.kv_cache_share)
        num_blocks = min(budget_bytes // block_bytes, full_contexts)
    capacity = num_blocks * config.block_size
    if capacity < (config.max_model_len or min(max_model_len, 2 * config.block_size)):
        raise OutOfMemoryError(
            f"the KV cache has room for {capacity} tokens ({num_blocks} blocks of {block_bytes} bytes), but a context"
            f" of {max_model_len} tokens is wanted; {backend.free_memory_bytes()} bytes of memory are free."
            " Lower max_model_len, or raise kv_cache_bytes or num_kv_blocks."
        )
    return KVCacheSize(num_blocks, min(max_model_len, capacity), bytes_per_token)


def allocate_kv_cache(
    model: ModelConfig, config: EngineConfig, num_blocks: int, backend: Backend
) -> tuple[KVCacheLayer, ...]:
    """One pair of arrays per layer. Blocks are written before they are read, so nothing is cleared.

    Raises:
        OutOfMemoryError: the memory that seemed to be free is not to be had.
    """
    shapes = (
        (num_blocks, layer.attention.num_kv_heads, config.block_size, layer.attention.head_dim)
        for layer in model.layers
    )
    try:
        return tuple(KVCacheLayer(*(backend.empty(shape, backend.kv_cache_dtype) for _ in "kv")) for shape in shapes)
    except MemoryError as error:
        nbytes = num_blocks * config.block_size * model.kv_values_per_token * backend.kv_cache_dtype.itemsize
        raise OutOfMemoryError(
            f"the KV cache of {nbytes} bytes cannot be allocated ({error}). Lower --kv-cache-bytes (kv_cache_bytes),"
            " --num-kv-blocks or --max-model-len."
        ) from None
