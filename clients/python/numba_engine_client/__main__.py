"""``python -m numba_engine_client`` is ``numba-engine-client``."""

from __future__ import annotations

import sys

from numba_engine_client.cli import main

sys.exit(main())
