"""Closed descriptors, terminals of other encodings, bytes that are no UTF-8, numbers that JSON has no word for."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from numba_engine.cli import console
from numba_engine.cli.group import cli
from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client import chat
from numba_engine_client import cli as client_cli

ENGINE = [sys.executable, "-m", "service"]
CLIENT = [sys.executable, "-m", "numba_engine_client"]


def run(command: Sequence[str | bytes], *, closed: Sequence[int] = (), **environment: str) -> tuple[int, str]:
    """Exit code and stderr."""

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    done = subprocess.run(
        command, preexec_fn=close, capture_output=True, env={**os.environ, **environment}
    )  # fmt: skip
    return done.returncode, done.stderr.decode(errors="replace")


@pytest.mark.parametrize("command", [ENGINE, CLIENT], ids=["engine", "client"])
@pytest.mark.parametrize("closed", [(1,), (0, 1), (0, 1, 2)], ids=str)
def test_closed_stdout(command: list[str], closed: tuple[int, ...]) -> None:
    model = ["no such model"] if command is ENGINE else []
    code, errors = run([*command, "generate", *model, "--prompt", "hi"], closed=closed)
    assert code == 2
    if 2 not in closed:
        (line,) = errors.strip().splitlines()[-1:]
        assert line.endswith("stdout is closed, and the result would be written there")
        assert "Traceback" not in errors
        assert "bug" not in errors


def test_health_needs_no_stdout() -> None:
    code, errors = run([*CLIENT, "health", "--target", "127.0.0.1:1"], closed=[1])
    assert code == 1
    assert "UNAVAILABLE" in errors


def test_a_file_never_takes_the_place_of_a_closed_descriptor() -> None:
    program = (
        "import os; from numba_engine.cli.console import prepare_streams; prepare_streams(needs_stdout=False);"
        "print(os.open('/dev/null', os.O_RDONLY) > 2, [os.readlink(f'/proc/self/fd/{i}') for i in (0, 1)],"
        "file=__import__('sys').stderr)"
    )
    code, errors = run([sys.executable, "-c", program], closed=[0, 1])
    assert (code, errors.strip()) == (0, "True ['/dev/null', '/dev/null']")


def test_closed_stdin_is_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert console.read_stdin() == b""
    assert client_cli._text("-") == ""
    assert chat.run_chat(None, system=None, message=None, sampling={}, write=print) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_utf8_and_tables_lose_a_letter_at_most(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors="strict"))
    console.prepare_streams(needs_stdout=True)
    console.print_json({"text": "é 東 \udcff"})
    print("é 東 … ─")
    sys.stdout.flush()
    first, second = written.getvalue().splitlines()
    assert json.loads(first.decode()) == {"text": "é 東 ?"}
    assert second.decode(encoding).endswith({"utf-8": "é 東 … ─", "latin-1": "é ? ? ?", "ascii": "? ? ? ?"}[encoding])


def test_json_has_null_for_what_is_no_number() -> None:
    value = {"a": float("nan"), "b": [1.5, -float("inf")], "c": ({"d": float("inf")},), "e": True, "f": 3}
    expected = {"a": None, "b": [1.5, None], "c": [{"d": None}], "e": True, "f": 3}
    assert json.loads(console.to_json(value), parse_constant=pytest.fail) == expected


def test_the_client_s_json_has_null_for_what_is_no_number() -> None:
    message = pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=3, logprob=float("nan"), text="NaN"),
        top=[pb.TokenLogprob(logprob=-0.5), pb.TokenLogprob(logprob=-float("inf"))],
    )
    fields = client_cli._to_dict(message)
    assert fields["chosen"] == {"token_id": 3, "logprob": None, "text": "NaN"}
    assert [entry["logprob"] for entry in fields["top"]] == [-0.5, None]


@pytest.mark.kernels
@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "m", "--prompt", b"a\xff"],
        ["generate", "m", "--chat", b"\xff"],
        ["generate", "m", "--chat", "a", "--system", b"\xff"],
        ["generate", "m", "--prompt", "a", "--stop", b"\xff"],
        ["generate", b"\xff", "--prompt", "a"],
        ["generate", "m", "--prompt-file", b"\xff"],
        ["roofline", b"\xff"],
        ["profile-diff", b"\xff", b"\xff"],
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_are_no_utf8(arguments: list[str | bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="utf-8", errors="backslashreplace"))
    with pytest.raises(SystemExit) as ended:
        cli([os.fsdecode(argument) for argument in arguments])
    assert ended.value.code == 2
    sys.stderr.flush()
    assert b"rror: " in written.getvalue()
    assert b"bug" not in written.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", b"a\xff"],
        ["generate", "--prompt", "a", "--stop", b"\xff"],
        ["chat", "-m", b"\xff"],
        ["abort", b"\xff"],
        ["generate", "--prompt-file", b"\xff"],
    ],
    ids=str,
)
def test_arguments_of_the_client_that_are_no_utf8(
    arguments: list[str | bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert client_cli.main([os.fsdecode(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert "codec" not in error
    assert "\n" not in error.strip()


def test_a_line_that_is_no_utf8_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(client: Any, history: Any, text: str, *_: Any) -> bool:
        asked.append(text)
        return True

    monkeypatch.setattr(chat, "_answer", answer)
    lines = b"one\n" + b"\xff\xfe\n" + "drei é\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    assert chat.run_chat(None, system=None, message=None, sampling={}, write=print) == 0  # type: ignore[arg-type]
    assert asked == ["one", "drei é"]
    assert "not UTF-8" in capsys.readouterr().err
