"""Checks, and the errors that they raise. Every error is one sentence: *name* must *rule*; got *fact*.

A check is a plain `if ...: raise`, which torch.compile accepts with static and dynamic shapes. The sentence is formatted only
after a comparison fails.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._package_files import pip_install

FLOATING = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
INDEX = frozenset((torch.int32, torch.int64))

FLOATING_RULE = "have dtype float32, float64, float16 or bfloat16"
INDEX_RULE = "have dtype int32 or int64"

Named = tuple[str, Any]

ON = ("1", "true", "yes", "on")  # words that turn a switch in the environment on
OFF = ("0", "false", "no", "off", "")  # words that turn a switch in the environment off


def fail(kind: type[Exception], name: str, rule: str, fact: object) -> NoReturn:
    refuse(kind, name, f"{name} must {rule}; got {fact}")


def refuse(kind: type[Exception], name: str, sentence: str) -> NoReturn:
    """Raise an error. Its attribute `argument` is the name of the wrong argument, without an index."""
    error = kind(sentence)
    if not torch.compiler.is_compiling():  # torch.compile cannot trace attributes of errors
        error.argument = name.partition("[")[0]  # pyright: ignore[reportAttributeAccessIssue]
    raise error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's kind."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def need_tensors(*named: Named) -> None:
    """Check that every argument is a strided torch.Tensor, neither nested nor masked."""
    for name, t in named:
        if not isinstance(t, Tensor):
            advice = ""
            if isinstance(t, (list, tuple)) and not any(isinstance(element, Tensor) for element in t):
                advice = f", as torch.tensor({name}) makes it"
            elif type(t).__name__ == "Proxy":
                advice = (
                    " (torch.fx.symbolic_trace takes functions that torch.fx.wrap names; torch.export takes this one as it is)"
                )
            fail(TypeError, name, f"be a torch.Tensor{advice}", type(t).__name__)
        if t.is_nested and t.layout == torch.strided:
            rule = "have one size in each axis, as torch.nested.to_padded_tensor makes it"
            fail(ValueError, name, rule, "a nested tensor")
        if type(t).__name__ == "MaskedTensor":
            fail(TypeError, name, "be a torch.Tensor without a mask, as get_data() gives it", "MaskedTensor")
        # In a backward, torch.compile can read `layout` only of a nested tensor.
        if (t.is_nested or not torch.compiler.is_compiling()) and t.layout != torch.strided:
            fail(ValueError, name, "have the layout torch.strided", t.layout)


def need_one_device(first: Named, *others: Named) -> None:
    device = first[1].device
    for name, t in others:
        if t.device != device:
            fail(ValueError, name, f"be on {first[0]}'s device ({device})", t.device)


def need_dtype(name: str, t: Tensor, allowed: frozenset[torch.dtype], rule: str) -> None:
    if t.dtype not in allowed:
        fail(TypeError, name, rule, str(t.dtype).removeprefix("torch."))


def need_axes(name: str, t: Tensor, axes: str) -> None:
    """Check that t has an axis for every name in `axes`."""
    if t.dim() != axes.count(",") + 1:
        fail(ValueError, name, f"have shape {shape_text(axes.split(', '))}", tuple(t.shape))


def need_shape(name: str, t: Tensor, axes: str, *sizes: int | None) -> None:
    """Check that the shape of t is `sizes`. None stands for any size."""
    if t.dim() != len(sizes) or any(size is not None and t.shape[i] != size for i, size in enumerate(sizes)):
        fail_shape(name, t, axes, sizes)


def fail_shape(name: str, t: Tensor, axes: str, sizes: tuple[int | None, ...]) -> NoReturn:
    named = zip((axis.strip() for axis in axes.split(",")), sizes, strict=True)
    expected = shape_text([axis if axis.isdigit() or size is None else f"{axis}={size}" for axis, size in named])
    fail(ValueError, name, f"have shape {expected}", tuple(t.shape))


def shape_text(axes: Sequence[str]) -> str:
    """Return a shape as Python prints a tuple, with a comma after a single axis."""
    return f"({', '.join(axes)}{',' * (len(axes) == 1)})"


def flag(name: str, default: bool = False) -> bool:
    """Return whether the environment variable `name` turns a switch on; `default` if the variable is empty or not set.

    The package reads its switches at import, so a misspelt word raises at import.
    """
    word = os.environ.get(name, "")
    if not word:
        return default
    if word.lower() not in ON + OFF:
        fail_setting(name, "be 1, true, yes or on, or 0, false, no, off or empty", word)
    return word.lower() in ON


class SettingError(ValueError):
    """The error for a wrong value of an environment variable, raised when the package is imported."""

    is_of_setting = True  # for callers that cannot import this class, because the package's import failed


def fail_setting(name: str, rule: str, word: str) -> NoReturn:
    """Raise SettingError for the value of an environment variable. Exit instead under `python -m mx_driving`, which imports the
    package before its main can catch errors. At that time sys.argv[0] is "-m", and only sys.orig_argv has the module's name."""
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m") if sys.argv[:1] == ["-m"] else ""
    if module.partition(".")[0] == "mx_driving":
        print(f"mx-driving: {name} must {rule}; got {word!r}", file=sys.stderr)
        sys.exit(2)
    fail(SettingError, name, rule, repr(word))


class Problem(ValueError):
    """An error that the user can correct. Its message is a single sentence: *name* must *rule*; got *fact*."""


@contextmanager
def ruled(rule: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds to a Problem with the message `rule; got <error>`. Without kinds, convert all errors."""
    try:
        yield
    except Problem:
        raise
    except Exception as error:
        if kinds and not isinstance(error, kinds):
            raise
        raise Problem(f"{rule}; got {first_line(error).split('. ')[0]}") from None


def need(feature: str, install: str, *modules: str) -> None:
    """Raise a Problem if a module that a feature needs cannot be imported. `install` names packages, separated by blanks."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Problem(f"{feature} must have {module} installed ({pip_install(*install.split())}); got: {error}") from None
