"""The compiler: what it is given does not depend on how it reads its headers."""

import pytest

from common import compiler

SOURCE = """
#include <cooperative_groups.h>
extern "C" __global__ void k(int* out) { out[cooperative_groups::this_thread_block().thread_rank()] = VALUE; }
"""


def test_kept_headers_give_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [SOURCE.replace("VALUE", value) for value in ("1", "2")]
    kept = [compiler.compile_cuda.__wrapped__(source, "sm_100a") for source in sources]
    monkeypatch.setattr(compiler, "_keeps_headers", False)
    read = compiler.compile_cuda.__wrapped__(sources[1], "sm_100a")
    assert (kept[1].ptx, kept[1].cubin) == (read.ptx, read.cubin) and kept[0].ptx != kept[1].ptx


@pytest.mark.parametrize("kept", [True, False])
def test_messages_have_the_lines_of_the_source(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    monkeypatch.setattr(compiler, "_keeps_headers", kept)
    with pytest.raises(compiler.CompileError, match=r"kernel.cu\(3\): error: identifier \"nothing\""):
        compiler.compile_cuda(SOURCE.replace("VALUE", "nothing"), "sm_100a")
