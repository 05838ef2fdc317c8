import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.data.sampler import permute

KEYS = st.integers(-(2**70), 2**70)


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), key=KEYS)
def test_permute_is_a_bijection(n, key):
    shuffled = permute(np.arange(n), n, key)
    assert shuffled.dtype == np.int64
    assert np.array_equal(np.sort(shuffled), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(2**32, 2**48), key=KEYS, data=st.data())
def test_permute_of_large_n_is_distinct_and_in_range(n, key, data):
    start = data.draw(st.integers(0, n - 1000))
    shuffled = permute(np.arange(start, start + 1000), n, key)
    assert 0 <= shuffled.min() and shuffled.max() < n
    assert len(np.unique(shuffled)) == 1000


def test_permute_maps_each_index_independently():
    whole = permute(np.arange(977), 977, 5)
    some = np.array([[900, 3], [3, 41]])
    assert np.array_equal(permute(some, 977, 5), whole[some])


def test_permute_order_is_stable_across_versions():
    # The reference follows the definition in the module and uses Python integers only.
    assert permute(np.arange(10), 10, 0).tolist() == reference(10, 0)
    assert permute(np.arange(101), 101, 12345).tolist() == reference(101, 12345)
    assert permute(np.arange(10), 10, 0).tolist() == [8, 0, 6, 5, 3, 9, 7, 2, 1, 4]


def reference(n, key):
    mask = 2**64 - 1

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    keys = [mix((key + i * 0x9E3779B97F4A7C15) & mask) for i in range(1, 7)]
    a = next(a for a in range(1, n + 1) if a * a >= n)
    b = -(-n // a)

    def once(value):
        left, right = divmod(value, b)
        for i, k in enumerate(keys):
            if i % 2:
                right = (right + mix(left ^ k)) % b
            else:
                left = (left + mix(right ^ k)) % a
        return left * b + right

    out = []
    for value in range(n):
        value = once(value)
        while value >= n:
            value = once(value)
        out.append(value)
    return out


@pytest.mark.parametrize("n", [10_000, 65_536, 99_991])
@pytest.mark.parametrize("key", [0, 1, 2**40])
def test_permute_is_statistically_uniform(n, key):
    index = np.arange(n)
    shuffled = permute(index, n, key)
    # Standard errors of a random permutation: 1/sqrt(n) for the correlations.
    tolerance = 5 / np.sqrt(n)
    assert abs(np.corrcoef(index, shuffled)[0, 1]) < tolerance
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < tolerance
    assert abs(np.abs(index - shuffled).mean() / n - 1 / 3) < tolerance
    # Adjacent indices spread evenly over the range: chi-square, 63 degrees of freedom.
    for block in np.array_split(shuffled, 8):
        counts = np.bincount(block * 64 // n, minlength=64)
        assert ((counts - len(block) / 64) ** 2).sum() / (len(block) / 64) < 130


def test_different_keys_give_different_orders():
    n = 10_000
    one, two = permute(np.arange(n), n, 7), permute(np.arange(n), n, 8)
    assert (one == two).sum() < 20  # two random orders agree at about one position
    landed = np.bincount([permute(np.array([0]), 16, key)[0] for key in range(3200)], minlength=16)
    assert ((landed - 200) ** 2).sum() / 200 < 45  # chi-square, 15 degrees of freedom


@pytest.mark.parametrize("index", [[-1], [10], [0, 11]])
def test_out_of_range_index_is_rejected(index):
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        permute(np.array(index), 10, 0)


@pytest.mark.parametrize("n", [0, -1, 2**48 + 1])
def test_permute_refuses_numbers_of_items_that_it_cannot_shuffle(n):
    with pytest.raises(ValueError, match=r"permute shuffles 1 to 2\*\*48 items"):
        permute(np.arange(0), n, 0)
