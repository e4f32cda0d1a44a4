"""Profiles of an engine, from above it, and the planner. What is listed here is public."""

from __future__ import annotations

from numba_engine.profiling.profile_run import (
    ProfiledStep,
    ProfileEnd,
    ProfileEvent,
    ProfileRun,
    ProfileStarted,
    ProfileWaiting,
    ProfileWork,
)
from numba_engine.profiling.session import ProfileSession
from numba_engine.profiling.synthetic import random_requests

__all__ = [
    "ProfileEnd",
    "ProfileEvent",
    "ProfileRun",
    "ProfileSession",
    "ProfileStarted",
    "ProfileWaiting",
    "ProfileWork",
    "ProfiledStep",
    "random_requests",
]
