"""Kernel cards: every kernel within its targets, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from numba_engine.backends.cuda.ptxas import find_ptxas
from numba_engine.cli import cli
from numba_engine.formats import Q4_0
from numba_engine.kernel_lab.cards import COMPUTE_CAPABILITIES, KernelCard
from numba_engine.kernel_lab.kernel_cards import kernel_cards

pytestmark = pytest.mark.skipif(find_ptxas() is None, reason="ptxas (pip install nvidia-cuda-nvcc) was not found")


@pytest.fixture(scope="module")
def cards() -> dict[str, KernelCard]:
    """Of one format and two batches; the command prints those of all."""
    return {card.kernel: card for card in kernel_cards((9, 0), formats=(Q4_0,), rows=(1, 8))}


def test_every_kernel_is_within_its_targets(cards: dict[str, KernelCard]) -> None:
    assert {name: card.misses for name, card in cards.items() if card.misses} == {}


def test_every_op_has_a_card(cards: dict[str, KernelCard]) -> None:
    ops = "embedding rms_norm linear rope store_kv attention gated_activation gather_rows sample head_norm penalties"
    for op in (*ops.split(), "logprob_totals", "chosen_logprobs", "read_bandwidth"):
        assert any(name.startswith(op) for name in cards), op


def test_what_streams_weights_reads_each_sector_once_and_16_bytes_at_a_time(cards: dict[str, KernelCard]) -> None:
    streaming = [card for card in cards.values() if card.weight_reads is not None]
    assert len(streaming) >= 2
    for card in streaming:
        assert card.weight_reads == pytest.approx(1, abs=0.001)
        assert card.wide_weight_share is not None
        assert card.wide_weight_share == pytest.approx(16 / (16 + 4 * 2), abs=0.001), "four ask for a scale"
        assert card.bank_conflict_factor <= 1.02
        assert card.sector_efficiency > 0.999
        assert card.bytes_in_flight >= (25_000 if card.kernel.endswith("_x1") else 20_000)
        assert card.instructions_per_weight_byte is not None
        assert card.instructions_per_weight_byte > 1 / 512, "a warp instruction loads 512 bytes at most"


def test_a_plain_read_has_four_loads_of_every_lane_in_flight(cards: dict[str, KernelCard]) -> None:
    assert cards["read_bandwidth"].bytes_in_flight == 4 * 16 * 2048


def test_a_card_says_what_it_misses(cards: dict[str, KernelCard]) -> None:
    card = next(card for card in cards.values() if card.weight_reads is not None)
    assert replace(card, spill_bytes=8, stack_bytes=16).misses == ("spills", "stack")
    assert replace(card, weight_reads=1.01, wide_weight_share=0.6).misses == ("weight loads", "weight reads")
    assert replace(card, bytes_in_flight=19_999).misses == ("bytes in flight",)
    assert replace(card, bank_conflict_factor=1.06, sector_efficiency=0.97).misses == ("sectors", "bank conflicts")


@pytest.mark.parametrize(
    "cc", [COMPUTE_CAPABILITIES[0], COMPUTE_CAPABILITIES[-1]], ids=lambda cc: ".".join(map(str, cc))
)
def test_the_command_prints_them(cc: tuple[int, int]) -> None:
    name = ".".join(map(str, cc))
    result = CliRunner().invoke(cli, ["kernels", "--cc", name, "--kernel", "gather_rows", "--json"])
    assert result.exit_code == 0, result.output
    (card,) = json.loads(result.stdout)["cards"]
    assert (card["kernel"], card["cc"], card["spill_bytes"], card["misses"]) == ("gather_rows", name, 0, [])
