"""``numba-engine-client COMMAND``: the service at a terminal."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message as ProtobufMessage

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client import estimate_tables, profile_tables, tables
from numba_engine_client.chat import run_chat
from numba_engine_client.client import Client
from numba_engine_client.errors import FailedPreconditionError, InferenceError, InvalidRequestError
from numba_engine_client.interrupts import first_interrupt
from numba_engine_client.requests import Message, Planning, Sampling
from numba_engine_client.results import Generation
from numba_engine_client.retry import NO_RETRY, Retry

DEFAULT_TARGET = "127.0.0.1:50051"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script: 0 when all went well, 2 for a wrong request, 1 for any other failure, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    command: Callable[[Client, argparse.Namespace], int] = options.command
    if sys.stdout is None and command not in (_abort, _health, _wait):  # those tell enough by their exit code
        _complain("stdout is closed, and the result would be written there")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # of tables, what the locale lacks; texts and JSON are UTF-8
    try:
        _require_text(options)
        with _client(options) as client:
            return command(client, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has gone; the interpreter's own flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except InferenceError as error:
        _complain(str(error))
        for violation in error.violations:
            if violation.description not in error.message:
                _complain(f"  {violation.field}: {violation.description}")
        if error.request_id:
            _complain(f"  request id: {error.request_id}")
        if error.retry_delay_s is not None:
            _complain(f"  the server asks to try again in {error.retry_delay_s:g} s")
        return 2 if isinstance(error, InvalidRequestError | FailedPreconditionError) else 1
    except TimeoutError as error:
        _complain(str(error))
        return 1
    except (OSError, ValueError, TypeError) as error:
        _complain(str(error))
        return 2


def _complain(message: str) -> None:
    print(message if message.startswith(" ") else f"error: {message}", file=sys.stderr)


# ---- commands ------------------------------------------------------------------------------------------------------


def _generate(client: Client, options: argparse.Namespace) -> int:
    stream = client.generate(
        **_inputs(options),
        request_id=options.request_id,
        include_prompt_token_ids=options.json,
        **_sampling(options),
    )
    try:
        with stream, first_interrupt(stream.close) as interrupt:
            for delta in stream:
                if not options.json:
                    _write(delta.text)
        if interrupt.is_set():
            raise KeyboardInterrupt
    except (KeyboardInterrupt, InferenceError):
        _end_line(options)
        raise
    if options.json:
        _print_json(_generation_to_json(stream.result))
        return 0
    _end_line(options)
    if not options.quiet:
        print(tables.summary_line(stream.result), file=sys.stderr)
    return 0


def _chat(client: Client, options: argparse.Namespace) -> int:
    return run_chat(client, system=options.system, message=options.message, sampling=_sampling(options), write=_write)


def _profile(client: Client, options: argparse.Namespace) -> int:
    request_id = options.request_id or f"profile-{uuid.uuid4().hex}"
    # Watching has no end of its own that could be waited for: Ctrl-C is one, and has a summary.
    is_watch = options.live is not None
    messages: list[pb.StepProfile] = []
    with (
        client.profile(
            **_profiled(options),
            num_tokens=options.num_tokens,
            fusion=options.fusion,
            detail=options.detail,
            warm_up_steps=options.warm_up,
            unprofiled_every=options.unprofiled_every,
            request_id=request_id,
            on_wait=lambda: print("waiting for requests to profile …", file=sys.stderr),
            timeout=None,
        ) as stream,
        first_interrupt((lambda: client.abort(request_id)) if is_watch else stream.close) as interrupt,
    ):
        for step in stream:
            messages.append(step)
            if not (options.json or options.quiet):
                print(profile_tables.step_line(step, is_first=len(messages) == 1), flush=True)
    if interrupt.is_set() and not is_watch:
        raise KeyboardInterrupt
    assert stream.device is not None
    assert stream.model is not None
    assert stream.summary is not None
    if options.json:
        profile = {
            "device": _to_dict(stream.device),
            "model": _to_dict(stream.model),
            "steps": [_to_dict(step) for step in messages],
            "summary": _to_dict(stream.summary),
        }
        _print_json(profile)
        return 0
    if options.detail == "timeline" and messages and not options.quiet:
        print(profile_tables.timeline_table(messages[-1]))
    print(profile_tables.profile_table(stream.device, stream.model, stream.summary))
    return 0


def _profiled(options: argparse.Namespace) -> dict[str, Any]:
    has_prompt = any(value is not None for value in (options.prompt, options.prompt_file, options.chat))
    if sum((has_prompt, options.synthetic is not None, options.live is not None)) > 1:
        raise ValueError("give at most one of --prompt, --prompt-file, --chat, --synthetic and --live")
    if options.synthetic is not None:
        return {"synthetic": options.synthetic}
    if options.live is not None:
        return {"live_steps": options.live}
    return _inputs(options, default="The capital of France is")


def _estimate(client: Client, options: argparse.Namespace) -> int:
    planning: Any = {name: getattr(options, name) for name in Planning.__annotations__}
    if options.config is not None:
        planning["config_json"] = _decode(options.config, Path(options.config).read_bytes())
    estimates = client.estimate_throughput(options.gpus or (), **planning)
    if options.json:
        _print_json({"estimates": [_to_dict(one) for one in estimates]})
    else:
        print(estimate_tables.estimate_tables(estimates))
    return 0


def _status(client: Client, options: argparse.Namespace) -> int:
    return _print_message(client.status(), options)


def _model_info(client: Client, options: argparse.Namespace) -> int:
    return _print_message(client.model_info(), options)


def _tokenize(client: Client, options: argparse.Namespace) -> int:
    inputs = _inputs(options)
    ids = client.tokenize(inputs.get("prompt"), messages=inputs.get("messages"))
    if options.json:
        _print_json(ids)
    else:
        print(" ".join(str(token_id) for token_id in ids))
    return 0


def _detokenize(client: Client, options: argparse.Namespace) -> int:
    text = client.detokenize(options.token_ids)
    if options.json:
        _print_json(text)
    else:
        _write(text)
        _end_line(options)
    return 0


def _abort(client: Client, options: argparse.Namespace) -> int:
    return _print_message(client.abort(options.request_id), options)


def _health(client: Client, options: argparse.Namespace) -> int:
    status = client.health() if not options.liveness else client.health("liveness")
    print(status)
    return 0 if status == "SERVING" else 1


def _wait(client: Client, options: argparse.Namespace) -> int:
    last = ""

    def tell(waiting: str) -> None:
        nonlocal last
        if waiting != last and not options.quiet:
            print(waiting, file=sys.stderr)
        last = waiting

    client.wait_ready(options.for_s, on_wait=tell)
    return 0


# ---- input and output ----------------------------------------------------------------------------------------------


def _client(options: argparse.Namespace) -> Client:
    pairs = []
    for pair in options.metadata:
        key, found, value = pair.partition("=")
        if not found:
            raise ValueError(f"--metadata {pair}: write it as key=value")
        pairs.append((key.lower(), value))
    return Client(
        options.target,
        credentials=_credentials(options),
        metadata=pairs,
        timeout=options.timeout,
        retry=Retry(attempts=options.retries + 1) if options.retries else NO_RETRY,
        channel_options=[("grpc.ssl_target_name_override", options.authority)] if options.authority else [],
    )


def _credentials(options: argparse.Namespace) -> grpc.ChannelCredentials | None:
    if not (options.tls or options.ca_file or options.cert_file):
        return None
    if bool(options.cert_file) != bool(options.key_file):
        raise ValueError("--cert-file and --key-file go together")
    paths = (options.ca_file, options.key_file, options.cert_file)
    ca, key, cert = (path and Path(path).read_bytes() for path in paths)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _inputs(options: argparse.Namespace, default: str | None = None) -> dict[str, Any]:
    given = [value for value in (options.prompt, options.prompt_file, options.chat) if value is not None]
    if len(given) > 1 or (not given and default is None):
        raise ValueError("give exactly one of --prompt, --prompt-file and --chat")
    if options.system is not None and options.chat is None:
        raise ValueError("--system goes with --chat")
    if options.chat is not None:
        system: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
        return {"messages": [*system, {"role": "user", "content": _text(options.chat)}]}
    if options.prompt_file is not None:
        return {"prompt": _decode(options.prompt_file, Path(options.prompt_file).read_bytes())}
    return {"prompt": _text(options.prompt) if options.prompt is not None else default}


def _text(argument: str) -> str:
    """The argument, or stdin; nothing where that is closed."""
    if argument == "-":
        return "" if sys.stdin is None else _decode("stdin", sys.stdin.buffer.read())
    return argument


_PATHS = frozenset({"prompt_file", "config", "ca_file", "cert_file", "key_file"})


def _require_text(options: argparse.Namespace) -> None:
    """Raises ValueError for an argument that is sent and whose bytes are no UTF-8."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and name not in _PATHS:
                try:
                    text.encode()
                except UnicodeEncodeError as error:  # such bytes arrive as lone surrogates
                    option = name.replace("_", "-")
                    raise ValueError(f"--{option} is not UTF-8 at character {error.start}") from None


