"""Storage formats: how a tensor's numbers are stored, each format described once, as data."""

from numba_engine.formats.descriptor import Bits, Codes, Field, Format, Scales
from numba_engine.formats.ggml import BF16, F16, F32, FORMATS, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, label
from numba_engine.formats.tensor import StoredTensor, dequantize, is_finite, quantize

__all__ = [
    "BF16",
    "F16",
    "F32",
    "FORMATS",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q6_K",
    "Q8_0",
    "Bits",
    "Codes",
    "Field",
    "Format",
    "Scales",
    "StoredTensor",
    "dequantize",
    "is_finite",
    "label",
    "quantize",
]
