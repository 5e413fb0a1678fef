import pytest

from common.bench import Statistics, measure, summarise, timing


class FakeClock:
    """Answers from a list and counts what it times."""

    def __init__(self, samples):
        self.samples = list(samples)
        self.calls = 0

    def time(self, call):
        call()
        self.calls += 1
        return self.samples.pop(0)


def test_percentiles():
    assert summarise(range(101)) == Statistics(median=50.0, p10=10.0, p90=90.0, runs=101)


def test_one_sample_is_its_own_percentiles():
    assert summarise([2.5]) == Statistics(2.5, 2.5, 2.5, 1)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_warm_up_is_run_and_dropped():
    called = []
    clock = FakeClock([1000, 1000, 1, 2, 3])
    assert measure(lambda: called.append(1), clock, warmup=2, runs=3).median == 2
    assert len(called) == clock.calls == 5


def test_rates_are_at_the_median():
    row = timing("k", Statistics(2.0, 1.0, 3.0, 5), moved=4 * 10**9, flops=10**12, copy_rate=4000)
    assert row.gigabytes_per_second == pytest.approx(2000)
    assert row.teraflops == pytest.approx(500)
    assert row.of_copy == pytest.approx(0.5)


def test_no_count_no_rate():
    row = timing("k", Statistics(2.0, 1.0, 3.0, 5), moved=None, flops=None, copy_rate=4000)
    assert (row.gigabytes_per_second, row.teraflops, row.of_copy) == (None, None, None)
