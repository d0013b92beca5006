"""Random numbers are functions of (key, counter): the same bits in Python, numpy, torch; well distributed."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kenotron.kernels import quantiles, random
from kenotron.kernels.hashing import derive_key, hash64, hash64_array, uniform_array
from kenotron.kernels.tensor_shard import TensorShard

words = st.integers(0, 2**64 - 1)


def splitmix64_with_a_key_in_the_middle(key, counter):
    """The definition, written out once more with Python integers."""
    wrap = 2**64
    z = (key + counter * 0x9E3779B97F4A7C15) % wrap
    z = ((z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9 + key) % wrap
    z = ((z ^ (z // 2**27)) * 0x94D049BB133111EB) % wrap
    return z ^ (z // 2**31)


@given(key=words, counter=words)
def test_integers_numpy_and_torch_give_the_same_bits(key, counter):
    expected = splitmix64_with_a_key_in_the_middle(key, counter)
    signed = counter - 2**64 if counter >= 2**63 else counter
    assert hash64(key, counter) == expected
    assert int(hash64_array(key, np.array([counter], dtype=np.uint64))[0]) == expected
    assert int(hash64_array(key, np.array([signed]))[0]) == expected
    assert int(random.hash_counters(key, torch.tensor([signed]))[0]) % 2**64 == expected


def test_key_zero_counts_through_the_published_splitmix64_sequence():
    # The reference generator seeded with 0 gives these first outputs (Vigna, splitmix64.c).
    assert [hash64(0, i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_keys_depend_on_parts_their_order_their_types_and_their_borders():
    variants = [(1, "2"), ("1", 2), ("12",), (12,), ("1", "2"), ("2", "1"), (1, 2), (2, 1), (-1, 2), (), ("",)]
    assert len({derive_key(*parts) for parts in variants}) == len(variants)


def test_keys_are_the_same_in_another_process_and_for_good():
    assert derive_key(42, "model.norm.weight") == 0xA05E12A3714C1B5B
    code = "import sys, kenotron.kernels.quantiles; assert 'torch' not in sys.modules\n"
    code += "from kenotron.kernels.hashing import derive_key; print(derive_key(42, 'model.norm.weight'))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) == derive_key(42, "model.norm.weight")


@pytest.mark.parametrize("part", [1.5, None, True, b"x"])
def test_a_key_refuses_parts_that_are_neither_int_nor_str(part):
    with pytest.raises(TypeError, match="int and str"):
        derive_key(1, part)


def test_uniforms_fill_the_unit_interval_evenly():
    stats = pytest.importorskip("scipy.stats")
    drawn = uniform_array(derive_key("uniform"), np.arange(1_000_000))
    assert 0.0 <= drawn.min() < 1e-5
    assert 1 - 1e-5 < drawn.max() < 1.0
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    tensors = random.uniform_at(derive_key("uniform"), torch.arange(1_000_000)).numpy()
    np.testing.assert_array_equal(tensors, drawn)


# Normals ------------------------------------------------------------------------------------------


def normal(key: int, start: int, count: int) -> torch.Tensor:
    shard = TensorShard(torch.empty(count), (start + count,), (start,))
    random.fill_normal_(shard, key)
    return shard.tensor


def test_own_logarithm_and_quantiles_equal_scipy_in_float64():
    stats = pytest.importorskip("scipy.stats")
    x = np.exp(np.linspace(-40, 40, 100_001))
    np.testing.assert_allclose(quantiles.log(x), np.log(x), rtol=1e-15, atol=1e-17)
    u = np.exp2(np.linspace(-54, -1, 100_001))
    np.testing.assert_allclose(quantiles.normal_quantile(u), stats.norm.ppf(u), rtol=3e-15, atol=1e-16)


def test_the_table_is_within_a_millionth_of_the_quantile_out_to_the_last_tail():
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(0)
    u = np.ldexp(draw.uniform(0.5, 1.0, 500_000), draw.integers(-53, 0, 500_000))
    a, b = quantiles.table()
    rows = (u.view(np.int64) >> quantiles.DROPPED_BITS) - quantiles.FIRST_ROW
    assert np.abs(a[rows] + b[rows] * u - stats.norm.ppf(u)).max() < 1e-6


def test_a_million_normals_have_the_normal_distribution():
    stats = pytest.importorskip("scipy.stats")
    z = normal(derive_key(1, "normal"), 0, 1_000_000).double().numpy()
    n = len(z)
    assert abs(z.mean()) < 4 / n**0.5
    assert abs(z.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs(stats.skew(z)) < 4 * (6 / n) ** 0.5
    assert abs(stats.kurtosis(z)) < 4 * (24 / n) ** 0.5
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 4 / n**0.5


def normal_array(key, counters):
    """The rule of `quantiles` in numpy: a standard normal for each counter."""
    bits = hash64_array(key, counters)
    u = ((bits & np.uint64((1 << 52) - 1)).astype(np.float64) + 0.5) * 2.0**-53
    rows = (u.view(np.int64) >> quantiles.DROPPED_BITS) - quantiles.FIRST_ROW
    intercepts, slopes = quantiles.table()
    lower_half = intercepts[rows] + slopes[rows] * u
    return np.where(bits >> np.uint64(63), -lower_half, lower_half).astype(np.float32)


@given(key=words, start=st.integers(0, 2**40), count=st.integers(0, 300))
def test_numpy_twin_gives_the_same_normals_bit_for_bit(key, start, count):
    drawn = normal(key, start, count).numpy()
    twin = normal_array(key, np.arange(start, start + count))
    np.testing.assert_array_equal(drawn.view(np.int32), twin.view(np.int32))


def test_an_element_does_not_depend_on_where_a_fill_began_or_on_threads():
    whole = normal(3, 0, 300_000)
    torch.testing.assert_close(normal(3, 123_457, 100_000), whole[123_457:223_457], rtol=0, atol=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        torch.testing.assert_close(normal(3, 0, 300_000), whole, rtol=0, atol=0)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fill_scales_in_float64_and_rounds_to_the_tensor(dtype):
    parameter = torch.nn.Parameter(torch.empty(33, 100, dtype=dtype))
    random.fill_normal_(TensorShard(parameter, (34, 100), (1, 0)), 9, std=0.02)
    exact = random.normal_at(9, torch.arange(100, 3400)).view(33, 100)
    torch.testing.assert_close(parameter.detach(), (exact * 0.02).float().to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("at_once", [1, 3, 7, 20, 59, 60, 1000])
def test_parts_of_a_shard_are_small_and_cover_it_once(at_once):
    whole = torch.arange(9 * 8 * 7).view(9, 8, 7)
    shard = TensorShard(whole[2:5, :, 1:], (9, 8, 7), (2, 0, 1))
    seen = torch.zeros_like(shard.tensor)
    for part in shard.parts(at_once):
        numbers = shard.numbers(part, "cpu")
        assert numbers.numel() <= at_once
        torch.testing.assert_close(numbers, shard.tensor[part], rtol=0, atol=0)
        seen[part] += 1
    assert bool((seen == 1).all())
