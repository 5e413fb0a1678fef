import os
import re

import pytest
import torch

from common import compiler
from common.build import LoweringError, build
from common.compiler import CompileError, compile_cuda, parse_resources
from tests.common.kernels import COLS, scale, tma_copy

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_100a'
ptxas info    : Function properties for first
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_100a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 17 registers, used 0 barriers
"""


@pytest.fixture(scope="module")
def kernel():
    return build(scale())


def test_every_form_of_a_kernel(kernel):
    assert "scale_kernel" in kernel.cuda_source
    assert ".target sm_100a" in kernel.ptx and ".visible .entry scale_kernel" in kernel.ptx
    assert kernel.cubin[:4] == b"\x7fELF"
    assert "STG" in kernel.sass()
    assert "def scale" in kernel.tir()
    assert kernel.resources.registers > 0 and kernel.resources.spill_store_bytes == 0


def test_a_kernel_is_shown_by_its_name_and_not_by_its_text(kernel):
    assert repr(kernel) == "<Kernel scale_kernel for sm_100a>"


def test_an_operation_that_tirx_cannot_lower_is_a_message_of_a_few_lines():
    with pytest.raises(LoweringError) as caught:
        build(tma_copy(cols=12))  # rows of 24 bytes, where TMA takes multiples of 16
    message = str(caught.value)
    assert message.startswith("TIRx schedule dispatch failed: op=tirx.tile.copy_async")
    assert "\n  tma_auto (prio=10): " in message and "T.tile.copy_async(As[0:32, 0:12]" in message
    assert not re.search(r"Traceback|Error in pass|I\.ir_module|\+--|\|", message)
    assert message.count("\n") < 20


def test_a_refusal_of_the_compiler_is_not_lost_among_warnings_about_what_tvm_generates():
    assert "warning" not in build(tma_copy()).compilation.log


def test_line_information_counts_the_lines_of_the_cuda_source(kernel):
    number = int(re.search(r"\.file\s+(\d+)\s+\"kernel\.cu\"", kernel.ptx).group(1))
    lines = {int(m) for m in re.findall(rf"\.loc\s+{number}\s+(\d+)", kernel.ptx)}
    source = kernel.cuda_source.splitlines()
    body = next(i for i, line in enumerate(source, 1) if "scale_kernel(" in line and line.rstrip().endswith("{"))
    assert lines and min(lines) >= body and max(lines) <= len(source)


def test_builds_for_hopper():
    kernel = build(tma_copy(), arch="sm_90a")
    assert ".target sm_90a" in kernel.ptx and "cp.async.bulk.tensor.2d" in kernel.ptx


def test_compiles_once_per_source(kernel):
    before = compile_cuda.cache_info().misses
    build(scale()).resources  # noqa: B018
    assert compile_cuda.cache_info().misses - before <= 1
    build(scale()).resources  # noqa: B018
    assert compile_cuda.cache_info().misses - before <= 1


def test_resources_of_each_entry():
    first, second = parse_resources(LOG, "first"), parse_resources(LOG, "second")
    assert (first.registers, first.spill_store_bytes, first.spill_load_bytes) == (40, 8, 12)
    assert (first.stack_bytes, first.static_shared_bytes) == (16, 2048)
    assert (second.registers, second.static_shared_bytes) == (17, 0)
    with pytest.raises(CompileError, match="third"):
        parse_resources(LOG, "third")


def test_a_compile_error_shows_the_compilers_log():
    with pytest.raises(CompileError, match=r"kernel\.cu\(2\)"):
        compile_cuda("__global__ void f() {\n  not_a_thing;\n}\n", "sm_100a")


def test_a_compiler_on_path_is_not_picked_up(monkeypatch, tmp_path):
    trap = tmp_path / "nvcc"
    trap.write_text("#!/bin/sh\nexit 1\n")
    trap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    compiler.toolkit.cache_clear()
    if compiler.pip_toolkit() is None:
        pytest.skip("this Python has no CUDA toolkit from pip")
    assert compiler.toolkit() == (compiler.pip_toolkit(), True)


def test_cpu_tensors_go_to_the_emulator(kernel, fake_emulator):
    x, w, y = torch.randn(5, COLS), torch.randn(COLS), torch.zeros(5, COLS)
    run = kernel(x, w, 1.5, 3, y, schedule="random", seed=7)
    (launch,) = fake_emulator.launches
    assert launch["options"] == {"schedule": "random", "seed": 7}
    assert (launch["kernel"], launch["grid"], launch["block"]) == ("scale_kernel", (3, 1, 1), (256, 1, 1))
    assert launch["ptx"] == kernel.ptx
    assert run.counters.warp_instructions == 1234
    torch.testing.assert_close(y, x * w * 1.5 + 3)


def test_the_emulator_computes_the_kernel(kernel):
    x, w, y = torch.randn(5, COLS), torch.randn(COLS), torch.full((5, COLS), float("nan"))
    run = kernel(x, w, 1.5, 3, y, schedule="late", seed=0)
    torch.testing.assert_close(y, x * w * 1.5 + 3)
    assert run.counters.by_opcode()["st"] > 0


def test_tensors_on_two_devices_are_refused(kernel):
    class OnGpu:
        is_cuda, shape = True, (5, COLS)

    with pytest.raises(ValueError, match="one device"):
        kernel(OnGpu(), torch.zeros(COLS), 1.5, 3, torch.zeros(5, COLS))
