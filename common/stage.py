"""Records that describe one lesson: what it builds, at which sizes, and what its result is compared with.

A stage script defines one `Stage` and hands it to `common.harness.run_stage`:

```python
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.harness import BadSize, Size, Stage, Tolerance, run_stage

STAGE = Stage(
    number=2,
    title="Memory and TMA",
    arch="sm_90a",
    sizes=[Size("rows", default=1000, quick=64, help="rows of x"), Size("cols", default=4096, quick=512)],
    dtypes=["float16", "bfloat16", "float32"],
    check=check,          # check(config): raises BadSize naming the rule that a size breaks
    kernel=make_kernel,   # make_kernel(config) -> prim_func
    inputs=make_inputs,   # make_inputs(config, generator) -> tensors and Python numbers, the kernel's first parameters;
                          # torch.randn(..., generator=generator, device=generator.device)
    outputs=outputs,      # outputs(config) -> [(shape, torch dtype), ...], the last parameters of the kernel
    reference=reference,  # reference(config, *inputs) -> one float32 or float64 tensor per output
    tolerance=lambda config: Tolerance(terms=config.cols),   # from common.harness; or one Tolerance(...) for all
    bytes_moved=lambda config: 2 * config.rows * config.cols * config.itemsize,
    baselines={"torch rms_norm": lambda config, *inputs: ...},
)

if __name__ == "__main__":
    run_stage(STAGE)
```

`config.rows`, `config.cols` and every option read as attributes; `config.dtype` is the TIRx name of the element type,
`config.torch_dtype` the torch one, `config.itemsize` its bytes, `config.sms` the number of SMs of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from common.build import Kernel

# The GPU that is emulated: a B200.
B200_SMS = 148
EMULATED_ARCH = "sm_100a"


class BadSize(ValueError):
    """A size or a combination of sizes that the kernel cannot take; the message names the rule it breaks."""


@dataclass(frozen=True)
class Size:
    """One integer size of a stage, `--name` on the command line.

    `default` is what the emulator verifies in seconds, `quick` what `--quick` takes, `gpu` what is timed on a GPU
    (`default` when not given).
    """

    name: str
    default: int
    quick: int | None = None
    gpu: int | None = None
    help: str = ""
    minimum: int = 1

    def at(self, scale: str) -> int:
        """The size to take when none is given: for "quick" and "gpu" their own where there is one, else the default."""
        own = {"default": None, "quick": self.quick, "gpu": self.gpu}[scale]
        return self.default if own is None else own


@dataclass(frozen=True)
class Option:
    """A named choice of a stage, `--name value` on the command line, `config.name` in the stage.

    `presets` maps a choice to the sizes that it brings, name -> value: they take the place of the defaults, and a size
    that is given takes theirs. `tune` options are those whose choices `--tune` compares. A run that does not choose
    among those of an `each` option does each in turn.
    """

    name: str
    choices: Sequence[str]
    default: str
    help: str = ""
    presets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tune: bool = False
    each: bool = False


@dataclass(frozen=True)
class Config:
    """The sizes, element type and options of one run. Every size and option reads as an attribute."""

    values: Mapping[str, Any]
    dtype: str
    sms: int = B200_SMS

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"this stage has no size or option named {name!r}") from None

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of `dtype`."""
        return self.torch_dtype.itemsize


@dataclass(frozen=True)
class Stage:
    """One lesson. See the module's docstring for each callable's arguments.

    Arguments of the kernel are the items of `inputs` followed by one poisoned tensor per item of `outputs`.
    `tolerance` is a `common.verify.Tolerance` or a function of the config that returns one; its `terms` is the number
    of float32 additions behind one output element (None: 1). `arch` is the least that can run it: "sm_90a" or
    "sm_100a". `baselines` maps a name to `fn(config, *inputs)`, timed on a GPU only. `study`, for what one run cannot
    show, is called after it as `study(outcome, folder)` with `common.harness.Outcome` and the folder of `--out`, where
    it may leave files; it returns text to print.
    """

    number: int
    title: str
    arch: str
    sizes: Sequence[Size]
    dtypes: Sequence[str]
    kernel: Callable[[Config], Any]
    inputs: Callable[..., tuple]
    outputs: Callable[[Config], list]
    reference: Callable[..., Any]
    check: Callable[[Config], None] = lambda config: None
    options: Sequence[Option] = ()
    bytes_moved: Callable[[Config], int] | None = None
    flops: Callable[[Config], int] | None = None
    baselines: Mapping[str, Callable] = field(default_factory=dict)
    tolerance: Any = None
    study: Callable[[Any, Path], str] | None = None

    def config(self, *, dtype: str | None = None, scale: str = "default", sms: int = B200_SMS, **values: Any) -> Config:
        """Sizes and options with defaults filled in, checked. `scale` ("default", "quick", "gpu") picks the defaults.

        Raises BadSize for a size that is no integer or below its minimum, an unknown dtype, choice or name, and
        whatever `check` refuses.
        """
        chosen: dict[str, Any] = {}
        preset: dict[str, int] = {}
        for option in self.options:
            chosen[option.name] = values.pop(option.name, option.default)
            if chosen[option.name] not in option.choices:
                raise BadSize(f"{option.name} is {chosen[option.name]!r}: choose from {', '.join(option.choices)}")
            preset.update(option.presets.get(chosen[option.name], {}))
        for size in self.sizes:
            value = values.pop(size.name, preset.get(size.name, size.at(scale)))
            try:
                chosen[size.name] = index(value)
            except TypeError:
                raise BadSize(f"{size.name} is {value!r}: it must be an integer") from None
            if chosen[size.name] < size.minimum:
                raise BadSize(f"{size.name} is {chosen[size.name]}: it must be at least {size.minimum}")
        if values:
            unknown = ", ".join(sorted(values))
            raise BadSize(f"stage {self.number:02d} has no size or option named {unknown}: it has {', '.join(chosen)}")
        dtype = dtype or self.dtypes[0]
        if dtype not in self.dtypes:
            raise BadSize(f"dtype is {dtype!r}: stage {self.number:02d} takes {', '.join(self.dtypes)}")
        config = Config(chosen, dtype, sms)
        self.check(config)
        return config

    def build(
        self,
        *,
        dtype: str | None = None,
        scale: str = "default",
        arch: str | None = None,
        sms: int | None = None,
        **values: Any,
    ) -> Kernel:
        """Build the kernel for these sizes: `common.build.Kernel`. Raises BadSize before anything is compiled.

        It is built for this machine's GPU, when that can run the stage, and else for the emulated one: number of SMs
        and architecture. `sms` and `arch` override them.
        """
        from common.build import build
        from common.device import choose_device

        device = choose_device("auto", self.number, self.arch)
        config = self.config(dtype=dtype, scale=scale, sms=sms or device.sms, **values)
        return build(self.kernel(config), arch=arch or device.arch)
