import json

import pytest

from common.roofline import B200, COMPUTE, FP32, MEMORY, TENSOR, Ceiling, Point, Roofline

ROOFS = (
    Ceiling("memory", MEMORY, 1e12, "measured", "here"),
    Ceiling(FP32, COMPUTE, 8e12, "measured", "here"),
    Ceiling(TENSOR, COMPUTE, 100e12, "cited", "there"),
)


def point(intensity: float, **changes) -> Point:
    return Point(
        **{"name": "p", "stage": 3, "flops": int(intensity * 1000), "moved": 1000, "source": "counted"} | changes
    )


def test_the_slope_and_the_roof_meet_at_the_ridge() -> None:
    points = [point(2), point(8), point(32), point(32, unit=TENSOR)]
    roofline = Roofline("a device", ROOFS, points)
    assert roofline.ridge(ROOFS[0], FP32) == 8
    assert [roofline.bound(p) for p in points] == [2e12, 8e12, 8e12, 32e12]


def test_a_point_without_a_time_has_no_rate() -> None:
    roofline = Roofline("a device", ROOFS, [point(2)])
    assert roofline.points[0].rate is None and roofline.reached(roofline.points[0]) is None


def test_what_is_reached_is_of_the_nearer_roof() -> None:
    slow = [point(2, seconds=2e-9), point(32, seconds=8e-9), point(0, seconds=4e-9)]
    roofline = Roofline("a device", ROOFS, slow)
    assert [roofline.reached(p) for p in slow] == pytest.approx([0.5, 0.5, 0.25])


def test_a_missing_roof_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor"):
        Roofline("a device", ROOFS[:2], [point(2, unit=TENSOR)])
    with pytest.raises(ValueError, match="memory ceiling"):
        Roofline("a device", ROOFS[1:], [point(2)])


def test_ridges_of_the_b200() -> None:
    roofline = Roofline("a B200", B200, [])
    ridges = {memory.name: roofline.ridge(memory, TENSOR) for memory in roofline.memories}
    assert ridges == pytest.approx({"HBM": 331, "L2": 108, "SMEM": 64}, abs=0.5)


def test_picture_and_document(tmp_path) -> None:
    points = [point(2, seconds=1e-8), point(32, seconds=1e-8), point(0, stage=4, seconds=1e-8)]
    png, document = Roofline("a device", ROOFS, points).write(tmp_path / "made")
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    written = json.loads(document.read_text(encoding="utf-8"))
    assert written["points"][0]["of_bound"] == pytest.approx(0.1)
    assert written["ridges"][0] == {"memory": "memory", "compute": "fp32", "intensity": 8}
