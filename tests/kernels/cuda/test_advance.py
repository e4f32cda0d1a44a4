"""advance: rows move on by a token; block boundaries are crossed; padding stays."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.compiler import compile_kernel
from numba_engine.backends.cuda.kernels.advance import advance_kernel
from numba_engine.kernel_lab.cards import ptx_counts
from tests.kernels.test_advance import SIZES, check_advance


@pytest.mark.parametrize(("num_rows", "block_size"), SIZES)
def test_rows_move_on_and_padding_stays(
    backend: CudaBackend, rng: np.random.Generator, num_rows: int, block_size: int
) -> None:
    check_advance(backend, rng, num_rows, block_size)


def test_it_is_integers_in_registers() -> None:
    assert ptx_counts(compile_kernel(advance_kernel(), (8, 0))) == {"f64": 0, "local": 0, "calls": 0}
