"""Kernel cards: every kernel within its targets, and the command that prints them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from numba_engine.backends.cuda.cards import COMPUTE_CAPABILITIES, KernelCard, kernel_cards
from numba_engine.backends.cuda.ptxas import find_ptxas
from numba_engine.cli import cli
from numba_engine.storage import StorageFormat

pytestmark = pytest.mark.skipif(find_ptxas() is None, reason="ptxas (pip install nvidia-cuda-nvcc) was not found")


@pytest.fixture(scope="module")
def cards() -> dict[str, KernelCard]:
    """All kernels, but of linear only those that are already slow to compile once: one and eight rows."""
    return {card.kernel: card for card in kernel_cards((9, 0), lambda name: not name.endswith(("_x2", "_x4")))}


def test_every_kernel_is_within_its_targets(cards: dict[str, KernelCard]) -> None:
    assert {name: card.misses for name, card in cards.items() if card.misses} == {}


def test_gemv_reads_every_weight_byte_once_and_16_at_a_time(cards: dict[str, KernelCard]) -> None:
    for format in StorageFormat:
        card = cards[f"linear_{format.label.lower()}_x1"]
        assert card.weight_reads == 1
        assert card.wide_weight_share == 1
        assert card.bank_conflict_factor == 1
        assert card.sector_efficiency > 0.999
        assert card.occupancy >= 0.25


def test_a_card_says_what_it_misses(cards: dict[str, KernelCard]) -> None:
    card = cards["linear_q4_0_x1"]
    assert replace(card, spill_bytes=8, stack_bytes=16).misses == ("spills", "stack")
    assert replace(card, weight_reads=1.01, wide_weight_share=0.98).misses == ("weight loads", "weight reads")
    assert replace(card, bank_conflict_factor=1.06, sector_efficiency=0.97).misses == ("sectors", "bank conflicts")


@pytest.mark.parametrize("cc", COMPUTE_CAPABILITIES, ids=lambda cc: ".".join(map(str, cc)))
def test_the_command_prints_them(cc: tuple[int, int]) -> None:
    name = ".".join(map(str, cc))
    result = CliRunner().invoke(cli, ["kernels", "--cc", name, "--kernel", "rope", "--json"])
    assert result.exit_code == 0, result.output
    (card,) = json.loads(result.output)["cards"]
    assert (card["kernel"], card["cc"], card["spill_bytes"], card["misses"]) == ("rope", name, 0, [])
    table = CliRunner().invoke(cli, ["kernels", "--cc", name, "--kernel", "rope"])
    assert "rope" in table.output
    assert "conflicts" in table.output
