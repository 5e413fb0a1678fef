import dataclasses
import json
import subprocess
import sys
from functools import partial

import pytest

from common.device import Gpu
from common.harness import main
from common.series import ROOT
from common.stage import BadSize, Option
from tests.common.kernels import misspelt, tma_copy, toy_stage

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_one_table_with_the_source_of_each_figure(fake_emulator, capsys):
    assert main(toy_stage(), []) == 0
    out = capsys.readouterr().out
    assert "device: emulator (" in out
    figures = {line[10:].split("  ")[0]: line for line in out.splitlines()}
    assert figures["registers"].endswith("compiled")
    assert "3 CTAs" in figures["grid"] and "1 CTA " in figures["cluster"] and "NVRTC" in figures["kernel"]
    assert figures["output against torch float64, schedule late, seed 0"].endswith("emulated")
    assert "1,234" in figures["warp instructions"]
    for part in ("built", "verified", "counted"):
        assert f"\n{part} " in out


def test_all_schedules(fake_emulator, capsys):
    assert main(toy_stage(), ["--schedule", "all", "--seed", "4", "--rows", "2"]) == 0
    assert [launch["options"]["schedule"] for launch in fake_emulator.launches] == ["late", "early", "random"]
    assert {launch["args"][3] for launch in fake_emulator.launches} == {2}


def test_an_option_that_wants_each_choice_has_a_run_for_each_unless_one_is_chosen(fake_emulator, tmp_path):
    sign = Option("sign", ["plus", "minus"], "plus", each=True)
    stage = dataclasses.replace(toy_stage(), options=[sign])

    def runs(*argv: str) -> int:
        fake_emulator.launches.clear()
        assert main(stage, list(argv)) == 0
        return len(fake_emulator.launches)

    assert runs() == 2
    assert runs("--sign", "minus") == 1
    assert runs("--json", str(tmp_path / "out.json")) == 1


def test_nothing_is_printed_to_a_pipe_but_the_report(fake_emulator, capsys):
    main(toy_stage(), [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (misspelt, ["'cta_snyc'", "kernels.py:"]),
        (
            partial(tma_copy, cols=12),
            ["T.tile.copy_async(As[0:32, 0:12]", "globalStrides[0]=24 must be a multiple of 16B"],
        ),
    ],
)
def test_a_kernel_that_tvm_refuses_is_a_message_and_no_traceback(fake_emulator, capsys, kernel, words):
    assert main(dataclasses.replace(toy_stage(), kernel=lambda config: kernel()), []) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words) and "Traceback" not in error and error.count("\n") < 20


def test_a_mismatch_exits_with_1_and_shows_where(fake_emulator, capsys):
    fake_emulator.break_result = lambda x, y: y[0, 7].fill_(-55)
    assert main(toy_stage(), []) == 1
    error = capsys.readouterr().err
    assert "wrong result" in error and "output[0, 7] is -55, expected" in error


def test_a_fault_of_the_emulator_exits_with_1_without_a_traceback(fake_emulator, capsys):
    fake_emulator.error = fake_emulator.EmulatorError("warp 3 waits for ever")
    assert main(toy_stage(), []) == 1
    error = capsys.readouterr().err
    assert error == "EmulatorError: warp 3 waits for ever\n"


def test_other_errors_are_not_hidden(fake_emulator):
    fake_emulator.error = KeyError("a bug")
    with pytest.raises(KeyError):
        main(toy_stage(), [])


@pytest.mark.parametrize("flags", [["--rows", "3"], ["--rows", "0"], ["--rows", "-2"]])
def test_bad_sizes_are_refused_before_anything_is_built(flags, capsys):
    def build_nothing(config):
        raise AssertionError("built")

    assert main(toy_stage(kernel=build_nothing), flags) == 2
    assert "bad size: rows is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json", "/nowhere/out.json"], "cannot write"),
        (["--json", "/"], "cannot write"),
        (["--dump", "ptx", "--json", "out.json"], "nothing for --json"),
        (["--seed", "-1"], "a seed is a number"),
        (["--seed", str(1 << 64)], "a seed is a number"),
        (["--seed", "x"], "a seed is a number"),
    ],
)
def test_flags_that_cannot_work_exit_with_2_before_anything_is_built(flags, message, capsys):
    def build_nothing(config):
        raise AssertionError("built")

    with pytest.raises(SystemExit) as stop:
        main(toy_stage(kernel=build_nothing), flags)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_unknown_flags_exit_with_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(toy_stage(), ["--dtype", "int8"])
    assert stop.value.code == 2


def test_cuda_without_a_gpu_exits_with_2(capsys):
    assert main(toy_stage(), ["--device", "cuda"]) == 2
    assert "use --device emulator" in capsys.readouterr().err