def _decode(source: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8: {error.reason} (0x{data[error.start]:02x}) at byte {error.start}"
        ) from error


def _sampling(options: argparse.Namespace) -> Sampling:
    sampling: Any = {name: getattr(options, name) for name in Sampling.__annotations__}
    return sampling


def _write(text: str) -> None:
    """UTF-8 whatever the locale, at once."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _print_json(value: Any) -> None:
    """A line of strict JSON."""
    _write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def _end_line(options: argparse.Namespace) -> None:
    """A shell's next prompt belongs on a line of its own; a pipe gets the text and nothing else."""
    if sys.stdout.isatty() and not options.json:
        _write("\n")


def _print_message(message: ProtobufMessage, options: argparse.Namespace) -> int:
    fields = _to_dict(message)
    if options.json:
        _print_json(fields)
    else:
        print(tables.fields_table(fields))
    return 0


def _to_dict(message: ProtobufMessage) -> dict[str, Any]:
    """Field names as in the .proto, every number a number or, where it is NaN or infinite, None, zeros included."""
    return _with_numbers(
        message,
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
    )


def _with_numbers(message: ProtobufMessage, fields: dict[str, Any]) -> dict[str, Any]:
    """JSON of protobuf writes as strings 64-bit integers, which are numbers here, and NaN and its like: None here."""
    for descriptor in message.DESCRIPTOR.fields:
        value = fields.get(descriptor.name)
        if value is None or (descriptor.message_type and descriptor.message_type.GetOptions().map_entry):
            continue
        if descriptor.message_type:
            inner = getattr(message, descriptor.name)
            many = isinstance(value, list)
            for each, each_fields in zip(inner, value, strict=True) if many else [(inner, value)]:
                _with_numbers(each, each_fields)
        elif descriptor.cpp_type in (descriptor.CPPTYPE_INT64, descriptor.CPPTYPE_UINT64):
            fields[descriptor.name] = [int(v) for v in value] if isinstance(value, list) else int(value)
        elif descriptor.cpp_type in (descriptor.CPPTYPE_FLOAT, descriptor.CPPTYPE_DOUBLE) and isinstance(value, str):
            fields[descriptor.name] = None
    return fields


