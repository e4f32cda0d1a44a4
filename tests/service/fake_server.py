"""A server with a FakeLLM as a process of its own: ``python -m tests.service.fake_server [serve's own options]``."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from service import server
from service.config import service_config, service_options
from tests.service.fake_llm import FakeLLM, FakeSession


@click.command(context_settings={"auto_envvar_prefix": "FAKE_SERVER"})
@service_options
@click.option("--step-delay", type=float, default=0.0)
@click.option("--text-delay", type=float, default=0.0)
@click.option("--load-delay", type=float, default=0.0)
def main(step_delay: float, text_delay: float, load_delay: float, **options: Any) -> None:
    def load(progress: Any) -> Any:
        time.sleep(load_delay)
        llm = FakeLLM(step_delay_s=step_delay)
        llm.in_tokenize = lambda: time.sleep(text_delay)
        return FakeSession(llm)

    sys.exit(server.run(service_config(options), load))


if __name__ == "__main__":
    main()
