"""Whether the weights that an attention module returns may be looked at.

The operator with logits never makes them. A module that calls it returns a softmax beside the graph: the right numbers, but
no gradient of the output reaches them. So a module of this kind may call it only if no gradient is recorded, or if nobody can
get hold of the weights: no hook sees what the module returns, and the code that called it drops them, as the layers of
transformers do.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from ._parameters import names_in

_HIDDEN = {"CACHE", "EXTENDED_ARG", "NOP"}


def weights_may_be_watched(module: Any) -> bool:
    """Return whether someone may ask for the gradient of the second of the two tensors that this call of the module returns."""
    if not (torch.is_grad_enabled() or torch._C._get_tracing_state()):  # torch.jit.trace compares its graph with one without
        return False
    if torch.compiler.is_dynamo_compiling():  # which cannot look at its callers
        return True
    if module._forward_hooks or torch_modules._global_forward_hooks:  # transformers records outputs by hooks
        return True
    caller = _caller()
    return caller is None or not _drops_second(caller.f_code, caller.f_lasti)


def _caller() -> types.FrameType | None:
    """Return the frame that called the module: the first one outside this package and torch's Module."""
    frame = sys._getframe(1)
    while frame is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


def _is_between(name: str) -> bool:
    return name == torch_modules.__name__ or name.startswith(f"{__package__}.")


@functools.lru_cache(maxsize=1024)
def _drops_second(code: types.CodeType, offset: int) -> bool:
    """Return whether the call at this offset is `a, b = ...` of local names, and the code never reads b."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _HIDDEN]
    behind = [step for step in steps if step.offset > offset][:3]
    if not behind or behind[0].opname != "UNPACK_SEQUENCE" or behind[0].arg != 2:
        return False
    stored = [name for step in behind[1:] if step.opname.startswith("STORE_FAST") for name in names_in(step)]
    if len(stored) < 2:
        return False
    return not any(stored[1] in names_in(step) for step in steps if "LOAD" in step.opname or "DELETE" in step.opname)
