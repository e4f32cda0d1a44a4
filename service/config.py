"""ServiceConfig: the server's own settings, and the command-line options and environment variables they come from.

The engine's settings are ``EngineConfig``; its options are shared with the other commands.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import click

from service.errors import StartupError

ProfileSwitch = Literal["on", "off"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of one server; validates itself.

    Raises:
        StartupError: naming the setting, what was given and what is allowed.
    """

    host: str = "127.0.0.1"
    """Address to bind: a name, an IPv4 or an IPv6 address."""
    port: int = 50051
    """TCP port; 0 takes a free one, which the log names."""
    tls_cert: str | None = None
    """PEM file of the server's certificate chain; with tls_key it turns TLS on."""
    tls_key: str | None = None
    """PEM file of the certificate's private key."""
    reflection: bool = True
    """Serve gRPC reflection, so that grpcurl and the like need no .proto file."""
    max_in_flight: int = 1024
    """Calls the server holds at once: being tokenised, waiting, running, or being read; one more is refused."""
    max_message_bytes: int = 4 * 2**20
    """Largest request taken; larger ones get RESOURCE_EXHAUSTED."""
    max_text_bytes: int = 2**20
    """Longest text (or conversation) that is tokenised, and four times the ids that are detokenised, in one call."""
    max_pending_bytes: int = 2**20
    """Output of one request that may wait for a slow client; one byte more ends the request."""
    profile: ProfileSwitch = "on"
    """Whether clients may use Profile, which slows down everybody's requests while it measures."""
    max_profile_s: float = 60.0
    """A profile that takes longer ends with what it has; so one that waits for traffic does not keep out all others."""
    stalled_client_s: float = 60.0
    """A client that leaves a message unread for this long, its flow-control window full, loses its call."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, running requests may go on for this long; then they end with finish reason ABORTED."""
    stuck_after_s: float = 120.0
    """The engine counts as stuck, and health says NOT_SERVING, when one step takes longer than this."""
    exit_on_engine_failure: bool = True
    """End the process, with exit code 1, when the engine dies, so that a supervisor starts a new one."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise StartupError(f"{name} must be {allowed}, got {getattr(self, name)!r}")

        require(bool(self.host) and not any(c.isspace() or c == "/" for c in self.host), "host", "a name or an address")
        require(0 <= self.port <= 65535, "port", "0 (any free one) to 65535")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise StartupError("tls_cert and tls_key go together: give both or neither")
        require(1 <= self.max_in_flight <= 2**20, "max_in_flight", "1 to 1048576")
        require(2**10 <= self.max_message_bytes <= 2**30, "max_message_bytes", "1 KiB to 1 GiB")
        require(2**10 <= self.max_text_bytes <= 2**30, "max_text_bytes", "1 KiB to 1 GiB")
        # Clients refuse messages above 4 MiB unless told otherwise, and pending output becomes one message.
        require(2**10 <= self.max_pending_bytes <= 3 * 2**20, "max_pending_bytes", "1 KiB to 3 MiB")
        require(self.profile in get_args(ProfileSwitch), "profile", f"one of {', '.join(get_args(ProfileSwitch))}")
        require(0 < self.max_profile_s <= 86400, "max_profile_s", "seconds above 0, at most a day")
        require(0 < self.stalled_client_s <= 86400, "stalled_client_s", "seconds above 0, at most a day")
        require(0 <= self.drain_timeout_s <= 86400, "drain_timeout_s", "seconds, at most a day")
        require(0 < self.stuck_after_s <= 86400, "stuck_after_s", "seconds above 0, at most a day")
        require(self.log_level in get_args(LogLevel), "log_level", f"one of {', '.join(get_args(LogLevel))}")
        require(self.log_format in get_args(LogFormat), "log_format", f"one of {', '.join(get_args(LogFormat))}")

    @property
    def address(self) -> str:
        """``host:port`` as gRPC takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


_Command = TypeVar("_Command", bound=Callable[..., Any])

_DEFAULT = ServiceConfig()

_SERVICE_OPTIONS = (
    click.option("--host", default=_DEFAULT.host, show_default=True, help="Address to bind."),
    click.option("--port", default=_DEFAULT.port, show_default=True, help="TCP port; 0 takes a free one."),
    click.option("--tls-cert", metavar="FILE", help="Certificate chain (PEM); turns TLS on, with --tls-key."),
    click.option("--tls-key", metavar="FILE", help="Private key (PEM) of the certificate."),
    click.option("--reflection/--no-reflection", default=_DEFAULT.reflection, show_default=True, help="For grpcurl."),
    click.option(
        "--max-in-flight",
        default=_DEFAULT.max_in_flight,
        show_default=True,
        metavar="N",
        help="Calls the server holds at once, whatever their state.",
    ),
    click.option(
        "--max-message-bytes",
        default=_DEFAULT.max_message_bytes,
        show_default=True,
        metavar="N",
        help="Largest request taken.",
    ),
    click.option(
        "--max-text-bytes",
        default=_DEFAULT.max_text_bytes,
        show_default=True,
        metavar="N",
        help="Longest text that one call may have tokenised.",
    ),
    click.option(
        "--max-pending-bytes",
        default=_DEFAULT.max_pending_bytes,
        show_default=True,
        metavar="N",
        help="Output that may wait for a slow client before its request is ended.",
    ),
    click.option(
        "--profile",
        type=click.Choice(get_args(ProfileSwitch)),
        default=_DEFAULT.profile,
        show_default=True,
        help="Let clients profile the running engine, or refuse it.",
    ),
    click.option(
        "--max-profile",
        "max_profile_s",
        default=_DEFAULT.max_profile_s,
        show_default=True,
        metavar="SECONDS",
        help="A profile that takes longer ends with what it has.",
    ),
    click.option(
        "--stalled-client",
        "stalled_client_s",
        default=_DEFAULT.stalled_client_s,
        show_default=True,
        metavar="SECONDS",
        help="How long a client may leave a message unread before it loses its call.",
    ),
    click.option(
        "--drain-timeout",
        "drain_timeout_s",
        default=_DEFAULT.drain_timeout_s,
        show_default=True,
        metavar="SECONDS",
        help="How long running requests may go on after SIGTERM.",
    ),
    click.option(
        "--stuck-after",
        "stuck_after_s",
        default=_DEFAULT.stuck_after_s,
        show_default=True,
        metavar="SECONDS",
        help="A step longer than this makes health say NOT_SERVING.",
    ),
    click.option(
        "--exit-on-engine-failure/--stay-on-engine-failure",
        default=_DEFAULT.exit_on_engine_failure,
        show_default=True,
        help="End the process when the engine dies, or stay and report it.",
    ),
    click.option("--log-level", type=click.Choice(get_args(LogLevel)), default=_DEFAULT.log_level, show_default=True),
    click.option(
        "--log-format", type=click.Choice(get_args(LogFormat)), default=_DEFAULT.log_format, show_default=True
    ),
)


def service_options(command: _Command) -> _Command:
    """Add the options of ``ServiceConfig``, each named as its field."""
    for option in reversed(_SERVICE_OPTIONS):
        command = option(command)
    return command


def service_config(options: Mapping[str, Any]) -> ServiceConfig:
    """The config that the options describe. Raises StartupError."""
    return ServiceConfig(**{field.name: options[field.name] for field in dataclasses.fields(ServiceConfig)})
