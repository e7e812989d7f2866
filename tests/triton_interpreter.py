"""The Triton kernels on CPU tensors, by Triton's own interpreter, in the process that also compiles them.

``triton.jit`` decides when it decorates whether a kernel will be compiled or interpreted. So the package is loaded a
second time, under another name, with ``TRITON_INTERPRET`` set: the copy's kernels are interpreted.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fusedaccum import ops
from fusedaccum.backends import Backend

PACKAGE = Path(__file__).parent.parent / "triton_kernels"
STEP_ELEMS = 8192
_numbers = itertools.count()


def load_package(folder: Path, *, interpret: bool) -> ModuleType:
    """A copy of the package in ``folder`` under a name of its own, with its modules; ``launch`` has the ops."""
    import triton  # noqa: F401 - Triton's own functions must stay compilable

    name = f"triton_kernels_copy_{next(_numbers)}"
    with pytest.MonkeyPatch.context() as patch:
        if interpret:
            patch.setenv("TRITON_INTERPRET", "1")
        else:
            patch.delenv("TRITON_INTERPRET", raising=False)
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        importlib.import_module(f"{name}.launch")
        if not interpret:
            importlib.import_module(f"{name}.ahead")
    if interpret:
        _call_helpers_directly(name)
    return package


def _call_helpers_directly(package: str) -> None:
    """The interpreter patches all of triton.language anew at each call of a function from a kernel, which takes
    milliseconds. Within a kernel it is patched already, so that the bare function will do.
    """
    from triton.runtime.interpreter import InterpretedFunction

    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            for key, value in list(vars(module).items()):
                if isinstance(value, InterpretedFunction) and not key.endswith("_kernel"):
                    setattr(module, key, value.rewrite())


def _keep_flags_boolean() -> None:
    """The interpreter gives a comparison the dtype of what was compared, and a scalar flag that is spread over a block
    its values in that dtype, which it then refuses as a mask.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_splat
    if hasattr(original, "keeps_flags"):
        return

    def create_splat(self: object, *arguments: Any) -> Any:
        spread = original(self, *arguments)
        (source,) = [argument for argument in arguments if isinstance(argument, TensorHandle)]
        if source.data.dtype == np.bool_:
            spread.data = spread.data.astype(np.bool_)
        return spread

    create_splat.keeps_flags = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_splat = create_splat


def _make_faster(package: ModuleType) -> None:
    """An operation takes the interpreter a tenth of a millisecond, however many elements it is of. So a step works on
    more of them at once; the PTX, which other tests execute, has the rows as they are.
    """
    import triton.language as tl

    package.step.LANES = package.step.TAIL = tl.constexpr(STEP_ELEMS)


def interpreted(folder: Path = PACKAGE) -> Backend:
    """The backend ``triton`` for CPU tensors."""
    package = load_package(folder, interpret=True)
    _keep_flags_boolean()
    _make_faster(package)
    launch = package.launch
    functions: dict[str, Callable[..., None]] = {op: partial(_quiet, getattr(launch, op)) for op in ops.SCHEMAS}
    return Backend("triton", "Triton's interpreter", **functions)


def _quiet(op: Callable[..., None], *arguments: Any) -> None:
    with np.errstate(all="ignore"):  # infinities and NaNs are what is tested
        op(*arguments)
