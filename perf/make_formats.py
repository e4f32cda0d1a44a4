"""The demo model in other storage formats, for comparisons: dequantised, stored anew, metadata copied.

    python -m perf.make_formats Q4_0 Q8_0 F16 BF16

As in llama.cpp's own conversions, norms stay F32 and the embedding of a 4-bit file is Q8_0. The values are those of the
Q4_1 file, so that a wider format is no more accurate; the files serve to measure speed and agreement.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import platformdirs

from numba_engine.checkpoint.demo import fetch_demo
from numba_engine.formats import FORMATS, Q4_0, Q4_1, Q8_0, Format, StoredTensor, dequantize, quantize

MADE = ("Q4_1", "Q4_0", "Q8_0", "F16", "BF16")
"""Q4_1 is the demo model itself."""

_FILE_TYPES = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
}


def model_file(label: str) -> Path:
    """The demo model's file in that format, in the user's cache; made if it is not there."""
    source = Path(fetch_demo())
    if label == "Q4_1":
        return source
    target = Path(platformdirs.user_cache_dir("numba-engine")) / "formats" / f"SmolLM2-135M-Instruct.{label}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".part")
        convert(source, unfinished, FORMATS[label])
        unfinished.replace(target)
    return target


def convert(source: Path, target: Path, format: Format) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(_FILE_TYPES[format.name])
    for tensor in reader.tensors:
        stored = _restored(tensor, format)
        data = stored.data if len(stored.shape) > 1 else stored.data[0]
        writer.add_tensor(stored.name, data, raw_dtype=gguf.GGMLQuantizationType[stored.format.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _restored(tensor: gguf.ReaderTensor, format: Format) -> StoredTensor:
    shape = tuple(int(extent) for extent in reversed(tensor.shape))
    rows = shape[0] if len(shape) > 1 else 1
    data = tensor.data.view("uint8").reshape(rows, -1)
    stored = StoredTensor(tensor.name, FORMATS[tensor.tensor_type.name], shape, data)
    if len(shape) == 1:
        return stored
    if tensor.name == "token_embd.weight" and format in (Q4_0, Q4_1):
        format = Q8_0
    return stored if stored.format is format else quantize(tensor.name, dequantize(stored), format)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="+", choices=MADE)
    for label in parser.parse_args().formats:
        path = model_file(label)
        print(f"{path} ({path.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
