"""What recorders ask the registry of ops instead of knowing ops by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from numba_engine.backends.base import OPS
from numba_engine.backends.ops import Op, Place


def names(wanted: Callable[[Op], bool]) -> set[str]:
    return {name for name, op in OPS.items() if wanted(op)}


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (Place.START, {"embedding"}),
        (Place.FIRST_OF_LAYER, {"norm_qkv_rope_store"}),
        (Place.HEAD, {"norm_lm_head", "gather_rows", "cap_logits"}),
        (Place.DRAW, {"sample"}),
    ],
)
def test_ops_have_a_place_in_a_step(place: Place, expected: set[str]) -> None:
    assert names(lambda op: op.place is place) == expected
    assert place.is_in_layer == (place is Place.FIRST_OF_LAYER)


def test_only_attention_depends_on_how_long_contexts_are() -> None:
    """Ops that write the cache move as much whatever is in it."""
    assert names(lambda op: op.reads_context) == {"attention"}


def test_matrix_products_go_by_their_weight() -> None:
    assert names(lambda op: op.takes_any_weight) == {"linear", "linear_add", "linear_norm_add"}


def test_what_is_repeated_does_not_change_what_it_is_made_of() -> None:
    assert all(op.source not in op.updates for op in OPS.values() if op.is_repeatable)
    assert names(lambda op: op.is_repeatable) == {"linear", "norm_qkv_rope_store", "norm_gate_up_act"}
