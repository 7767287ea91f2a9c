# SPDX-License-Identifier: Apache-2.0
"""How late a rank is expected to be: as late as it usually was, and no later."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_encoder_cg.planning.delays import ENOUGH, WINDOW, RankDelays

times = st.floats(0.0, 1e4)


def seen(*batches: tuple[list[float], float]) -> RankDelays:
    """Delays after batches of (elapsed per rank, work)."""
    delays = RankDelays(len(batches[0][0]))
    for elapsed, work in batches:
        delays.observe(elapsed, work)
    return delays


def test_nothing_is_expected_of_few_batches() -> None:
    delays = seen(*[([10.0, 22.0], 40.0)] * (ENOUGH - 1))
    assert delays.expect(40.0) == [0.0, 0.0]


def test_a_rank_is_expected_as_late_as_it_was() -> None:
    delays = seen(*[([10.0, 22.0], 40.0)] * ENOUGH)
    assert delays.expect(40.0) == [12.0, 0.0]


def test_delays_grow_with_the_work_up_to_the_usual_one() -> None:
    delays = seen(*[([10.0, 22.0], 40.0)] * ENOUGH)
    assert delays.expect(10.0) == pytest.approx([3.0, 0.0])
    assert delays.expect(400.0) == pytest.approx([12.0, 0.0])


def test_ranks_that_are_late_by_turns_are_not_late() -> None:
    delays = seen(*[([5.0, 9.0], 20.0), ([9.0, 5.0], 20.0)] * 4)
    assert delays.expect(20.0) == [0.0, 0.0]


def test_a_rank_that_is_late_every_other_time_is_not_late() -> None:
    delays = seen(*[([10.0, 22.0], 40.0), ([10.0, 10.0], 40.0)] * 4)
    assert delays.expect(40.0) == [0.0, 0.0]
    delays = seen(*[([10.0, 22.0], 40.0)] * 6, *[([10.0, 10.0], 40.0)] * 2)
    assert delays.expect(40.0) == [12.0, 0.0]


def test_late_batches_are_forgotten_while_devices_are_behind_their_hosts() -> None:
    """No rank can tell the time then, and none is waited for."""
    late, untold = [([10.0, 22.0], 40.0)] * 8, ([-1.0, 22.0], 40.0)
    assert seen(*late, untold).expect(40.0) == [12.0, 0.0]
    assert seen(*late, *[untold] * 4).expect(40.0) == [0.0, 0.0]


def test_a_batch_that_was_not_exchanged_tells_nothing() -> None:
    delays = seen(*[([10.0, 22.0], 40.0)] * 8, *[([-1.0, -1.0], 0.0)] * 8)
    assert delays.expect(40.0) == [12.0, 0.0]


def test_what_is_long_ago_is_forgotten() -> None:
    delays = seen(*[([10.0, 22.0], 40.0)] * 20, *[([22.0, 22.0], 40.0)] * WINDOW)
    assert delays.expect(40.0) == [0.0, 0.0]


@given(
    st.lists(
        st.tuples(st.lists(times, min_size=3, max_size=3), st.floats(0.0, 1e4)),
        max_size=12,
    ),
    times,
)
def test_never_later_than_it_was(
    batches: list[tuple[list[float], float]], work: float
) -> None:
    delays = RankDelays(3)
    for elapsed, of_batch in batches:
        delays.observe(elapsed, of_batch)
    expected = delays.expect(work)
    assert min(expected) == 0.0
    latest = max((max(of) - min(of) for of, _ in batches), default=0.0)
    assert max(expected) <= latest
