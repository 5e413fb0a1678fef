"""atom and red: every operation and type, in global and shared memory, one thread per address and a warp per address.

One thread per address shows the old value and what memory holds afterwards; a warp on one address shows the latter, for
operations whose result does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.elementwise import Form, kernels

_INTEGERS = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
}
_FLOATS = {"f32": "b32", "f64": "b64", "f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}
_SPACES = {"global": "%m", "shared": "%s"}
_PAIRS = [f"{register}{place}" for register in "ab" for place in range(4)]


def _add(kind: str) -> str:
    return f"add.{kind}" if kind in ("f32", "f64") else f"add.noftz.{kind}"


def _single() -> Iterator[Form]:
    """(operation with type, storage, pattern kind) for each that takes one value."""
    operations = [(f"{op}.{kind}", f"b{kind[1:]}", f"u{kind[1:]}") for op, kinds in _INTEGERS.items() for kind in kinds]
    operations += [(_add(kind), storage, kind) for kind, storage in _FLOATS.items()]
    for space, address in _SPACES.items():
        for kind, storage in _FLOATS.items():
            sources = {"a": (storage, f"nan {kind}:0"), "b": (storage, f"nan {kind}:1")}
            text = f"st.{space}.{storage} [{address}], %a; atom.{space}.{_add(kind)} %d, [{address}], %b;"
            text += f"ld.{space}.{storage} %e, [{address}];"
            yield Form(f"atom.{space}.{_add(kind)} of NaNs", text, {"d": storage, "e": storage}, sources)
        for operation, storage, numbers in operations:
            sources = {"a": (storage, f"{numbers}:0"), "b": (storage, f"{numbers}:1")}
            begin, end = f"st.{space}.{storage} [{address}], %a;", f"ld.{space}.{storage} %e, [{address}];"
            text = f"{begin} atom.{space}.{operation} %d, [{address}], %b; {end}"
            yield Form(f"atom.{space}.{operation}", text, {"d": storage, "e": storage}, sources)
            if not operation.startswith("exch"):
                text = f"{begin} red.{space}.{operation} [{address}], %b; {end}"
                yield Form(f"red.{space}.{operation}", text, {"e": storage}, sources)


def _compare_and_swap() -> Iterator[Form]:
    for space, address in _SPACES.items():
        for storage in ("b16", "b32", "b64"):
            convert = "mov.b32 %x, %a; mov.b32 %y, %b; mov.b32 %z, %c;"
            if storage != "b32":
                convert = "".join(f"cvt.u{storage[1:]}.u32 %{to}, %{of};" for to, of in zip("xyz", "abc"))
            text = (
                f".reg .{storage} %x, %y, %z; {convert} st.{space}.{storage} [{address}], %x; "
                f"atom.{space}.cas.{storage} %d, [{address}], %y, %z; ld.{space}.{storage} %e, [{address}];"
            )
            sources = {"a": ("b32", "seen32:0"), "b": ("b32", "seen32:1"), "c": ("b32", "u32:2")}
            yield Form(f"atom.{space}.cas.{storage}", text, {"d": storage, "e": storage}, sources)
        for operation, values in (("exch", "%new"), ("cas", "%cmp, %new")):
            text = (
                ".reg .b64 %k, %l; .reg .b128 %cmp, %new, %old; cvt.u64.u32 %k, %a; cvt.u64.u32 %l, %b; "
                "mov.b128 %cmp, {%l, %k}; mov.b128 %new, {%c, %l};"
                f"st.{space}.v2.b64 [{address}], {{%k, %k}}; "
                f"atom.{space}.{operation}.b128 %old, [{address}], {values}; mov.b128 {{%d, %e}}, %old; "
                f"ld.{space}.v2.b64 {{%f, %g}}, [{address}];"
            )
            sources = {"a": ("b32", "seen32:0"), "b": ("b32", "seen32:1"), "c": ("b64", "u64:2")}
            yield Form(f"atom.{space}.{operation}.b128", text, dict.fromkeys("defg", "b64"), sources)


def _vectors() -> Iterator[Form]:
    """Global memory alone has them. Old values are compared for two elements, memory for all 16 bytes."""
    for kind, width, count in (("f32", 32, 2), ("f32", 32, 4)):
        yield _vector("add", kind, width, count)
    for half in ("f16", "bf16"):
        for operation in ("add.noftz", "min.noftz", "max.noftz"):
            for count in (2, 4, 8):
                yield _vector(operation, half, 16, count)
            for count in (2, 4):
                yield _vector(operation, f"{half}x2", 32, count)


def _vector(operation: str, kind: str, width: int, count: int) -> Form:
    numbers = kind if kind == "f32" else f"{kind.removesuffix('x2')}x2"
    sources = {register: ("b32", f"{numbers}:{place}") for place, register in enumerate(_PAIRS)}
    if width == 32:
        values, declare = [f"%b{place}" for place in range(count)], ""
    else:
        values = [f"%h{place}" for place in range(count)]
        declare = f".reg .b16 %h<{max(count, 2)}>, %old<{count}>;"
        declare += "".join(f"mov.b32 {{%h{2 * pair}, %h{2 * pair + 1}}}, %b{pair};" for pair in range(count // 2))
    olds = [f"%old{place}" for place in range(count)]
    declare += f".reg .b32 %old<{count}>;" if width == 32 else ""
    keep = "mov.b32 %d, %old0; mov.b32 %e, %old1;" if width == 32 else "mov.b32 %d, {%old0, %old1}; mov.b32 %e, %d;"
    name = f"atom.global.v{count}.{kind}.{operation}"
    text = (
        f"{declare} st.global.v4.b32 [%m], {{%a0, %a1, %a2, %a3}}; "
        f"atom.global.{operation.split('.')[0]}{'.noftz' if 'noftz' in operation else ''}.v{count}.{kind} "
        f"{{{', '.join(olds)}}}, [%m], {{{', '.join(values)}}}; {keep} "
        "ld.global.v4.b32 {%f, %g, %h, %j}, [%m];"
    )
    return Form(name, text, dict.fromkeys("defghj", "b32"), sources)


def _contended() -> Iterator[Form]:
    """All 32 lanes on the first word of their warp's memory."""
    warp_address = ".reg .b64 %q; cvt.u64.u32 %q, %lane; shl.b64 %q, %q, 5; sub.s64 %q, %m, %q;"
    for space, address, prepare in (("global", "%q", warp_address), ("shared", "%w", "")):
        for operation, kinds in _INTEGERS.items():
            if operation == "exch":
                continue
            for kind in kinds:
                storage = f"b{kind[1:]}"
                sources = {"a": (storage, f"u{kind[1:]}:0"), "b": (storage, f"u{kind[1:]}:1")}
                if operation in ("inc", "dec"):  # one bound for the warp: the order does not matter then
                    sources["b"] = ("b32", "lane32:1")
                yield _on_one_address(space, address, prepare, f"{operation}.{kind}", storage, "%b", sources)
        for half in ("f16x2", "bf16x2"):
            small = (
                f"{prepare} .reg .b16 %h; .reg .b32 %v; and.b32 %v, %b, 3; cvt.rn.{half[:-2]}.u32 %h, %v; "
                "mov.b32 %v, {%h, %h};"
            )
            sources = {"a": ("b32", "lane32:0"), "b": ("b32", "u32:1")}
            yield _on_one_address(space, address, small, f"add.noftz.{half}", "b32", "%v", sources, "0")


def _on_one_address(
    space: str, address: str, prepare: str, operation: str, storage: str, value: str, sources: dict, first: str = "%a"
) -> Form:
    text = (
        f"{prepare} .reg .pred %leads; setp.eq.u32 %leads, %lane, 0; "
        f"@%leads st.{space}.{storage} [{address}], {first}; "
        f"bar.warp.sync 0xffffffff; red.{space}.{operation} [{address}], {value}; bar.warp.sync 0xffffffff; "
        f"ld.{space}.{storage} %d, [{address}]; bar.warp.sync 0xffffffff;"
    )
    return Form(f"red.{space}.{operation} by a warp", text, {"d": storage}, sources)


def cases() -> Iterator[Case]:
    return kernels("atomic", [*_single(), *_compare_and_swap(), *_vectors(), *_contended()])
