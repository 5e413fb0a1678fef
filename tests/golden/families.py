"""The families of cases, and the files with what a GPU made of them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import (
    cases_approximate,
    cases_arithmetic,
    cases_atomic,
    cases_bulk,
    cases_convert,
    cases_im2col,
    cases_integer,
    cases_matrix,
    cases_mbarrier,
    cases_tensormap,
    cases_tma,
    cases_warp,
    cases_wgmma,
    cases_wgmma_types,
)
from tests.golden.case import Case

FOLDER = Path(__file__).parent / "h200"
EXACT: dict[str, Callable[[], Iterator[Case]]] = {
    "integer": cases_integer.cases,
    "arithmetic": cases_arithmetic.cases,
    "convert": cases_convert.cases,
    "warp": cases_warp.cases,
    "atomic": cases_atomic.cases,
    "matrix": cases_matrix.cases,
    "wgmma": cases_wgmma.cases,
    "wgmma_types": cases_wgmma_types.cases,
    "mbarrier": cases_mbarrier.cases,
    "bulk": cases_bulk.cases,
    "tma": cases_tma.cases,
    "im2col": cases_im2col.cases,
    "tensormap": cases_tensormap.cases,
}
TOLERANT: dict[str, Callable[[], Iterator[Case]]] = {
    "rounded": cases_matrix.rounded_cases,
    "wgmma_rounded": cases_wgmma_types.rounded_cases,
    "approximate": cases_approximate.cases,
}
FAMILIES = EXACT | TOLERANT
KEPT_BYTES = 128  # of each exact result; of a tolerant one: 4096


@dataclass(frozen=True)
class Recorded:
    """What a GPU gave for one result: CRC-32 of all bytes, and the first of them."""

    crc: int
    first: bytes

    @staticmethod
    def of(data: np.ndarray, keep: int) -> Recorded:
        return Recorded(zlib.crc32(data.tobytes()), data[:keep].tobytes())


@dataclass(frozen=True)
class Golden:
    """A family as recorded: where and when, and by case its fingerprint and results by name."""

    provenance: dict[str, str]
    fingerprints: dict[str, int]
    results: dict[str, dict[str, Recorded]]

    def save(self, family: str) -> None:
        cases = {
            name: [self.fingerprints[name], {key: [r.crc, r.first.hex()] for key, r in results.items()}]
            for name, results in self.results.items()
        }
        text = json.dumps({"provenance": self.provenance, "cases": cases}, separators=(",", ":"))
        FOLDER.mkdir(exist_ok=True)
        _path(family).write_bytes(gzip.compress(text.encode(), 9, mtime=0))

    @staticmethod
    def load(family: str) -> Golden:
        """Raises FileNotFoundError for a family that has never been captured."""
        read: dict[str, Any] = json.loads(gzip.decompress(_path(family).read_bytes()))
        cases = read["cases"]
        return Golden(
            read["provenance"],
            {name: fingerprint for name, (fingerprint, _) in cases.items()},
            {
                name: {key: Recorded(crc, bytes.fromhex(first)) for key, (crc, first) in results.items()}
                for name, (_, results) in cases.items()
            },
        )


def _path(family: str) -> Path:
    return FOLDER / f"{family}.json.gz"


def kept_bytes(family: str) -> int:
    """Leading bytes of each result that are kept."""
    return 4096 if family in TOLERANT else KEPT_BYTES
