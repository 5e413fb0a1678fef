"""Many instructions in one kernel: each thread loads its operands once, runs form after form and stores each result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.golden.case import HEADER, Buffer, Case, Result
from tests.golden.patterns import pattern

BLOCK = 1024
FORMS_PER_KERNEL = 24
_BYTES = {"pred": 4, "b16": 2, "b32": 4, "b64": 8}
_SCRATCH_BYTES = 32  # of global memory, and half of that of shared memory, for each thread


@dataclass(frozen=True)
class Form:
    """`text`: the instructions under test. `results`: registers they set (without %) and their types.

    `sources`: registers and (type, pattern name). At hand besides: %lane; %m, the address of 32 bytes of zeros in
    global memory; %s and %w, shared addresses of 16 bytes of the thread and of the 512 bytes of its warp.
    """

    name: str
    text: str
    results: dict[str, str]
    sources: dict[str, tuple[str, str]] = field(hash=False)

    @property
    def key(self) -> tuple:
        return tuple(sorted(self.sources.items()))


def one(instruction: str, result: str, **sources: tuple[str, str]) -> Form:
    """A form of one instruction with the destination %d, named after it."""
    operands = ", ".join(f"%{register}" for register in ("d", *sources))
    return Form(instruction, f"{instruction} {operands};", {"d": result}, sources)


def kernels(family: str, forms: Sequence[Form]) -> Iterator[Case]:
    """Cases that run the forms, those with equal sources together. Result names: the form's, then the register's."""
    names = [form.name for form in forms]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    groups: dict[tuple, list[Form]] = {}
    for form in forms:
        groups.setdefault(form.key, []).append(form)
    place = 0
    for group in groups.values():
        for first in range(0, len(group), FORMS_PER_KERNEL):
            yield _case(f"{family}{place}", group[first : first + FORMS_PER_KERNEL])
            place += 1


def _case(name: str, forms: list[Form]) -> Case:
    sources = forms[0].sources
    inputs = [pattern(chosen) for _, chosen in sources.values()]
    threads = max(len(values) for values in inputs)
    block = min(BLOCK, threads)
    text = "".join(form.text for form in forms)
    uses_memory, uses_shared = "%m" in text, "%s" in text or "%w" in text
    buffers = [Buffer(np.resize(values, threads).view(np.uint8)) for values in inputs]
    if uses_memory:
        buffers.append(Buffer(np.zeros(threads * _SCRATCH_BYTES, np.uint8)))
    results, stores, start = [], [], 0
    for form in forms:
        lines = [f"// {form.name}", "{", *(f".reg .{kind} %{register};" for register, kind in form.results.items())]
        lines.append(form.text)
        for register, kind in form.results.items():
            label = form.name if len(form.results) == 1 else f"{form.name} %{register}"
            lines.append(_store(register, kind, start))
            results.append(Result(label, len(buffers), start, threads * _BYTES[kind]))
            start += threads * _BYTES[kind]
        stores.append("\n".join((*lines, "}")))
    buffers.append(Buffer(np.zeros(start, np.uint8)))
    ptx = _program(name, sources, stores, block, uses_memory, uses_shared)
    return Case(name, ptx, name, tuple(buffers), tuple(results), grid=threads // block, block=block)


def _store(register: str, kind: str, start: int) -> str:
    if kind == "pred":
        return f"{{ .reg .b32 %bit; selp.b32 %bit, 1, 0, %{register}; st.global.b32 [%out4+{start}], %bit; }}"
    return f"st.global.{kind} [%out{_BYTES[kind]}+{start}], %{register};"


def _program(
    name: str, sources: dict[str, tuple[str, str]], stores: list[str], block: int, memory: bool, shared: bool
) -> str:
    params = [f".param .u64 in_{register}" for register in sources]
    params += [".param .u64 in_scratch"] if memory else []
    lines = [
        f"{HEADER}.visible .entry {name}({', '.join((*params, '.param .u64 out'))})",
        "{",
        ".reg .b32 %i, %block, %cta, %thread, %lane, %s, %w; .reg .b64 %m, %p, %o, %out2, %out4, %out8;",
        *(f".reg .{kind} %{register};" for register, (kind, _) in sources.items()),
        f".shared .align 16 .b8 scratch[{16 * block}];" if shared else "",
        "mov.u32 %thread, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %block, %ntid.x;",
        "mad.lo.u32 %i, %cta, %block, %thread; and.b32 %lane, %thread, 31;",
        "ld.param.u64 %p, [out]; cvta.to.global.u64 %p, %p;",
        *(f"mul.wide.u32 %o, %i, {width}; add.u64 %out{width}, %p, %o;" for width in (2, 4, 8)),
    ]
    for register, (kind, _) in sources.items():
        lines.append(f"ld.param.u64 %p, [in_{register}]; cvta.to.global.u64 %p, %p;")
        lines.append(f"mul.wide.u32 %o, %i, {_BYTES[kind]}; add.u64 %p, %p, %o; ld.global.{kind} %{register}, [%p];")
    if memory:
        lines.append("ld.param.u64 %p, [in_scratch]; cvta.to.global.u64 %p, %p;")
        lines.append(f"mul.wide.u32 %o, %i, {_SCRATCH_BYTES}; add.u64 %m, %p, %o;")
    if shared:
        lines.append("mov.u32 %w, scratch; mad.lo.u32 %s, %thread, 16, %w;")
        lines.append("and.b32 %i, %thread, 0xffffffe0; mad.lo.u32 %w, %i, 16, %w;")
    return "\n".join((*lines, *stores, "ret;", "}", ""))
