"""Write the logits transformers gives (float32, eager attention, CPU) for the tiny models. Needs the ``perf`` extra.

python -m tests.models.make_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.cases import CASES, GOLDEN_FILE, POSITIONS, PROMPT
from tests.tiny_models import TinyModel, write_hf


def main() -> None:
    np.savez_compressed(GOLDEN_FILE, **{name: reference_logits(model) for name, model in CASES.items()})


@torch.inference_mode()
def reference_logits(model: TinyModel) -> np.ndarray:
    """float32 ``[positions, vocab]``."""
    with tempfile.TemporaryDirectory() as directory:
        write_hf(Path(directory), model)
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        logits: np.ndarray = reference(torch.tensor([PROMPT]), use_cache=False).logits[0, list(POSITIONS)].numpy()
    return logits


if __name__ == "__main__":
    main()