def _generation_to_json(generation: Generation) -> dict[str, Any]:
    """The same object as ``numba-engine generate --json`` prints."""
    return {
        "request_id": generation.request_id,
        "prompt_token_ids": list(generation.prompt_token_ids),
        "token_ids": list(generation.token_ids),
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "stop_sequence": generation.stop_sequence,
        "stop_token_id": generation.stop_token_id,
        "logprobs": [
            {**_to_dict(position.chosen), "top": [_to_dict(token) for token in position.top]}
            for position in generation.logprobs
        ]
        or None,
        "usage": _to_dict(generation.usage),
        "timings": _to_dict(generation.timings),
    }


# ---- arguments -----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="numba-engine-client", description="Talk to a numba_engine server.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = _command(commands, "generate", _generate, "continue a prompt, or answer a chat message")
    _add_inputs(generate)
    _add_sampling(generate)
    generate.add_argument(
        "--request-id", default="", metavar="ID", help="a name for it, for abort and the server's log"
    )

    chat = _command(commands, "chat", _chat, "converse; the history is kept")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("-m", "--message", metavar="TEXT", help="say this, print the answer and end")
    _add_sampling(chat)

    profile = _command(commands, "profile", _profile, "where each token's time and bytes go")
    _add_inputs(profile)
    profile.add_argument(
        "--synthetic",
        action=_Synthetic,
        metavar="SEQSxTOKENS",
        help="instead of a prompt, so many sequences at once of so many random tokens each",
    )
    profile.add_argument(
        "--live",
        type=int,
        nargs="?",
        const=100,
        metavar="STEPS",
        help="instead of a prompt, so many steps (100) of what other requests ask for; Ctrl-C ends it with its summary",
    )
    profile.add_argument(
        "-n",
        "--num-tokens",
        type=int,
        metavar="N",
        help="tokens to generate; with --synthetic, steps together (default: 32)",
    )
    profile.add_argument("--fusion", action=argparse.BooleanOptionalAction, help="fused phases, or the textbook ops")
    profile.add_argument(
        "--detail", choices=("summary", "ops", "timeline"), help="no steps, steps, or every call too (default: ops)"
    )
    profile.add_argument("--warm-up", type=int, metavar="STEPS", help="run first and not reported (default: 0)")
    profile.add_argument(
        "--unprofiled-every",
        type=int,
        metavar="N",
        help="each N-th decode step is not looked at, to tell what looking costs",
    )
    profile.add_argument("--request-id", default="", metavar="ID")

    estimate = _command(commands, "estimate", _estimate, "how fast a model can at best run on a GPU, by formula")
    _add_planning(estimate)

    tokenize = _command(commands, "tokenize", _tokenize, "the token ids of a text or chat message")
    _add_inputs(tokenize)
    detokenize = _command(commands, "detokenize", _detokenize, "the text of token ids")
    detokenize.add_argument("token_ids", type=int, nargs="+", metavar="ID")

    _command(commands, "model-info", _model_info, "what is loaded, and on what it runs")
    _command(commands, "status", _status, "the state of server and engine now")
    abort = _command(commands, "abort", _abort, "end a request; its stream keeps what was generated")
    abort.add_argument("request_id", metavar="ID")
    health = _command(commands, "health", _health, "SERVING, or exit code 1")
    health.add_argument("--liveness", action="store_true", help="whether the process answers, ready or not")
    wait = _command(commands, "wait", _wait, "wait until the server takes requests")
    wait.add_argument("--for", dest="for_s", type=float, metavar="SECONDS", help="at most (default: for ever)")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[Client, argparse.Namespace], int], help_text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=help_text)
    command.set_defaults(command=run)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("-q", "--quiet", action="store_true", help="nothing but the result")
    connection = command.add_argument_group("connection")
    connection.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="default: %(default)s")
    connection.add_argument("--timeout", type=float, metavar="SECONDS", help="deadline of the call")
    connection.add_argument("--retries", type=int, default=0, metavar="N", help="try again when the server is full")
    connection.add_argument("--metadata", action="append", default=[], metavar="KEY=VALUE", help="sent with the call")
    connection.add_argument("--tls", action="store_true", help="TLS, with this system's certificate authorities")
    connection.add_argument("--ca-file", metavar="PEM", help="TLS, with these certificate authorities")
    connection.add_argument("--cert-file", metavar="PEM", help="this client's certificate")
    connection.add_argument("--key-file", metavar="PEM", help="its private key")
    connection.add_argument("--authority", metavar="NAME", help="name expected in the server's certificate")
    return command


