"""`--tune`: what configurations take of the machine, which are best, and that the best is found again."""

from dataclasses import replace

import pytest

from common import harness, tune
from common.device import Device
from common.stage import B200_SMS
from tests.stages import load_stage

B200 = Device("cuda", "NVIDIA B200", "sm_100a", B200_SMS, "a GPU that can run the stage")
EMULATOR = replace(B200, kind="emulator", name="emulator")


@pytest.fixture(scope="module")
def pairs() -> dict[tuple[str, str], tune.Candidate]:
    """The configurations of stage 08 for 4096 x 4096 x 4096, by (tile, scheduler); two tiles only, to save time."""
    stage = load_stage(8)
    found = {}
    for tile in ("256x256", "512x256"):
        sizes = {"m": 4096, "n": 4096, "k": 4096, "tile": tile, "scheduler": "static"}

        def configure(**values):
            return stage.config(scale="gpu", **values)

        for candidate, _, _ in tune.candidates(stage, configure, sizes, "sm_100a"):
            found[tile, candidate.options["scheduler"]] = candidate
    return found


def test_what_is_given_is_not_varied(pairs) -> None:
    assert set(pairs) == {("256x256", "static"), ("512x256", "static")}


@pytest.mark.parametrize(("tile", "stages", "need"), [("256x256", 6, 64), ("512x256", 3, 48)])
def test_ring_and_bytes_per_clock_come_from_the_build(pairs, tile: str, stages: int, need: float) -> None:
    candidate = pairs[tile, "static"]
    assert (candidate.stages, candidate.bytes_per_clock) == (stages, need)
    assert candidate.cluster == 2 and candidate.tmem_columns == 512 and candidate.spill_bytes == 0
    assert candidate.shared_bytes <= 227 * 1024


def test_waves_are_tiles_over_what_runs_at_a_time(pairs) -> None:
    candidate = pairs["256x256", "static"]
    assert (candidate.tiles, candidate.units, candidate.waves) == (256, 74, 4)
    assert candidate.modelled_share == pytest.approx(256 / (74 * 4))


def test_a_tile_that_l2_cannot_feed_is_capped(pairs) -> None:
    starved = replace(pairs["256x256", "static"], bytes_per_clock=128.0, tiles=74)
    assert starved.modelled_share == pytest.approx(76 / 128)


def test_the_table_has_the_best_first(pairs) -> None:
    slow, fast = pairs.values()
    timed = [replace(slow, milliseconds=2.0), replace(fast, milliseconds=1.0)]
    rows = tune.table(timed, 10**12, "measured (a GPU)").splitlines()[2:4]
    assert rows[0].startswith("512x256") and rows[1].startswith("256x256")
    assert rows[0].split()[-1] == "1000"


def test_a_kernel_without_tensor_memory_cannot_be_tuned() -> None:
    stage = load_stage(2)
    with pytest.raises(ValueError, match="no tensor memory"):
        tune._tmem_columns(stage.build(rows=8, cols=1024))


def test_the_best_is_remembered_for_its_problem_and_gpu(tmp_path, monkeypatch, pairs) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stage = load_stage(8)
    config = stage.config(scale="gpu")
    assert tune.remembered(stage, config, B200) == {}
    tune.remember(stage, config, B200, pairs["512x256", "static"])
    assert tune.remembered(stage, config, B200) == {"tile": "512x256", "scheduler": "static"}
    assert tune.remembered(stage, config, replace(B200, name="another")) == {}
    assert tune.remembered(stage, stage.config(scale="gpu", m=512), B200) == {}
    assert tune.remembered(stage, stage.config(scale="gpu", epilogue="bias"), B200) == {}


def test_a_run_on_a_gpu_takes_the_best_unless_told(tmp_path, monkeypatch, pairs, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stage = load_stage(8)
    tune.remember(stage, stage.config(scale="gpu"), B200, pairs["512x256", "static"])

    def config(*argv: str, device: Device = B200):
        return harness._config(stage, harness._parser(stage).parse_args(argv), device)

    assert (config().tile, config().scheduler) == ("512x256", "static")
    assert "tuned earlier on this GPU: --tile 512x256" in capsys.readouterr().out
    assert config("--tile", "256x128").tile == "256x128"
    assert config(device=EMULATOR).tile == "256x256"
