"""`build(prim_func)` -> `Kernel`: one TIRx function, every form of it, callable on a GPU or on the emulator."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, TCGen05Bar, TMABar
from tvm.script.parser.core.parser import ScriptMacro
from tvm.tirx import compilation_pipeline
from tvm.tirx.build import split_host_device_mods

from common.compiler import Compilation, CompileError, Resources, compile_cuda, disassemble
from common.launch_spec import LaunchSpec, bind, read_launch_spec
from common.stage import EMULATED_ARCH


def _find_parser(macro: ScriptMacro) -> Any:
    """The TIRx parser that is running, from the globals of a frame that has it.

    TVM finds it in the same way at each call of an inlined function, but reads the source of every frame on the way:
    that is four fifths of the time in which a kernel of many such functions is parsed.
    """
    frame = sys._getframe()
    while frame is not None:
        parser = frame.f_globals.get(macro.parser_object_name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError("an inlined TIRx function was called outside a kernel")


ScriptMacro._find_parser_def = _find_parser
# The file in which TVM evaluates expressions is of no module. `inspect` would look for it in all of them, each time.
inspect.modulesbyfile["<ast>"] = ""
# TVM wraps the constructor that these inherit once more, and then finds no memory of theirs to give a name to.
TMABar.__init__ = TCGen05Bar.__init__ = MBarrier.__init__


class LoweringError(CompileError):
    """TIRx cannot make instructions of an operation of the kernel; the message has the operation and the reasons."""


def _refusal(report: str) -> str:
    """TVM's report of an operation that it cannot lower, without the stack and the text of the whole kernel.

    The report is a table with the columns "variant" and "reason", and a reason has many lines: what was tried, the
    operation with its buffers, and where TVM keeps it, its own stack.
    """
    lines, in_stack = [], False
    for line in report.partition("\nError in pass:")[0].splitlines():
        if not line.startswith("|"):
            lines += [] if line.startswith("+") else [line]
            continue
        variant, reason = (cell.strip() for cell in line.rstrip().removesuffix("|")[1:].split("|", 1))
        in_stack = reason.startswith("Traceback") or (in_stack and not variant)
        if not in_stack and variant != "Variant":
            lines.append(f"  {variant}: {reason}" if variant else f"    {reason}")
    return "\n".join(lines).rstrip()


@dataclass
class Kernel:
    """A built kernel.

    `cuda_source` is what TVM generates, `launch_spec` how it is launched; `ptx`, `cubin` (bytes), `resources` and
    `sass()` come from one NVRTC run on first use. Calling it runs it: `kernel(a, b, d)`.
    """

    prim_func: tirx.PrimFunc
    arch: str
    cuda_source: str
    launch_spec: LaunchSpec
    _executable: Any = None

    def __repr__(self) -> str:
        return f"<Kernel {self.launch_spec.kernel} for {self.arch}>"

    @property
    def compilation(self) -> Compilation:
        return compile_cuda(self.cuda_source, self.arch)

    @property
    def ptx(self) -> str:
        return self.compilation.ptx

    @property
    def cubin(self) -> bytes:
        return self.compilation.cubin

    @cached_property
    def resources(self) -> Resources:
        """Registers, spills, stack and static SMEM as ptxas reports them."""
        return self.compilation.resources(self.launch_spec.kernel)

    @cached_property
    def _names(self) -> Any:
        """What the emulator's messages call arguments, barriers and tiles."""
        from common.kernel_names import read_names

        return read_names(self.prim_func, self.launch_spec)

    def sass(self) -> str:
        """The machine code, disassembled."""
        return disassemble(self.cubin)

    def tir(self) -> str:
        """The TIRx function as TVM prints it."""
        return self.prim_func.script()

    def __call__(self, *arguments: Any, **emulator_options: Any) -> Any:
        """Run on the device that holds the tensors; outputs are written in place.

        CUDA tensors: TVM's Executable, asynchronously on torch's current stream; returns None. CPU tensors and NumPy
        arrays: the emulator; `emulator_options` (schedule=, seed=) go to `Emulator`; returns its run. Raises
        ValueError for tensors on different devices, and TypeError or ValueError when they do not fit the kernel.
        """
        on_gpu = {bool(getattr(a, "is_cuda", False)) for a in arguments if hasattr(a, "shape")}
        if len(on_gpu) > 1:
            raise ValueError("some tensors are on the GPU and some on the CPU: put all of them on one device")
        if on_gpu == {True}:
            if emulator_options:
                raise TypeError(f"{', '.join(emulator_options)}: options of the emulator, but the tensors are on a GPU")
            self.executable(*arguments)
            return None
        return self._emulate(arguments, emulator_options)

    def _emulate(self, arguments: tuple, options: dict[str, Any]) -> Any:
        from common.emulator import Emulator

        launch = bind(self.launch_spec, arguments)
        shape = launch.shape
        return Emulator(**options).launch(
            self.ptx,
            launch.kernel,
            grid=shape.grid,
            block=shape.block,
            cluster=shape.cluster,
            shared_bytes=shape.shared_bytes,
            args=list(launch.args),
            names=self._names,
        )

    @property
    def executable(self) -> Any:
        """TVM's compiled host function with this very cubin in it. Needs a CUDA GPU to be called."""
        if self._executable is None:
            self._executable = _tvm_executable(self.prim_func, self.arch)
        return self._executable


def open_if_one(extent: int) -> int | tirx.Var:
    """An extent for the shape of a kernel's parameter: as it is, but 1 as a variable, which the tensor brings along.

    TIRx leaves an extent that it knows to be 1 out of a tensor map. Nothing would then fill the rest of a box.
    """
    return tirx.Var("one", "int32") if extent == 1 else extent


def _target(arch: str) -> tvm.target.Target:
    return tvm.target.Target({"kind": "cuda", "arch": arch})


def build(prim_func: tirx.PrimFunc, arch: str = EMULATED_ARCH) -> Kernel:
    """Lower a TIRx function for `arch` (`sm_90a` or `sm_100a`) and generate its CUDA source. Needs no GPU.

    Raises LoweringError for what TIRx cannot lower; compilation errors come on first use of `ptx` or `cubin`.
    """
    target = _target(arch)
    with target:
        module = tirx.transform.BindTarget(target.with_host("llvm"))(tvm.IRModule({"main": prim_func}))
        pipeline, _, finalize_device = compilation_pipeline.tirx_pipeline()
        try:
            lowered = pipeline(module)
        except RuntimeError as error:
            raise LoweringError(_refusal(str(error))) from None
        host, devices = split_host_device_mods(lowered)
        (device,) = devices.values()
        source = tvm.get_global_func("target.build.cuda")(finalize_device()(device), target).inspect_source()
    functions = {str(f.attrs["global_symbol"]): f for f in device.functions.values()}
    return Kernel(prim_func, arch, source, read_launch_spec(host, functions))


def _tvm_executable(prim_func: tirx.PrimFunc, arch: str) -> Any:
    """Compile through `tvm.compile`, with the compiler and the options of `common.compiler` in place of TVM's."""
    os.environ["TVM_CUDA_COMPILE_MODE"] = "nvrtc"
    tvm_ffi.register_global_func(
        "tvm_callback_cuda_compile", lambda source: compile_cuda(source, arch).cubin, override=True
    )
    target = _target(arch)
    with target:
        module = tvm.compile(tvm.IRModule({"main": prim_func}), target=target, tir_pipeline="tirx")
    return module[str(prim_func.attrs["global_symbol"])]