def _add_inputs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads it from stdin")
    command.add_argument("--prompt-file", metavar="FILE", help="text to continue, byte for byte")
    command.add_argument("--chat", metavar="TEXT", help="a user's message; - reads it from stdin")
    command.add_argument("--system", metavar="TEXT", help="system message before --chat")


def _add_planning(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpu", dest="gpus", action="append", metavar="NAME", help="may be repeated; this-machine (default: all known)"
    )
    model = command.add_argument_group("model", "the server's own unless another is given")
    model.add_argument("--config", metavar="FILE", help="a config.json")
    model.add_argument("--params", dest="num_parameters", type=_count, metavar="N", help="so many parameters: 8e9, 8B")
    for name in ("num-layers", "hidden-size", "num-kv-heads", "head-dim"):
        model.add_argument(f"--{name}", type=int, metavar="N", help="with --params: all four, or none")
    model.set_defaults(config_json=None)
    workload = command.add_argument_group("workload")
    workload.add_argument(
        "--weights", dest="weight_format", metavar="FORMAT", help="fp16, fp8, q4_0, … (default: as stored)"
    )
    workload.add_argument("--kv", dest="kv_format", metavar="FORMAT", help="(default: fp16)")
    workload.add_argument("-b", "--batch", type=int, metavar="N", help="sequences at once (default: 1)")
    workload.add_argument("-c", "--context", type=int, metavar="N", help="tokens of each (default: 1024)")
    workload.add_argument("--tp", dest="tensor_parallel", type=int, metavar="N", help="GPUs that share every matrix")
    workload.add_argument("--speculative-acceptance", dest="acceptance", type=float, metavar="A", help="0 to 1")
    workload.add_argument("--draft-len", type=int, metavar="N", help="(default: 4)")
    workload.add_argument("--draft-cost", type=float, metavar="C", help="(default: 0.05)")
    workload.add_argument(
        "--target-speed",
        dest="target_tokens_per_s",
        type=float,
        metavar="TOK/S",
        help="what bandwidth this speed asks for",
    )


