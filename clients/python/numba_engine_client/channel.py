"""How both clients reach the server, and when they take it for ready."""

from __future__ import annotations

from typing import Any

import grpc

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client.errors import ServerError

_LARGEST_MESSAGE_BYTES = 64 * 2**20  # token ids of a long text pass gRPC's default of 4 MiB

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", _LARGEST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _LARGEST_MESSAGE_BYTES),
    # A server that has just come up is found at once, not after gRPC's growing pauses of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

SERVICE = "numba_engine_api.v1.InferenceService"
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
POLL_S = 0.2
"""Pause between two looks at a server that is not ready."""
LOOK_S = 5.0
"""How long such a look may take."""


def why_not_ready(status: pb.GetStatusResponse) -> str | None:
    """None for a server that takes requests. Raises ServerError for one whose engine has failed."""
    if status.state == pb.SERVER_STATE_READY:
        return None
    if status.state == pb.SERVER_STATE_FAILED:
        raise ServerError(grpc.StatusCode.UNAVAILABLE, f"the server's engine has failed: {status.detail}")
    what = pb.ServerState.Name(status.state).removeprefix("SERVER_STATE_").lower()
    if status.load_total_bytes:
        what += f", {status.load_done_bytes / 1e6:,.0f} of {status.load_total_bytes / 1e6:,.0f} MB read"
    return f"{what}: {status.detail}" if status.detail else what
