"""How a checkpoint becomes the weights of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.base import Backend
from numba_engine.checkpoint import Checkpoint, Progress
from numba_engine.errors import CheckpointError
from numba_engine.formats import StoredTensor, dequantize, is_finite
from numba_engine.model.config import ModelConfig
from numba_engine.model.tensors import StoredPart, Tensor, tensors_of
from numba_engine.model.weights import ModelWeights, build_weights


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, backend: Backend, progress: Progress | None = None
) -> ModelWeights:
    """Check every tensor of a checkpoint and hand it to the backend, giving the file's memory back as it goes.

    Matrices stay in the format the file stores them in.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the config asks for, holds NaN or infinity, or is
            not part of the architecture although it would change the output.
    """
    loader = _Loader(checkpoint, config, backend, progress)
    loader.check_names_and_shapes()
    return build_weights(config, loader)


class _Loader:
    """Brings tensors from the checkpoint to the backend."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, backend: Backend, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._backend = backend
        self._progress = progress
        self._bytes_done = 0
        self._bytes_total = 0

    def check_names_and_shapes(self) -> None:
        """Before anything is loaded: the checkpoint has just the tensors of the architecture, in the right shapes."""
        known = set()
        for part in (part for tensor in tensors_of(self._config) for part in tensor.parts):
            stored = self._stored(part)
            if stored.shape != part.shape:
                raise self._error(f"has shape {stored.shape}, the config asks for {part.shape}", stored.name)
            self._bytes_total += stored.nbytes
            known.add(stored.name)
        for name in self._checkpoint.tensors:
            if name not in known and not self._is_harmless(name):
                raise self._error(
                    f"is not part of a {self._config.architecture} model of {self._config.num_layers} layers with this "
                    "config; without it the output would be wrong",
                    name,
                )

    def matrix(self, tensor: Tensor) -> Weight:
        stored = [self._checked(part) for part in tensor.parts]
        ordered = [
            replace(part_stored, data=self._in_rotate_half_order(part_stored.data, part))
            for part, part_stored in zip(tensor.parts, stored, strict=True)
        ]
        weight = self._backend.load_weight(tensor.full_name, ordered)
        self._done(tensor, stored)
        return weight

    def vector(self, tensor: Tensor) -> Array:
        stored = [self._checked(part) for part in tensor.parts]
        values = [
            self._in_rotate_half_order(dequantize(part_stored), part)
            for part, part_stored in zip(tensor.parts, stored, strict=True)
        ]
        array = self._backend.upload(np.concatenate(values))
        self._done(tensor, stored)
        return array

    def _checked(self, part: StoredPart) -> StoredTensor:
        stored = self._stored(part)
        if not is_finite(stored):
            where = "scale" if stored.format.is_quantized else "value"
            raise self._error(f"holds a {where} that is NaN or infinite ({stored.format.name})", stored.name)
        return stored

    def _in_rotate_half_order(self, rows: np.ndarray, part: StoredPart) -> np.ndarray:
        """Undo llama.cpp's row order of q and k, which its architecture ``llama`` rotates in neighbouring pairs.

        There, rows 2i and 2i + 1 of a head are rows i and i + D/2 of the Hugging Face order. Rows move whole, so they
        may be the stored bytes.
        """
        interleaved = self._checkpoint.kind == "gguf" and self._config.architecture == "llama"
        if not interleaved or not part.num_rotated_heads:
            return rows
        pairs = rows.reshape(part.num_rotated_heads, -1, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _done(self, tensor: Tensor, stored: Sequence[StoredTensor]) -> None:
        for part in stored:
            self._bytes_done += part.nbytes
            self._checkpoint.release(part)
        if self._progress is not None:
            self._progress(tensor.full_name, self._bytes_done, self._bytes_total)

    def _stored(self, part: StoredPart) -> StoredTensor:
        file_name = part.name(self._checkpoint.kind)
        stored = self._checkpoint.tensors.get(file_name)
        if stored is None:
            raise self._error("is missing", file_name)
        return stored

    def _is_harmless(self, file_name: str) -> bool:
        """Tensors that hold what the config says already, or that a tied model does not use."""
        if self._checkpoint.kind == "gguf":
            return file_name == "rope_freqs.weight"
        return file_name.endswith(".rotary_emb.inv_freq") or (
            file_name == "lm_head.weight" and self._config.tie_word_embeddings
        )

    def _error(self, message: str, tensor: str) -> CheckpointError:
        return CheckpointError(message, file=self._checkpoint.file_of(tensor), tensor=tensor)
