"""The order of samples: exact shares, bijections, O(1) places."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kenotron.data.order import BLOCK, Mixing, Order, counts, huffman, interleave, left_count, permute
from kenotron.kernels.hashing import derive_key, mix64

BOUND = Fraction(168, 100)

keys = st.integers(0, 2**64 - 1)
weight_lists = st.lists(st.floats(1e-6, 1e6, allow_nan=False), min_size=1, max_size=64)


def shares(weights):
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@given(st.integers(1, 3000), keys)
def test_permute_is_a_bijection(length, key):
    image = permute(np.arange(length), length, np.full(length, key, np.uint64))
    assert sorted(image.tolist()) == list(range(length))


@given(st.integers(2**30, 2**48), keys, st.integers(0, 2**30 - 2000))
def test_permute_stays_inside_and_repeats_nothing_in_huge_ranges(length, key, start):
    image = permute(np.arange(start, start + 2000), length, np.full(2000, key, np.uint64))
    assert image.min() >= 0
    assert image.max() < length
    assert len(set(image.tolist())) == 2000


def test_every_order_of_three_samples_comes_equally_often():
    trials = 6000
    seen: dict[tuple[int, ...], int] = {}
    for number in range(trials):
        image = tuple(permute(np.arange(3), 3, np.full(3, derive_key(number), np.uint64)).tolist())
        seen[image] = seen.get(image, 0) + 1
    chi_square = sum((count - trials / 6) ** 2 / (trials / 6) for count in seen.values())
    assert len(seen) == 6
    assert chi_square < 20.5  # 99.9% quantile with 5 degrees of freedom


def test_a_shuffled_order_has_no_trace_of_the_old_one():
    length = 10_007
    image = permute(np.arange(length), length, np.full(length, derive_key("trace"), np.uint64))
    place = np.arange(length)
    assert abs(np.corrcoef(place, image)[0, 1]) < 0.04
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.04
    halves = np.histogram2d(place, image, bins=10)[0]
    assert ((halves - length / 100) ** 2 / (length / 100)).sum() < 140  # chi-square, about 81 degrees of freedom


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1))
def test_left_count_is_the_exact_rounded_product(n, ratio):
    expected = (n * ratio + 2**63) >> 64
    assert int(left_count(np.array([n], np.uint64), ratio)[0]) == expected


@given(weight_lists, st.integers(0, 10**12), st.data())
def test_every_prefix_holds_each_source_to_within_two_samples(weights, n, data):
    """Also of those sources that are left when others have given all."""
    left = sorted(data.draw(st.sets(st.integers(0, len(weights) - 1), min_size=1)))
    exact = shares([weights[source] for source in left])
    found = counts(huffman(weights, left), n)
    assert sorted(found) == left
    for source, share in zip(left, exact):
        assert abs(found[source] - share * n) <= BOUND + Fraction(1, 100)


@given(weight_lists, st.integers(0, 10**12))
def test_interleave_gives_the_draws_that_the_counts_promise(weights, start):
    """Walking 500 samples from any start: every source's draws are consecutive, from its count at the start."""
    tree = huffman(weights)
    source, draw = interleave(tree, np.arange(start, start + 500))
    upcoming = counts(tree, start)
    for s, d in zip(source.tolist(), draw.tolist()):
        assert d == upcoming[s]
        upcoming[s] += 1
    assert upcoming == counts(tree, start + 500)


DEEPEST = [1.6180339887**i for i in range(40)]  # tree that weights can make


@pytest.mark.parametrize(
    "weights", [[1.0] * 64, DEEPEST, [2.0**i for i in range(50)], [1e-12, 1.0, 1.0], [0.7, 0.2, 0.1]]
)
def test_hard_mixtures_keep_the_bound_at_every_one_of_the_first_samples(weights):
    n = 20_000
    source, _ = interleave(huffman(weights), np.arange(n))
    so_far = np.zeros((n, len(weights)))
    so_far[np.arange(n), source] = 1
    exact = np.arange(1, n + 1)[:, None] * np.array([float(share) for share in shares(weights)])
    assert np.abs(so_far.cumsum(axis=0) - exact).max() <= float(BOUND)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=5), keys)
