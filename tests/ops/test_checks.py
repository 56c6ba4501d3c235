"""The checks alone: legal sizes and dtypes pass, all others are refused. test_errors.py has the sentences."""

import cases
import logits_cases
import pytest
import refusals
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE_LOGITS
from refusals import CAMERAS, MAPS
from small_cases import GOOD
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import mx_driving
from mx_driving._operator import checks
from mx_driving._operator.description import OPERATORS

FLOATING = torch.float32, torch.float64, torch.float16, torch.bfloat16
INDEX = torch.int32, torch.int64
POINT = "".join(["po", "int"])  # made at run time: a check must not ask whether a word is the very string that it has
CALLS = refusals.CALLS | {
    "one reference": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(3, 5, 7, 4, MAPS, 6, 1)),
    "a reference for each point": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(3, 5, 7, 4, MAPS, 6, 6, POINT)),
    "three references": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(3, 5, 7, 4, MAPS, 6, 3, POINT)),
    "logits on two axes": (MULTI_SCALE_LOGITS, lambda: with_two_axes(logits_cases.multi_scale(3, 5, 7, 4, MAPS, 6))),
    "window, logits on two axes": (GEOMETRIC_LOGITS, lambda: with_two_axes(logits_cases.geometric(3, 5, 7, 4, MAPS, (2, 3)))),
    "projected, without options": (AGGREGATION_LOGITS, lambda: logits_cases.aggregation(4, 7, 6, 5, 5, CAMERAS, False, False)),
}


def with_two_axes(args):
    *others, logits, last = args if isinstance(args[-1], str) else (*args, None)
    logits = logits.unflatten(-1, (2, 6))
    return (*others, logits) if last is None else (*others, logits, last)


def places(args):
    """Return the indices of the tensors."""
    return [place for place, a in enumerate(args) if isinstance(a, Tensor)]


def replaced(args, place, by):
    return (*args[:place], by, *args[place + 1 :])


@pytest.mark.parametrize("name", CALLS)
def test_each_input_has_its_dtypes(name):
    """Floating inputs may have different dtypes."""
    operator, make = CALLS[name]
    args = make()
    for place in places(args):
        allowed = INDEX if not args[place].is_floating_point() else FLOATING
        if operator == GEOMETRIC and place == 3:
            allowed = (*FLOATING, *INDEX, torch.int8, torch.int16, torch.uint8)
        for dtype in (*FLOATING, *INDEX, torch.bool, torch.int8, torch.uint8, torch.int16, torch.complex64):
            other = replaced(args, place, args[place].to(dtype))
            if dtype in allowed:
                checks.check_inputs(OPERATORS[operator], *other)
            else:
                with pytest.raises(TypeError, match=f"^{OPERATORS[operator].inputs[place]} must have "):
                    checks.check_inputs(OPERATORS[operator], *other)


def is_free(operator, place, axis, size, args):
    """Return whether another size of an axis is legal. Rows of value are compared with levels later; groups may divide its
    channels; several numbers of reference points are legal."""
    if place == 0:
        return axis == 1 or (axis == 3 and operator not in (AGGREGATION, AGGREGATION_LOGITS))
    if operator == MULTI_SCALE_LOGITS and place == 3 and axis == 2:
        return size in ((1, 2, 3, 6) if args[6] == "point" else (1, 2))
    return False


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("name", CALLS)
def test_each_size_is_held_to_the_others(name, by):
    operator, make = CALLS[name]
    args = make()
    for place in places(args):
        t = args[place]
        for axis in range(t.dim()):
            other = t.narrow(axis, 0, t.shape[axis] - 1) if by < 0 else torch.cat([t, t.narrow(axis, 0, 1)], axis)
            given = replaced(args, place, other)
            if is_free(operator, place, axis, t.shape[axis] + by, args):
                checks.check_inputs(OPERATORS[operator], *given)
            else:
                with pytest.raises(ValueError, match=" must have "):
                    checks.check_inputs(OPERATORS[operator], *given)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_a_repeated_backward_is_checked_once(operator, monkeypatch):
    args = GOOD[operator]()
    call = [cases.grad_for(operator, args), *args, [True] * len(cases.DIFFERENTIABLE[operator])]
    checks.check_backward(OPERATORS[operator], *call)
    monkeypatch.setattr(checks, "output_shape", lambda *args: pytest.fail("checked twice"))
    checks.check_backward(OPERATORS[operator], *call)
    call[0] = call[0].half()  # another dtype is another call
    with pytest.raises(pytest.fail.Exception, match="checked twice"):
        checks.check_backward(OPERATORS[operator], *call)


KINDS = {
    "subclass": lambda t: TwoTensor(t, t),
    "without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "functional": torch._to_functional_tensor,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("operator", [*cases.OPERATORS, MULTI_SCALE_LOGITS, GEOMETRIC_LOGITS, AGGREGATION_LOGITS])
def test_a_table_may_be_another_kind_of_tensor_than_the_other_table(operator, place, kind):
    """Checks read only tables that have memory."""
    args = list(GOOD[operator]())
    args[2] = torch.zeros_like(args[2])  # all levels read the same rows
    args[place] = KINDS[kind](args[place])
    if place == 1 and kind == "without memory":
        with pytest.raises((ValueError, RuntimeError), match=r"\] must be positive \(H, W\); got \(0, 0\)"):
            getattr(mx_driving, operator)(*args)
    else:
        assert getattr(mx_driving, operator)(*args).shape[0] == args[0].shape[0]
