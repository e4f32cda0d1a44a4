"""What MODEL may be, and what is said about anything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from numba_engine.checkpoint import open_checkpoint
from numba_engine.errors import CheckpointError
from tests.tiny_models import TinyModel, write_gguf, write_hf


def test_a_directory(tmp_path: Path) -> None:
    write_hf(tmp_path / "my-model", TinyModel(), generation_config={"temperature": 0.5})
    with open_checkpoint(str(tmp_path / "my-model")) as checkpoint:
        assert (checkpoint.kind, checkpoint.path, checkpoint.name) == ("hf", tmp_path / "my-model", "my-model")
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.generation_config == {"temperature": 0.5}
        assert len(checkpoint.tensors) == 21


def test_a_snapshot_in_the_hugging_face_cache_is_named_by_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B--x" / "snapshots" / "c1899de289a04d12100db370d81485cdf75e47ca"
    with open_checkpoint(str(write_hf(snapshot, TinyModel("qwen3")))) as checkpoint:
        assert checkpoint.name == "Qwen/Qwen3-0.6B--x"


def test_a_directory_without_generation_config(tmp_path: Path) -> None:
    write_hf(tmp_path, TinyModel())
    (tmp_path / "generation_config.json").unlink()
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.generation_config == {}


@pytest.mark.parametrize("name", ["tiny.gguf", "sha256-0123"])
def test_a_gguf_file_whatever_its_name(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", TinyModel()).rename(tmp_path / name)
    with open_checkpoint(str(tmp_path / name)) as checkpoint:
        assert (checkpoint.kind, checkpoint.path) == ("gguf", tmp_path / name)
        assert checkpoint.name == Path(name).stem
        assert checkpoint.config["general.architecture"] == "llama"


def test_demo_is_the_demo_model(demo_path: Path) -> None:
    with open_checkpoint("demo") as checkpoint:
        assert checkpoint.path == demo_path
        assert len(checkpoint.tensors) == 272


def test_tensors_are_gone_after_close(tmp_path: Path) -> None:
    with open_checkpoint(str(write_hf(tmp_path, TinyModel()))) as checkpoint:
        assert checkpoint.tensors
    assert not checkpoint.tensors
    shutil.rmtree(tmp_path)


def test_views_outlive_close(tmp_path: Path) -> None:
    with open_checkpoint(str(write_hf(tmp_path, TinyModel()))) as checkpoint:
        data = checkpoint.tensors["model.norm.weight"].data
        before = data.copy()
    assert (data == before).all()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nothing/there", "no such file or directory; a model is a Hugging Face directory"),
        ("HuggingFaceTB/SmolLM2-135M", "nothing is downloaded from a model hub"),
        ("", "no such file or directory"),
        ("a\0b", "no such file or directory"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_no_model_there(model: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(model)


@pytest.mark.parametrize(
    ("files", "model", "says"),
    [
        (["README.md"], ".", "has no config.json; a model is"),
        (["a.gguf", "b.gguf"], ".", "is a directory of GGUF files; give one of them, such as .*a.gguf"),
        (["model.safetensors"], "model.safetensors", "give the directory"),
        (["config.json"], "config.json", "give the directory"),
        (["pytorch_model.bin"], "pytorch_model.bin", "loading a pickle can run any code"),
        (["weights.pt"], "weights.pt", "loading a pickle can run any code"),
        (["notes.txt"], "notes.txt", "is not a GGUF file; a model is"),
        (["model.gguf"], "model.gguf", "ends inside the header|is not a GGUF file"),
    ],
)
def test_something_else_there(tmp_path: Path, files: list[str], model: str, says: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(str(tmp_path / model))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "has no weights: it needs model.safetensors"),
        (["pytorch_model.bin"], "pickled PyTorch weights are not read"),
        (["consolidated.safetensors"], "found consolidated.safetensors$"),
    ],
)
def test_a_directory_without_weights(tmp_path: Path, files: list[str], says: str) -> None:
    for name in [*files, "config.json"]:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(str(tmp_path))


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match=r"empty\.gguf: is empty"):
        open_checkpoint(str(tmp_path / "empty.gguf"))


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["pipe", "pipe.gguf"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is not a"):
        open_checkpoint(str(tmp_path / name))


@pytest.mark.timeout(10)
def test_a_directory_whose_files_are_pipes(tmp_path: Path) -> None:
    write_hf(tmp_path, TinyModel())
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_checkpoint(str(tmp_path))
