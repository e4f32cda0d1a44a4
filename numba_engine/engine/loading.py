"""Loading: from a checkpoint to what an engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.backends import create_backend
from numba_engine.backends.base import Backend
from numba_engine.checkpoint import Progress, TensorHeader, open_checkpoint
from numba_engine.config import EngineConfig
from numba_engine.errors import OutOfMemoryError
from numba_engine.execution.kv_cache import KVCacheSize, kv_cache_size
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder
from numba_engine.model.loading import load_weights
from numba_engine.model.read_config import default_sampling, read_config
from numba_engine.model.rope import build_rope_tables
from numba_engine.model.weights import ModelWeights
from numba_engine.outputs import ModelInfo
from numba_engine.sampling_params import SamplingParams
from numba_engine.text.tokenizer import Tokenizer, load_tokenizer

_USUAL_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults: drawing from a whole untruncated distribution derails small models."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in a backend's memory, and what is known of it."""

    info: ModelInfo
    config: ModelConfig
    stored: tuple[TensorHeader, ...]
    """The tensors of the checkpoint, as it stores them."""
    tokenizer: Tokenizer
    default_sampling: SamplingParams
    """As the model's makers recommend, else the usual mild truncation."""
    backend: Backend
    decoder: Decoder
    cache: KVCacheSize


def load_model(model: str, config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Load a Hugging Face directory, a ``.gguf`` file, or ``"demo"``.

    Raises:
        CheckpointError, UnsupportedModelError, BackendUnavailableError, OutOfMemoryError: saying what to do.
    """
    backend = create_backend(config)
    with open_checkpoint(model, progress) as checkpoint:
        model_config = read_config(checkpoint)
        tokenizer = load_tokenizer(checkpoint)
        params = SamplingParams(**(default_sampling(checkpoint) or _USUAL_SAMPLING))
        try:
            weights = load_weights(checkpoint, model_config, backend, progress)
        except MemoryError as error:
            raise OutOfMemoryError(
                f"the weights do not fit into memory, of which {backend.free_memory_bytes()} bytes are free ({error})."
                " Take a smaller model or storage format, or raise the process's limit."
            ) from None
        stored = checkpoint.headers
    cache = kv_cache_size(model_config, config, backend)
    rope_tables = build_rope_tables(model_config, cache.max_model_len, backend)
    return LoadedModel(
        info=_model_info(checkpoint.name, model_config, weights, backend, tokenizer, cache),
        config=model_config,
        stored=stored,
        tokenizer=tokenizer,
        default_sampling=params,
        backend=backend,
        decoder=Decoder(weights.with_rope(rope_tables)),
        cache=cache,
    )


def _model_info(
    name: str,
    model: ModelConfig,
    weights: ModelWeights,
    backend: Backend,
    tokenizer: Tokenizer,
    cache: KVCacheSize,
) -> ModelInfo:
    first = model.layers[0]
    return ModelInfo(
        name=name,
        architecture=model.architecture,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.nbytes,
        weight_formats=weights.format_names,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=first.intermediate_size,
        num_heads=first.attention.num_heads,
        num_kv_heads=first.attention.num_kv_heads,
        head_dim=first.attention.head_dim,
        vocab_size=model.vocab_size,
        max_model_len=cache.max_model_len,
        eos_token_ids=model.eos_token_ids,
        has_chat_template=tokenizer.chat_template is not None,
        backend=backend.name,
        device_name=backend.device_name,
        num_threads=backend.num_threads,
        activation_dtype=backend.quantized_matmul_dtype,
        kv_cache_dtype=backend.kv_cache_dtype.name,
        kv_bytes_per_token=cache.bytes_per_token,
    )
