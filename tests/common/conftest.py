import sys
import types
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from common.emulator.machine.counters import Figures, Role


@dataclass
class FakeEmulator:
    """Stands in for `common.emulator`: records launches and computes `tests.common.kernels.scale` in NumPy.

    `break_result(y)` may spoil the output, `error` is raised by every launch.
    """

    launches: list = field(default_factory=list)
    break_result: object = None
    error: Exception | None = None

    def launch(self, options, ptx, kernel, **launch):
        self.launches.append({"options": options, "ptx": ptx, "kernel": kernel, **launch})
        if self.error is not None:
            raise self.error
        if kernel == "scale_kernel":
            x, y, w, _, n, s = launch["args"]
            y.copy_((x.float() * w.float() * np.float32(s) + n).to(y.dtype))
            if self.break_result:
                self.break_result(x, y)
        return SimpleNamespace(counters=FakeCounters())


class FakeCounters:
    warp_instructions = 1234
    bytes = {"global load": 4096}
    events = {"barrier waits": 2}
    flops = {"fp32 fma": 2048}
    _load = Figures(instructions=1000, global_requests=1000, sectors=4000, ideal_sectors=3000)

    def by_opcode(self):
        return Counter({"ld": 1000, "st": 234})

    def roles(self):
        return [Role(0, 3, Counter({"ld": 1000})), Role(4, 4, Counter({"st": 234}))]

    def total(self):
        return self._load

    def by_source(self):
        return {"kernel.cu:1": self._load}

    def by_instruction(self):
        return [(SimpleNamespace(line=7, source="kernel.cu:1", text="ld.global.u32 %r1, [%rd1];"), self._load)]


@pytest.fixture
def fake_emulator(monkeypatch):
    """`common.emulator` replaced by a recorder for one test."""
    fake = FakeEmulator()

    class Emulator:
        def __init__(self, **options):
            self.options = options

        def launch(self, ptx, kernel, **launch):
            return fake.launch(self.options, ptx, kernel, **launch)

    class EmulatorError(Exception):
        pass

    def tensor_map(*args, **options):
        return SimpleNamespace(args=args, **options)

    module = types.ModuleType("common.emulator")
    module.Emulator, module.TensorMap = Emulator, tensor_map
    faults = types.ModuleType("common.emulator.faults")
    faults.EmulatorError = fake.EmulatorError = EmulatorError
    monkeypatch.setitem(sys.modules, "common.emulator", module)
    monkeypatch.setitem(sys.modules, "common.emulator.faults", faults)
    return fake


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU, wherever the tests run."""
    monkeypatch.setattr("common.device.find_gpu", lambda: None)
