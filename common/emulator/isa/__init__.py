"""One file per instruction family. Importing this package registers every decoder."""

from __future__ import annotations

import importlib
import pkgutil

SUPPORT = {"registry", "binder"}


def load_families() -> None:
    """Imports every family module, so that its decoders are registered."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in SUPPORT:
            importlib.import_module(f"{__name__}.{module.name}")
