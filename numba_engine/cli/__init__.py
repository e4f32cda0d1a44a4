"""The command line: ``numba-engine COMMAND``. One file a command; ``serve`` joins from the service package."""

from __future__ import annotations

from numba_engine.cli.bench import bench
from numba_engine.cli.explain import explain
from numba_engine.cli.fetch_demo import fetch_demo
from numba_engine.cli.generate import generate
from numba_engine.cli.group import cli
from numba_engine.cli.kernels import kernels
from numba_engine.cli.model_info import model_info
from numba_engine.cli.profile import profile
from numba_engine.cli.roofline import roofline

__all__ = ["cli"]

for _command in (generate, profile, explain, roofline, bench, kernels, model_info, fetch_demo):
    cli.add_command(_command)
