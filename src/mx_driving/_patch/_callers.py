"""Whether a caller may look at the attention weights that a module returns.

The operator with logits never makes the weights. A module that calls it returns a softmax beside the graph: the numbers are
right, but no gradient of the output reaches them. In training such a module may call the operator only if no hook sees the
weights and the calling code drops them, as the layers of transformers do.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from ._parameters import STAND_IN, read_names

_BETWEEN = (
    os.path.dirname(__file__) + os.sep,
    torch_modules.__file__,
    STAND_IN,
)  # files of frames between the caller and a module
_HIDDEN = {"CACHE", "EXTENDED_ARG", "NOP"}


def weights_may_be_watched(module: Any) -> bool:
    """Return whether a caller may ask for the gradient of the second of the two tensors that the module returns."""
    if not (torch.is_grad_enabled() or torch._C._get_tracing_state()):  # torch.jit.trace traces again without gradients
        return False
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot look at callers
        return True
    if module._forward_hooks or torch_modules._global_forward_hooks:  # transformers records outputs by hooks
        return True
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is None or not _drops_second(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _drops_second(code: types.CodeType, offset: int) -> bool:
    """Return whether the call at this offset is `a, b = ...` of local names, and the code never reads b."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _HIDDEN]
    behind = [step for step in steps if step.offset > offset][:3]
    if not behind or behind[0].opname != "UNPACK_SEQUENCE" or behind[0].arg != 2:
        return False
    stored = [name for step in behind[1:] if step.opname.startswith("STORE_FAST") for name in read_names(step)]
    if len(stored) < 2:
        return False
    return not any(stored[1] in read_names(step) for step in steps if "LOAD" in step.opname or "DELETE" in step.opname)
