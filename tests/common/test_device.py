import pytest

from common.device import DeviceError, Gpu, can_run, choose_device

H200 = Gpu("NVIDIA H200", (9, 0), 132, "580.65.06")
B200 = Gpu("NVIDIA B200", (10, 0), 148, "580.65.06")


@pytest.mark.parametrize(
    ("arch", "capability", "answer"),
    [
        ("sm_90a", (8, 9), False),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), True),
        ("sm_90a", (12, 0), True),
        ("sm_100a", (9, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), True),
        ("sm_100a", (12, 0), False),
    ],
)
def test_which_gpu_runs_which_stage(arch, capability, answer):
    assert can_run(arch, capability) is answer


def test_an_unknown_arch_has_no_rule():
    with pytest.raises(ValueError, match="sm_80"):
        can_run("sm_80", (9, 0))


def test_auto_without_a_gpu_takes_the_emulator_and_says_why(no_gpu):
    device = choose_device("auto", 2, "sm_90a")
    assert (device.kind, device.arch, device.sms) == ("emulator", "sm_100a", 148)
    assert "torch" in device.reason


def test_cuda_without_a_gpu_is_an_error(no_gpu):
    with pytest.raises(DeviceError, match="use --device emulator"):
        choose_device("cuda", 2, "sm_90a")


def test_auto_takes_a_gpu_that_can_run_the_stage(monkeypatch):
    monkeypatch.setattr("common.device.find_gpu", lambda: H200)
    device = choose_device("auto", 2, "sm_90a")
    assert (device.kind, device.arch, device.sms, device.driver) == ("cuda", "sm_90a", 132, "580.65.06")
    monkeypatch.setattr("common.device.find_gpu", lambda: B200)
    assert choose_device("auto", 5, "sm_100a").arch == "sm_100a"


def test_a_gpu_that_cannot_run_the_stage_is_named(monkeypatch):
    monkeypatch.setattr("common.device.find_gpu", lambda: H200)
    words = r"stage 05 needs sm_100a; this is an NVIDIA H200 \(sm_90\)"
    with pytest.raises(DeviceError, match=f"{words}: use --device emulator"):
        choose_device("cuda", 5, "sm_100a")
    device = choose_device("auto", 5, "sm_100a")
    assert device.kind == "emulator" and device.reason == "stage 05 needs sm_100a; this is an NVIDIA H200 (sm_90)"


def test_the_emulator_on_request(monkeypatch):
    monkeypatch.setattr("common.device.find_gpu", lambda: B200)
    assert choose_device("emulator", 5, "sm_100a").kind == "emulator"
