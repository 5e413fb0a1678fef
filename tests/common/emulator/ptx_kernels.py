"""Tiny kernels for tests of single instructions: lanes load inputs, run some lines of PTX and store the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.emulator import Emulator
from common.emulator.isa.binder import dtype_of

UNWRITTEN = 0xAB  # byte pattern of an output that the kernel never stored


def run_lanes(
    body: str,
    inputs: Mapping[str, tuple[str, Any]],
    outputs: Mapping[str, str],
    *,
    lanes: int = 0,
    schedule: str = "early",
    seed: int = 0,
    directives: str = "",
    variables: str = "",
) -> dict[str, np.ndarray]:
    """Runs `body` in one CTA and returns the outputs by name.

    `inputs` maps a name to (PTX type, values): one value per lane, or a scalar that every lane gets. The body sees them
    as registers `%name`, and assigns the registers of `outputs` (name to PTX type). It may declare further registers
    with `.reg`; it must fall through to its end in lanes whose outputs count. There are as many lanes as the first
    array has values, or `lanes`.

    Types: the names of `DTYPES` (`pred` is a bool array, 8-bit types live in 16-bit registers, f16 arrays are
    np.float16, bf16 and packed types are their bits); b128 values are (lanes, 2) uint64. `directives` stand between the
    kernel's parameter list and its body (`.maxnreg 64`), `variables` before the kernel (`.global .u32 x[4];`).
    """
    count = lanes or next((len(values) for _, values in inputs.values() if np.ndim(values)), 32)
    arguments = [_lane_values(kind, values, count) for kind, values in inputs.values()]
    results = [_unwritten(kind, count) for kind in outputs.values()]
    text = kernel_text(body, {name: kind for name, (kind, _) in inputs.items()}, outputs, directives, variables)
    Emulator(schedule, seed).launch(text, "lanes", grid=1, block=count, args=arguments + results)
    return {
        name: result.astype(bool) if kind == "pred" else result
        for (name, kind), result in zip(outputs.items(), results)
    }


def kernel_text(
    body: str, inputs: Mapping[str, str], outputs: Mapping[str, str], directives: str = "", variables: str = ""
) -> str:
    """The PTX module that `run_lanes` runs; its kernel is called `lanes`."""
    names = [*inputs, *outputs]
    kinds = [*inputs.values(), *outputs.values()]
    parameters = ", ".join(f".param .u64 p_{name}" for name in names)
    registers = "\n".join(f"  .reg .{_register_type(kind)} %{name};" for name, kind in zip(names, kinds))
    addresses = "\n".join(_address(name, _width(kind)) for name, kind in zip(names, kinds))
    loads = "\n".join(_load(name, kind) for name, kind in inputs.items())
    stores = "\n".join(_store(name, kind) for name, kind in outputs.items())
    return f"""
.version 9.0
.target sm_100a
.address_size 64
{variables}
.visible .entry lanes({parameters}) {directives}
{{
  .reg .u32 %lane_;
  .reg .b16 %byte_;
  .reg .pred %bit_;
  .reg .b64 %low_, %high_, %offset_, {", ".join(f"%at_{name}" for name in names)};
{registers}
  mov.u32 %lane_, %tid.x;
{addresses}
{loads}
  {{
{body}
  }}
{stores}
  ret;
}}
"""


def assert_bits_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    """Fails with the first differing lanes unless the two arrays have the same type and the same bits."""
    assert actual.dtype == expected.dtype, f"{actual.dtype} != {expected.dtype}"
    if actual.dtype == bool:
        np.testing.assert_array_equal(actual, expected)
        return
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[actual.dtype.itemsize]
    np.testing.assert_array_equal(np.ascontiguousarray(actual).view(bits), np.ascontiguousarray(expected).view(bits))


def _lane_values(kind: str, values: Any, count: int) -> np.ndarray:
    dtype = np.dtype(np.uint8) if kind == "pred" else dtype_of(kind)
    shape = (count, 2) if kind == "b128" else (count,)
    array = np.asarray(values)
    if array.dtype.kind in "iuO" and dtype.kind in "iu":  # Python integers wrap to the width
        mask = (1 << (8 * dtype.itemsize)) - 1
        array = (np.atleast_1d(array).astype(object) & mask).astype(f"u{dtype.itemsize}").view(dtype)
    return np.ascontiguousarray(np.broadcast_to(array.astype(dtype), shape))


def _unwritten(kind: str, count: int) -> np.ndarray:
    dtype = np.dtype(np.uint8) if kind == "pred" else dtype_of(kind)
    array = np.empty((count, 2) if kind == "b128" else count, dtype)
    array.view(np.uint8)[...] = UNWRITTEN
    return array


def _width(kind: str) -> int:
    return {"pred": 1, "b128": 16}.get(kind) or dtype_of(kind).itemsize


def _register_type(kind: str) -> str:
    if kind in ("pred", "b128", "f32", "f64"):
        return kind
    return f"b{max(16, 8 * _width(kind))}"


def _address(name: str, width: int) -> str:
    return (
        f"  ld.param.u64 %at_{name}, [p_{name}];\n"
        f"  mul.wide.u32 %offset_, %lane_, {width};\n"
        f"  add.s64 %at_{name}, %at_{name}, %offset_;"
    )


def _load(name: str, kind: str) -> str:
    if kind == "pred":
        return f"  ld.global.u8 %byte_, [%at_{name}];\n  setp.ne.b16 %{name}, %byte_, 0;"
    if kind == "b128":
        return f"  ld.global.v2.b64 {{%low_, %high_}}, [%at_{name}];\n  mov.b128 %{name}, {{%low_, %high_}};"
    return f"  ld.global.b{8 * _width(kind)} %{name}, [%at_{name}];"


def _store(name: str, kind: str) -> str:
    if kind == "pred":
        return f"  selp.b16 %byte_, 1, 0, %{name};\n  st.global.u8 [%at_{name}], %byte_;"
    if kind == "b128":
        return f"  mov.b128 {{%low_, %high_}}, %{name};\n  st.global.v2.b64 [%at_{name}], {{%low_, %high_}};"
    return f"  st.global.b{8 * _width(kind)} [%at_{name}], %{name};"
