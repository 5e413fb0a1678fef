"""One thread for NumPy's matrix products.

The products of one `tcgen05.mma` are small: a second BLAS thread gains nothing on an idle machine, and on a busy one
its spinning makes a product of 50 us take 2 ms. NumPy has no switch for it, but its wheels bundle an OpenBLAS that has
one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limits NumPy's BLAS to one thread for a while; does nothing where NumPy was built with another BLAS."""
    switch = _thread_switch()
    if switch is None:
        yield
        return
    get, put = switch
    before = get()
    put(1)
    try:
        yield
    finally:
        put(before)


@cache
def _thread_switch() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Getter and setter of the number of threads of the OpenBLAS in NumPy's wheel, if it is there."""
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            library = ctypes.CDLL(str(path))  # NumPy has loaded it already
            for prefix, suffix in (("scipy_", "64_"), ("", "64_"), ("scipy_", ""), ("", "")):
                get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
                put = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if get is not None and put is not None:
                    return get, put
    return None
