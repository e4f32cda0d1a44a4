"""Model files: Hugging Face directories, GGUF files, and the demo model."""

from __future__ import annotations

from pathlib import Path

from numba_engine.checkpoint.checkpoint import Checkpoint, TensorHeader
from numba_engine.checkpoint.demo import Progress, fetch_demo
from numba_engine.checkpoint.gguf import is_gguf, open_gguf
from numba_engine.checkpoint.safetensors import open_huggingface
from numba_engine.errors import CheckpointError

__all__ = ["Checkpoint", "Progress", "TensorHeader", "open_checkpoint"]

_ACCEPTED = (
    "a model is a Hugging Face directory (config.json and model.safetensors), a .gguf file, or the word demo; "
    "nothing is downloaded from a model hub"
)


def open_checkpoint(model: str, progress: Progress | None = None) -> Checkpoint:
    """Open a model: a Hugging Face directory, a GGUF file, or ``demo`` (fetched if it is not there yet).

    Nothing but headers is read. Close it, or use it as a context manager, once the weights are loaded.
    ``progress`` follows the download of the demo model.

    Raises:
        CheckpointError: there is no model there, or its files are truncated or inconsistent.
        UnsupportedModelError: the files need a format that the engine does not have.
    """
    if model == "demo":
        return open_gguf(fetch_demo(progress))
    path = Path(model)
    try:
        if not model or not path.exists():
            raise CheckpointError(f"no such file or directory; {_ACCEPTED}", file=repr(model))
        if path.is_dir():
            if (path / "config.json").exists():
                return open_huggingface(path)
            raise CheckpointError(_why_no_config(path), file=model)
        if path.suffix == ".gguf" or is_gguf(path):
            return open_gguf(path)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=model) from None
    except ValueError as error:  # what Python makes of a name that no file can have
        raise CheckpointError(f"no such file or directory ({error}); {_ACCEPTED}", file=repr(model)) from None
    raise CheckpointError(_why_not_this_file(path), file=model)


def _why_no_config(directory: Path) -> str:
    ggufs = sorted(directory.glob("*.gguf"))
    if ggufs:
        return f"is a directory of GGUF files; give one of them, such as {ggufs[0]}"
    return f"has no config.json; {_ACCEPTED}"


def _why_not_this_file(path: Path) -> str:
    if path.suffix in (".safetensors", ".json"):
        return f"is one file of a Hugging Face directory; give the directory, {path.parent}"
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        return f"pickled PyTorch weights are not read, since loading a pickle can run any code; {_ACCEPTED}"
    return f"is not a GGUF file; {_ACCEPTED}"