def _count(text: str) -> int:
    """``8e9``, ``8B``, ``135M``."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number = text[:-1] if text[-1:].upper() in units else text
    try:
        return round(float(number) * units.get(text[-1:].upper(), 1))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters such as 8e9, 8B or 135M") from None


def _add_sampling(command: argparse.ArgumentParser) -> None:
    sampling = command.add_argument_group("sampling", "what is not given is as the model's own defaults say")
    sampling.add_argument("-n", "--max-tokens", type=int, metavar="N")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--min-p", type=float, metavar="P")
    sampling.add_argument("--repetition-penalty", type=float, metavar="R")
    sampling.add_argument("--presence-penalty", type=float, metavar="A")
    sampling.add_argument("--frequency-penalty", type=float, metavar="A")
    sampling.add_argument("--logit-bias", action=_LogitBias, metavar="ID:BIAS", help="may be repeated")
    sampling.add_argument("--seed", type=int, metavar="S")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    sampling.add_argument("--stop-token-id", dest="stop_token_ids", action="append", type=int, metavar="ID")
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    sampling.add_argument("--logprobs", type=int, metavar="N", help="with --json")
    sampling.add_argument("--time-limit", dest="time_limit_s", type=float, metavar="SECONDS")


class _Version(argparse.Action):
    """The version of whichever distribution brought this client: its own, or the server's."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for distribution in ("numba-engine-client", "numba-engine"):
            try:
                parser.exit(message=f"{parser.prog} {metadata.version(distribution)}\n")
            except metadata.PackageNotFoundError:
                continue
        parser.error("not installed as a package, so it has no version")


class _Synthetic(argparse.Action):
    """``4x512``: four sequences of 512 tokens."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        num_seqs, _, prompt_len = values.lower().partition("x")
        if not (num_seqs.isdecimal() and prompt_len.isdecimal()):
            raise argparse.ArgumentError(self, f"{values!r} is no number of sequences and tokens such as 4x512")
        setattr(namespace, self.dest, {"num_seqs": int(num_seqs), "prompt_len": int(prompt_len)})


class _LogitBias(argparse.Action):
    """Gathers ``ID:BIAS`` into a mapping."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        token_id, _, bias = values.partition(":")
        try:
            entry = {int(token_id): float(bias)}
        except ValueError:
            raise argparse.ArgumentError(self, f"{values!r} is no token id and number such as 42:-1.5") from None
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **entry})