def test_an_epoch_contains_every_sample_of_a_source_once(lengths, key):
    order = Order(lengths, [key ^ s for s in range(len(lengths))], Mixing([float(length) for length in lengths]))
    source, index = order.locate(np.arange(6 * sum(lengths) + 100))
    for s, length in enumerate(lengths):
        drawn = index[source == s]
        assert len(drawn) >= 2 * length
        for epoch in range(len(drawn) // length):
            assert sorted(drawn[epoch * length : (epoch + 1) * length].tolist()) == list(range(length))


def test_epochs_are_shuffled_anew():
    order = Order([1000], [derive_key("epochs")], Mixing([1.0]))
    _, index = order.locate(np.arange(3000))
    first, second, third = index.reshape(3, 1000)
    assert (first == second).mean() < 0.02
    assert (second == third).mean() < 0.02


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
@example([*range(BLOCK - 3, BLOCK + 3)])
def test_places_do_not_depend_on_what_is_asked_with_them(positions):
    def order():
        return Order([10**9, 1234, 77], [1, 2, 3], Mixing([5.0, 2.0, 1.0]))

    together = order().locate(np.array(positions))
    for n, position in enumerate(positions):
        source, index = order().locate(np.array([position]))
        assert (source[0], index[0]) == (together[0][n], together[1][n])


def test_keys_and_places_never_change():
    """Frozen values: a change here would silently reorder the data of every run that is resumed."""
    assert derive_key("order", 42) == 8914001651492561991
    # SplitMix64 from seed 0 gives this first (its published test value).
    assert mix64(np.array([0x9E3779B97F4A7C15], np.uint64))[0] == 0xE220A8397B1DCDAF
    order = Order([1000, 10], [derive_key("a"), derive_key("b")], Mixing([3.0, 1.0]))
    source, index = order.locate(np.arange(8))
    assert source.tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert index.tolist() == [186, 631, 2, 871, 12, 292, 4, 96]


# ---- limits ------------------------------------------------------------------------------------------------

limited = st.tuples(st.floats(0.01, 100), st.integers(0, 30), st.none() | st.integers(1, 60))


def simulated(weights, offsets, limits, policy, n):
    """(source, draw) of the first n samples, one by one: sources fall out of the tree when they have given all."""
    given = list(offsets)
    drawn, reached = [], []
    left = [s for s in range(len(weights)) if limits[s] is None or given[s] < limits[s]]
    spent = len(left) < len(weights)
    sequence, at = (interleave(huffman(weights, left), np.arange(n))[0] if left else []), 0
    while len(drawn) < n and left and not (spent and policy == "stop"):
        s = int(sequence[at])
        if limits[s] is not None and given[s] == limits[s]:
            left, spent, at = [other for other in left if other != s], True, 0
            reached.append((s, len(drawn)))
            sequence = interleave(huffman(weights, left), np.arange(n))[0] if left else []
            continue
        drawn.append((s, given[s]))
        given[s] += 1
        at += 1
    return drawn, reached


@given(st.lists(limited, min_size=1, max_size=5), st.sampled_from(["stop", "renormalise"]))
def test_limits_hold_and_phases_are_those_of_a_plain_simulation(sources, policy):
    weights, offsets, limits = map(list, zip(*sources))
    mixing, n = Mixing(weights, offsets, limits, policy), 400
    expected, reached = simulated(weights, offsets, limits, policy, n)
    assert len(expected) == min(n, n if mixing.end is None else mixing.end)
    source, draw = mixing.draws(np.arange(len(expected)))
    assert list(zip(source.tolist(), draw.tolist())) == expected
    inside = range(1, len(expected))
    assert [entry for entry in mixing.reached if entry[1] in inside] == [e for e in reached if e[1] in inside]
    if mixing.end is not None:
        with pytest.raises(IndexError):
            mixing.draws(np.array([mixing.end]))
    for place in (0, len(expected) // 2, len(expected)):
        so_far = [s for s, _ in expected[:place]]
        assert mixing.drawn(place) == [offset + so_far.count(s) for s, offset in enumerate(offsets)]
