"""llama.cpp through its C API, without the Python binding's sampling and bookkeeping: seen at its best."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np


class LlamaCppModel:
    """A model and a context of llama.cpp on the CPU with its defaults (f16 KV, flash attention auto, repacking)."""

    def __init__(
        self, file: Path, *, num_threads: int, context_len: int, max_seqs: int = 1, all_logits: bool = False
    ) -> None:
        llama_cpp.llama_log_set(_ignore_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context_len * max_seqs
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = max_seqs
        params.n_threads = params.n_threads_batch = num_threads
        if all_logits:
            params.n_outputs_max = params.n_outputs_max_per_seq = BATCH_TOKENS
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {context_len} tokens for {max_seqs} sequences")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One forward of (token id, position, sequence, wants logits), at most 512; returns when it is done."""
        for i, (token_id, position, sequence, wants_logits) in enumerate(rows):
            self._batch.token[i] = token_id
            self._batch.pos[i] = position
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = sequence
            self._batch.logits[i] = wants_logits
        self._batch.n_tokens = len(rows)
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(self._context)

    def prefill(self, token_ids: Sequence[int], *, sequence: int = 0) -> None:
        """A prompt from position 0 in chunks of 512, with the last token's logits."""
        for first in range(0, len(token_ids), BATCH_TOKENS):
            chunk = token_ids[first : first + BATCH_TOKENS]
            last = len(token_ids) - 1 - first
            self.decode([(token, first + i, sequence, i == last) for i, token in enumerate(chunk)])

    def forget(self, *, from_position: int = 0) -> None:
        """Drop every sequence's cache from that position on."""
        if from_position:
            llama_cpp.llama_memory_seq_rm(self._memory, -1, from_position, -1)
        else:
            llama_cpp.llama_memory_clear(self._memory, True)

    def logits(self, row: int) -> np.ndarray:
        """Logits of that row of the last forward, float32 ``[vocab]``."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).copy()


BATCH_TOKENS = 512


@llama_cpp.llama_log_callback
def _ignore_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None: ...
