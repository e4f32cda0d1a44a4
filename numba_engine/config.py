"""EngineConfig: everything that shapes an engine, fixed at birth."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from numba_engine.errors import ConfigError
from numba_engine.plain_values import plain_number

BackendName = Literal["auto", "cpu", "cuda", "ptx"]
ActivationDtype = Literal["int8", "float32"]
KVCacheDtype = Literal["auto", "float32", "float16"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; validates itself.

    Raises:
        ConfigError: naming the setting, what was given and what is allowed.
    """

    backend: BackendName = "auto"
    """auto takes cuda where a usable GPU is, else cpu."""
    num_threads: int | None = None
    """CPU threads; None uses the cores this process may run on."""
    activation_dtype: ActivationDtype = "int8"
    """What quantised weights are multiplied with: two planes of int8 per 32 values, or float32 (for comparison).

    On ``cpu``, BF16 weights are multiplied with bf16 in the first case, which moves log-probabilities by some 0.02.
    On ``cuda`` and ``ptx`` quantised weights meet int8 in any case.
    """
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto: float32 with float32 activations, else float16."""
    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """KV blocks in all; None sizes the cache from kv_cache_bytes."""
    kv_cache_bytes: int | None = None
    """Memory for the KV cache; None takes what max_num_seqs full contexts need, ≤ 1/4 of free memory (GPU: 9/10)."""
    max_model_len: int | None = None
    """Longest context (prompt + output) in tokens; None takes the model's own."""
    max_num_seqs: int = 64
    """Sequences in one step at most."""
    max_num_batched_tokens: int = 512
    """Tokens in one step at most; longer prompts are prefilled in chunks of this."""
    max_waiting: int = 256
    """Requests that may wait for admission; one more is refused with QueueFullError."""
    prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike."""
    fusion: bool = True
    """Run each phase of a layer as one fused kernel where the backend has one; False runs the textbook ops one by one.

    The tokens are the same.
    """
    graph: bool = True
    """Capture decode steps and replay them whole; False runs them op by op.

    The tokens are the same. Steps with a prompt in them are never captured.
    """

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        for own in fields(self):
            value = plain_number(getattr(self, own.name))
            object.__setattr__(self, own.name, value)
            if own.type == "bool":
                require(isinstance(value, bool), own.name, "True or False")
            elif own.type in ("int", "int | None"):
                is_int = isinstance(value, int) and not isinstance(value, bool)
                require(is_int or (value is None and own.type != "int"), own.name, "an integer")
        require(self.backend in get_args(BackendName), "backend", f"one of {', '.join(get_args(BackendName))}")
        require(self.num_threads is None or 1 <= self.num_threads <= 1024, "num_threads", "1 to 1024")
        require(
            self.activation_dtype in get_args(ActivationDtype),
            "activation_dtype",
            f"one of {', '.join(get_args(ActivationDtype))}",
        )
        require(
            self.kv_cache_dtype in get_args(KVCacheDtype),
            "kv_cache_dtype",
            f"one of {', '.join(get_args(KVCacheDtype))}",
        )
        require(self.block_size in (8, 16, 32, 64, 128), "block_size", "8, 16, 32, 64 or 128")
        require(self.num_kv_blocks is None or 1 <= self.num_kv_blocks < 2**31, "num_kv_blocks", "≥ 1")
        require(self.kv_cache_bytes is None or self.kv_cache_bytes > 0, "kv_cache_bytes", "> 0")
        require(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "≥ 2")
        require(1 <= self.max_num_seqs <= 4096, "max_num_seqs", "1 to 4096")
        require(1 <= self.max_num_batched_tokens <= 2**16, "max_num_batched_tokens", "1 to 65536")
        require(self.max_waiting >= 0, "max_waiting", "≥ 0")
