from __future__ import annotations

import pytest

from numba_engine.backends.ptx import PtxDevice


@pytest.fixture(scope="session")
def device() -> PtxDevice:
    return PtxDevice(memory_bytes=1 << 28)


@pytest.fixture
def counting_device() -> PtxDevice:
    return PtxDevice(memory_bytes=1 << 26, counting=True)
