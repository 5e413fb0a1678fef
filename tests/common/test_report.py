from common.bench import Statistics, timing
from common.report import Row, table, timed_rows, verified_rows
from common.verify import Comparison, Verification


def test_timed_rows_show_spread_rates_and_the_device():
    fast = timing("k", Statistics(2.0, 1.5, 3.0, 50), moved=4 * 10**9, flops=10**12, copy_rate=4000)
    bare = timing("launch", Statistics(0.01, 0.009, 0.02, 50), moved=None, flops=None)
    first, second = timed_rows([fast, bare], "measured (NVIDIA H200)")
    assert first.value == "2 ms (1.5 to 3, 50 runs), 2000 GB/s, 500.0 TFLOP/s, 50.0% of the device's copy"
    assert first.source == "measured (NVIDIA H200)"
    assert second.value == "0.01 ms (0.009 to 0.02, 50 runs)"


def test_verified_rows_name_the_reference_and_the_seed():
    comparison = Comparison("output", "float64", 2.1e-4, 1e-3, 0.5)
    runs = [Verification((comparison,), seed=3), Verification((comparison,), seed=4, schedule="late")]
    on_gpu, emulated = verified_rows(runs, "emulated")
    assert on_gpu.name == "output against torch float64, seed 3"
    assert emulated.name == "output against torch float64, schedule late, seed 4"
    assert emulated.value == "error 2.10e-04 of 1e-03 allowed, worst element at 50% of its bound"


def test_a_part_is_named_once_and_numbers_stay_as_written():
    lines = table([Row("built", "a", "007", "compiled"), Row("built", "b", "1e5", "compiled")]).splitlines()
    assert lines[2].split() == ["built", "a", "007", "compiled"]
    assert lines[3].split() == ["b", "1e5", "compiled"]
