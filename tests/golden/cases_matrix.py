"""mma.sync of every type and shape, and the moves of matrices: ldmatrix, stmatrix, movmatrix.

`cases()` has operands whose products and sums are exact, so that no order of summation shows; `rounded_cases()` has
random ones, to be compared within a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.golden.case import Case
from tests.golden.elementwise import Form, kernels

# Largest difference of the rounded cases, whose sums are below 256, by accumulator. With products of FP8 an H200 rounds
# f16 accumulators several times on the way.
TOLERANCE = {"f32": 2.0**-15, "f16": 2.0**-3}

_FP8, _INT8, _INT4 = ("e4m3", "e5m2"), ("s8", "u8"), ("s4", "u4")
_REGISTERS = {
    "f16": "f16x2", "bf16": "bf16x2", "tf32": "tf32", "f64": "f64", "e4m3": "e4m3x4", "e5m2": "e5m2x4",
}  # fmt: skip
_PER_REGISTER = {
    "f16": 2, "bf16": 2, "tf32": 1, "f64": 1, **dict.fromkeys((*_FP8, *_INT8), 4), **dict.fromkeys(_INT4, 8),
}  # fmt: skip
_ROW = ".reg .b32 %row; mad.lo.u32 %row, %lane, 5, 3; and.b32 %row, %row, 31; mad.lo.u32 %row, %row, 16, %w;"
_WORDS = {register: ("b32", f"u32:{place}") for place, register in enumerate("abce")}


@dataclass(frozen=True)
class Product:
    """One form of mma: rows x 8 x k, types of A and B and of the accumulators, and what follows the types."""

    rows: int
    k: int
    a: str
    b: str
    accumulator: str
    saturate: bool = False

    @property
    def instruction(self) -> str:
        saturate = ".satfinite" if self.saturate else ""
        types = f"{self.accumulator}.{self.a}.{self.b}.{self.accumulator}"
        return f"mma.sync.aligned.m{self.rows}n8k{self.k}.row.col{saturate}.{types}"

    def form(self, numbers: str) -> Form:
        """`numbers`: exact, special or moderate."""
        a, b = (self.k // (4 * _PER_REGISTER[kind]) for kind in (self.a, self.b))
        down = self.rows // 8
        c = down if self.accumulator == "f16" else 2 * down
        storage = "b64" if self.accumulator == "f64" else "b32"
        declared = "f64" if self.accumulator == "f64" else storage
        kinds = [self.a] * (a * down) + [self.b] * b + [self.accumulator] * c
        names = [f"{part}{i}" for part, count in (("a", a * down), ("b", b), ("c", c)) for i in range(count)]
        sources = {
            name: (storage, _operand(kind, place, numbers)) for place, (name, kind) in enumerate(zip(names, kinds))
        }
        results = [f"d{place}" for place in range(c)]
        lists = ["{" + ", ".join(f"%{name}" for name in part) + "}" for part in (results, *_split(names))]
        text = f"{self.instruction} {', '.join(lists)};"
        name = self.instruction + (" of infinities and NaNs" if numbers == "special" else "")
        return Form(name, text, dict.fromkeys(results, declared if declared != "f64" else "b64"), sources)


def _split(names: list[str]) -> list[list[str]]:
    return [[name for name in names if name[0] == part] for part in "abc"]


def _operand(kind: str, seed: int, numbers: str) -> str:
    if kind in ("s32", *_INT8, *_INT4):
        return f"u32:{seed}"
    return f"{numbers} {'tf32' if kind == 'f32' else _REGISTERS[kind]}:{seed}"


def _floats() -> Iterator[Product]:
    for k in (8, 16):
        for accumulator in ("f16", "f32"):
            yield Product(16, k, "f16", "f16", accumulator)
        yield Product(16, k, "bf16", "bf16", "f32")
    for k in (4, 8):
        yield Product(16, k, "tf32", "tf32", "f32")
    for a in _FP8:
        for b in _FP8:
            for k in (16, 32):
                for accumulator in ("f16", "f32"):
                    yield Product(16, k, a, b, accumulator)


def _integers() -> Iterator[Product]:
    for kinds, shapes in ((_INT8, ((8, 16), (16, 16), (16, 32))), (_INT4, ((8, 32), (16, 32), (16, 64)))):
        for a in kinds:
            for b in kinds:
                for rows, k in shapes:
                    for saturate in (False, True):
                        yield Product(rows, k, a, b, "s32", saturate)


def _doubles() -> Iterator[Product]:
    for rows, k in ((8, 4), (16, 4), (16, 8), (16, 16)):
        yield Product(rows, k, "f64", "f64", "f64")


def _moves() -> Iterator[Form]:
    """Each thread writes the row of its lane; the instruction addresses the rows in another order."""
    whole = ("mov.b32 %d, 0; mov.b32 %f, 0; mov.b32 %g, 0; mov.b32 %h, 0;", dict.fromkeys("dfgh", "b32"))
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            registers = ", ".join(f"%{name}" for name in "dfgh"[:count])
            load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%row];"
            text = f"{_ROW}{whole[0]} st.shared.v4.b32 [%s], {{%a, %b, %c, %e}}; bar.warp.sync 0xffffffff; {load}"
            yield Form(f"ldmatrix.x{count}{trans}", f"{text} bar.warp.sync 0xffffffff;", whole[1], _WORDS)
            registers = ", ".join(f"%{name}" for name in "abce"[:count])
            store = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%row], {{{registers}}};"
            text = (
                f"{_ROW} st.shared.v4.b32 [%s], {{%e, %c, %b, %a}}; bar.warp.sync 0xffffffff; {store} "
                "bar.warp.sync 0xffffffff; ld.shared.v4.b32 {%d, %f, %g, %h}, [%s]; bar.warp.sync 0xffffffff;"
            )
            yield Form(f"stmatrix.x{count}{trans}", text, whole[1], _WORDS)
    yield Form("movmatrix", "movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;", {"d": "b32"}, _WORDS)


def cases() -> Iterator[Case]:
    products = [*_floats(), *_integers(), *_doubles()]
    special = [product.form("special") for product in _floats()]
    return kernels("matrix", [*_moves(), *(product.form("exact") for product in products), *special])


def rounded_cases() -> Iterator[Case]:
    return kernels("rounded", [product.form("moderate") for product in _floats()])