def test_a_gpu_that_cannot_run_the_stage_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr("common.device.find_gpu", lambda: Gpu("NVIDIA H200", (9, 0), 132, "580"))
    assert main(toy_stage(number=5, arch="sm_100a"), ["--device", "cuda"]) == 2
    assert "stage 05 needs sm_100a; this is an NVIDIA H200 (sm_90)" in capsys.readouterr().err


def test_a_schedule_means_the_emulator(monkeypatch, fake_emulator, capsys):
    monkeypatch.setattr("common.device.find_gpu", lambda: Gpu("NVIDIA H200", (9, 0), 132, "580"))
    assert main(toy_stage(), ["--schedule", "early"]) == 0
    assert "device: emulator (--schedule was given)" in capsys.readouterr().out
    assert main(toy_stage(), ["--schedule", "early", "--device", "cuda"]) == 2
    assert main(toy_stage(), ["--counters", "--device", "cuda"]) == 2


@pytest.mark.parametrize(
    ("form", "words"),
    [("tir", "def scale"), ("cuda", "__launch_bounds__"), ("ptx", ".entry scale_kernel"), ("sass", "EXIT")],
)
def test_dumps_print_the_text_alone(form, words, capsys):
    assert main(toy_stage(), ["--dump", form]) == 0
    out = capsys.readouterr().out
    assert words in out and "device:" not in out


def test_json_has_everything(fake_emulator, tmp_path):
    path = tmp_path / "out.json"
    assert main(toy_stage(), ["--quick", "--dtype", "float16", "--seed", "3", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["stage"] == {"number": 2, "title": "Toy", "arch": "sm_90a"}
    assert document["config"] == {"rows": 2, "flavour": "plain", "dtype": "float16", "sms": 148}
    assert document["device"]["kind"] == "emulator"
    assert document["built"]["registers"] > 0 and document["built"]["launch"]["kernel"] == "scale_kernel"
    assert document["built"]["launch"]["parameters"][0] == {"kind": "PointerParameter", "name": "X_ptr", "argument": 0}
    assert document["built"]["shape"]["grid"] == [1, 1, 1]
    (verified,) = document["verified"]
    assert (verified["schedule"], verified["seed"], verified["source"]) == ("late", 3, "emulated")
    assert verified["outputs"][0]["reference_dtype"] == "float64"
    counted = document["counted"]
    assert counted["bytes"] == {"global load": 4096}
    assert counted["roles"][1] == {"warps": [4, 4], "opcodes": {"st": 234}}
    assert counted["lines"][0]["source"] == "kernel.cu:1"
    assert counted["lines"][0]["sectors"] == counted["total"]["sectors"] == 4000
    assert counted["instructions"][0]["text"].startswith("ld.global")
    assert document["timed"] == []
    assert set(document["environment"]) == {"python", "machine", "torch", "tvm"}


def test_sizes_follow_the_scale():
    stage = toy_stage()
    assert [stage.config(scale=s).rows for s in ("default", "quick", "gpu")] == [6, 2, 1024]
    assert stage.config(scale="quick", rows=8).rows == 8


def test_a_config_knows_only_its_own_names():
    config = toy_stage().config()
    assert (config.itemsize, config.flavour) == (4, "plain")
    with pytest.raises(AttributeError, match="columns"):
        config.columns  # noqa: B018
    for wrong, words in (
        ({"columns": 3}, "no size or option named columns: it has flavour, rows"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"flavour": "odd"}, "flavour is 'odd': choose from"),
        ({"rows": 4.0}, "rows is 4.0: it must be an integer"),
        ({"rows": 0}, "rows is 0: it must be at least 1"),
    ):
        with pytest.raises(BadSize, match=words):
            toy_stage().config(**wrong)


def test_stage_build_gives_a_kernel():
    assert toy_stage().build(rows=4).launch_spec.kernel == "scale_kernel"


def test_help_lists_sizes_with_their_defaults(capsys):
    with pytest.raises(SystemExit):
        main(toy_stage(), ["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "rows of x (default 6, 1024 on a GPU, 2 with --quick)" in out


def test_a_script_runs_from_any_folder_and_a_closed_pipe_is_no_error(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from common.harness import run_stage\nfrom tests.common.kernels import toy_stage\nrun_stage(toy_stage())\n"
    )
    command = f"{sys.executable} {script} --dump ptx --device emulator | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_counters_come_by_line_of_the_generated_cuda(fake_emulator, capsys):
    assert main(toy_stage(), ["--counters", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "device: emulator (--counters was given)" in out
    header, _, line = out.strip().splitlines()[-3:]
    assert header.split() == ["line", "wavefronts", "ideal", "conflicts", "sectors", "ideal", "instructions", "text"]
    assert line.split()[:7] == ["kernel.cu:1", "0", "0", "0", "4,000", "3,000", "1,000"]
