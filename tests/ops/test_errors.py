"""Wrong calls are refused in sentences: those of the table in tests/helpers/refusals.py, and the same sentence by every way to
an operator."""

import contextlib
import functools
import inspect

import cases
import pytest
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, MULTI_SCALE, MULTI_SCALE_LOGITS
from refusals import ARGUMENTS, FLOATING, LEVELS, NUMBERS, SHAPES, said, without_hint
from small_cases import GOOD
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import mx_driving
from mx_driving import _backends, reference
from mx_driving._dispatch.registered import REGISTERED
from mx_driving._foreign.stand_ins import stand_in
from mx_driving._foreign_functions import FUNCTIONS
from mx_driving._operator import checks, rules
from mx_driving._operator.description import OPERATORS


def said_by_cpp(call):
    """Return the sentence of C++; or that of Python, where kernels are called by ctypes, or after data checks."""
    with pytest.raises((RuntimeError, TypeError, ValueError)) as refused:
        call()
    return str(refused.value)


@pytest.mark.parametrize("refusal", [*ARGUMENTS, *SHAPES, *NUMBERS], ids=str)
def test_public_function(refusal):
    args = refusal.args()
    assert said(lambda: getattr(mx_driving, refusal.operator)(*args)) == refusal.sentence


def test_references_of_points_divide_them():
    args = list(GOOD[MULTI_SCALE_LOGITS]())
    args[3], args[6] = args[3].repeat(1, 1, 2, 1)[:, :, :3], "point"
    axes = "(bs=2, num_queries=3, a divisor of num_points=2, 2 or 4)"
    call = functools.partial(mx_driving.multi_scale_deformable_attn_with_logits, *args)
    assert said(call) == f"reference_points must have shape {axes}; got (2, 3, 3, 2)"


def backward_of(operator):
    """Return an operator's backward of torch.ops, and legal arguments for it."""
    args = GOOD[operator]()
    mask = [True] * len(cases.DIFFERENTIABLE[operator])
    op = getattr(torch.ops.mx_driving, operator + "_backward").default
    return op, [cases.grad_for(operator, args).float(), *args, mask]


def said_on(place, op, args):
    """Return the sentence of `op` on a CPU, in the kernels of GPUs, in the reference (`other`), or without memory."""
    if place in ("cuda", "other"):  # whatever the device, the check comes first
        op = functools.partial(REGISTERED[op._opname].run, place)
    with FakeTensorMode() if place == "fake" else contextlib.nullcontext() as mode:
        if place == "fake":
            args = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        if place == "meta":
            args = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
        by_cpp = place == "cpu" and all(a.is_cpu for a in args if isinstance(a, Tensor))
        return (said_by_cpp if by_cpp else said)(lambda: op(*args))


def spoilt(args):
    """Yield (index, wrong tensor) for each tensor: with one axis more, with a longer last axis, and of a complex dtype."""
    for place, a in enumerate(args):
        if isinstance(a, Tensor):
            yield from ((place, wrong) for wrong in (a[None], torch.cat([a, a[..., :1]], -1), a.cfloat()))


PLACES = ["cpu", "cuda", "other", "meta", "fake"]


def assert_said_on(place, backward, operator, args, sentence):
    """Check that torch.ops, or its backward, says the sentence. C++ leaves out the hint at its end."""
    op, (grad, *_, mask) = backward_of(operator)
    if backward:
        args = [grad, *args, mask]
    else:
        op = getattr(torch.ops.mx_driving, operator).default
    found = said_on(place, op, args)
    assert (without_hint(found) == without_hint(sentence)) if place == "cpu" else (found == sentence)


# With place `meta`, all tensors are on one device.
BELOW = [(place, refusal) for place in PLACES for refusal in SHAPES if place != "meta" or "device" not in refusal.sentence]
BELOW += [(place, refusal) for place in ("cpu", "other") for refusal in NUMBERS]  # where reading index tables is free


@pytest.mark.parametrize(("place", "refusal"), BELOW, ids=str)
def test_torch_ops(place, refusal):
    """The public function is not the only way in: each kernel checks for itself, forward and backward."""
    for backward in (False, True):
        if not (refusal.changes_shape_of_value and (backward or (place == "cpu" and refusal in SHAPES))):
            assert_said_on(place, backward, refusal.operator, refusal.args(), refusal.sentence)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("operator", cases.EVERY)
def test_the_same_sentence_everywhere(operator, backward, place):
    """Each kernel has the sentence of the public function, for each tensor of each operator."""
    args = GOOD[operator]()
    for at, wrong in spoilt(args):
        given = [*args[:at], wrong, *args[at + 1 :]]
        if at == 0 and wrong.dim() == args[0].dim() and wrong.is_floating_point():
            continue  # another number of channels disagrees with groups and with grad_output: either may be named
        sentence = said(lambda given=given: getattr(mx_driving, operator)(*given))
        assert_said_on(place, backward, operator, given, sentence)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("operator", cases.EVERY)
def test_a_call_off_the_cpu_is_checked_once(operator, gradients, monkeypatch):
    """The kernel checks the call. Its sentence is that of the public function on a CPU."""
    args = [a.to("meta") if isinstance(a, Tensor) else a for a in GOOD[operator]()]
    checked = []
    keeps_rules = checks._keeps_rules
    monkeypatch.setattr(checks, "_keeps_rules", lambda *call: checked.append(1) or keeps_rules(*call))
    with torch.set_grad_enabled(gradients):
        output = getattr(mx_driving, operator)(args[0].requires_grad_(gradients), *args[1:])
        assert (output.device.type, output.requires_grad) == ("meta", gradients)
        assert len(checked) == 1
        for at, wrong in spoilt(args):
            given = [*args[:at], wrong, *args[at + 1 :]]
            if at or wrong.dim() != args[0].dim() or not wrong.is_floating_point():
                on_cpu = [torch.zeros_like(a, device="cpu") if isinstance(a, Tensor) else a for a in given]
                sentence = said(lambda on_cpu=on_cpu: getattr(mx_driving, operator)(*on_cpu))
                assert said(lambda given=given: getattr(mx_driving, operator)(*given)) == sentence


TRANSFORMS = {
    "jvp": lambda call, value: torch.func.jvp(call, (value,), (value,)),
    "grad": lambda call, value: torch.func.grad(lambda v: call(v).sum())(value),
    "vmap": lambda call, value: torch.vmap(call)(value[None]),
    "vmap of nothing": lambda call, value: torch.vmap(call)(value[None][:0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_transforms_do_not_bypass_the_checks(operator, transform):
    """A wrong shape and a wrong index table are refused under each transform."""
    value, *others = GOOD[operator]()
    call, run = getattr(mx_driving, operator), TRANSFORMS[transform]
    wrongs = [[*others[:-1], others[-1][:1]], [others[0], others[1] - 1, *others[2:]]]
    for wrong in wrongs[: 1 if transform == "vmap of nothing" else 2]:
        sentence = said(lambda wrong=wrong: call(value, *wrong))
        assert said(lambda wrong=wrong: run(lambda v: call(v, *wrong), value)) == sentence


@pytest.mark.parametrize("mapped", [1, 2, 4])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("operator", cases.EVERY)
def test_vmapped_torch_ops_says_what_is_wrong_with_an_entry(operator, backward, mapped):
    """Where vmap maps a table, the operator is called for each entry; else the entries are folded. The sentence is that of an
    entry, whatever else is wrong."""
    op, (grad, *args, mask) = backward_of(operator)
    op = op if backward else getattr(torch.ops.mx_driving, operator).default
    for at, wrong in [*spoilt(args), *((at, None) for at, t in enumerate(args) if isinstance(t, Tensor))]:
        given = [*args[:at], wrong, *args[at + 1 :]]
        if (at == mapped and wrong is None) or (at == 0 and wrong is not None and wrong.is_floating_point()):
            continue  # another number of channels disagrees with groups and with grad_output: either may be named
        if wrong is None and OPERATORS[operator].tensors[at].optional:
            continue

        def call(given=given):
            inputs = [*given[:mapped], torch.stack([given[mapped]] * 2), *given[mapped + 1 :]]
            dims = [None] * mapped + [0] + [None] * (len(given) - mapped - 1)
            if backward:
                return torch.vmap(op, (None, *dims, None))(grad, *inputs, mask)
            return torch.vmap(op, tuple(dims))(*inputs)

        sentence = said(lambda given=given: checks.check_inputs(OPERATORS[operator], *given))
        assert without_hint(said_by_cpp(call)) == without_hint(sentence)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_grad_output_and_output_mask_are_checked(operator, place):
    op, good = backward_of(operator)
    grad, mask = good[0], good[-1]
    axes = ", ".join(f"{axis}={size}" for axis, size in zip(OPERATORS[operator].output, grad.shape, strict=True))
    shapes = grad[:1], grad[:, 1:], grad[..., 1:], *(torch.cat([grad, grad], axis) for axis in range(3))
    for at, what, sentence in (
        *((0, g, f"grad_output must have shape ({axes}); got {tuple(g.shape)}") for g in shapes),
        *[(0, grad.to_sparse(), "grad_output must have the layout torch.strided; got torch.sparse_coo")][: place == "cpu"],
        *((0, grad.to(getattr(torch, d)), f"grad_output must {FLOATING}; got {d}") for d in ("int64", "bool", "complex64")),
        (6, mask[1:], f"output_mask must have {len(mask)} entries, one for each gradient; got {len(mask) - 1}"),
        (6, [*mask, 1], f"output_mask must have {len(mask)} entries, one for each gradient; got {len(mask) + 1}"),
    ):
        assert said_on(place, op, [*good[:at], what, *good[at + 1 :]]) == sentence


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_devices_are_checked_below_the_public_function(operator):
    op, good = backward_of(operator)
    names = [argument.name for argument in op._schema.arguments]
    for at, name in enumerate(names[:6]):
        args = list(good)
        args[at] = args[at].to("meta")
        sentence = f"{name} must be on {names[1]}'s device (cpu); got meta"
        if at == 1:  # value itself is elsewhere, so the sentence names the next tensor
            sentence = f"{names[2]} must be on {names[1]}'s device (meta); got cpu"
        assert said_on("cpu", op, args) == sentence
        if at:
            assert said_on("cpu", getattr(torch.ops.mx_driving, operator).default, args[1:6]) == sentence


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_tensors_without_axes_or_elements_are_refused_in_words(operator):
    op, good = backward_of(operator)
    for nothing in (torch.empty(0), torch.empty(()), torch.empty([0] * 7), torch.empty([0] * 9)):
        sentence = said_on("cpu", op, [nothing] * 6 + [good[-1]])
        assert sentence.startswith(f"{OPERATORS[operator].inputs[0]} must have shape")


def of_one_sample(operator, value, shape):
    """Return arguments that sample `value` in the middle of one level, with weight 2."""
    cameras = 1 if operator == AGGREGATION else 0
    tables = torch.tensor(shape).expand(*[1] * cameras, 1, 2), torch.tensor(0).expand(*[1] * cameras, 1)
    return value, *tables, torch.full([1] * (5 - cameras) + [2], 0.5), torch.full([1] * (5 + cameras), 2.0)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_a_grad_output_of_too_few_channels_is_not_read_beyond_its_end(operator):
    """value has 2^26 channels, grad_output has one. The kernel must not read the other channels."""
    op, good = backward_of(operator)
    value = torch.zeros(1).expand(1, 1, *[1] * (operator != AGGREGATION), 2**26)
    args = of_one_sample(operator, value, (1, 1))
    assert said_on("cpu", op, [torch.ones(1, 1, 1), *args, good[-1]]).startswith("grad_output must have shape")


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_more_keys_than_the_native_kernels_number_are_served(operator):
    """The reference serves them. Value is one expanded element, so it takes no memory."""
    keys = 2**31 + 8
    value = torch.full((1,), 3.0).expand(1, keys, *[1] * (2 if operator != AGGREGATION else 1))
    assert getattr(mx_driving, operator)(*of_one_sample(operator, value, (8, keys // 8))).item() == 6


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_gradients_of_more_keys_are_those_of_the_reference(operator, monkeypatch):
    """The reference is chosen before the call, because a kernel of C++ would refuse the call."""
    monkeypatch.setattr(_backends.native, "MOST_ROWS", 15)  # one less than there are
    monkeypatch.setattr(torch._ops.OpOverload, "redispatch", lambda *args: pytest.fail("a kernel was called"))
    op, good = backward_of(operator)
    for found, expected in zip(op(*good), getattr(reference, operator + "_backward")(*good), strict=True):
        assert torch.equal(found, expected)


TAKES = f"{MULTI_SCALE} must be called with"
NO_STEP = "mmcv's im2col_step has no use here: MultiScaleDeformableAttnFunction.apply takes and ignores it"
ARGUMENTS = [
    (lambda f, v, h, s, x, w: f(v, h, s, x),
     f"attention_weights must be given as argument 5 of {MULTI_SCALE}; got 4 arguments"),
    (lambda f, v, h, s, x, w: f(v, h, sampling_locations=x, attention_weights=w),
     f"{LEVELS} must be given as argument 3 of {MULTI_SCALE}; got 4 arguments"),
    (lambda f, v, h, s, x, w: f(v, spatial_shapes=h, level_start_index=s, sampling_locations=x, attention_weights=w),
     "value_spatial_shapes must be given by this name; got the name spatial_shapes"),
    (lambda f, v, h, s, x, w: f(v, h, s, x, w, 64), f"{TAKES} 5 arguments; got 6; {NO_STEP}"),
    (lambda f, v, h, s, x, w: f(v, h, s, x, w, im2col_step=64), f"{TAKES} value, value_spatial_shapes, "
     f"value_level_start_index, sampling_locations, attention_weights; got the name im2col_step; {NO_STEP}"),
    (lambda f, v, h, s, x, w: f(v, h, s, x, w, w, w), f"{TAKES} 5 arguments; got 7"),
    (lambda f, v, h, s, x, w: f(v, h, s, x, value=v),
     f"value must be given once; got argument 1 of {MULTI_SCALE} and the name value"),
    (lambda f, v, h, s, x, w: f(v, h, s, x, w, value=v), f"{TAKES} 5 arguments; got 6"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), ARGUMENTS)
def test_arguments_are_counted_and_named(call, sentence):
    """The missing argument is named. Python's own message would name the last one."""
    with pytest.raises(TypeError) as refused:
        call(mx_driving.multi_scale_deformable_attn, *GOOD[MULTI_SCALE]())
    assert str(refused.value) == sentence


OPTIONAL = {MULTI_SCALE_LOGITS: ["reference_axis"], AGGREGATION_LOGITS: ["image_size", "pair_scale"]}


@pytest.mark.parametrize(("operator", "option"), [(operator, option) for operator in OPTIONAL for option in OPTIONAL[operator]])
def test_an_option_does_not_stand_for_a_missing_argument(operator, option):
    """The number of arguments is legal, and an argument without a default is missing."""
    names = [name for name in inspect.signature(getattr(mx_driving, operator)).parameters if name not in OPTIONAL[operator]]
    named = dict(zip(names, GOOD[operator](), strict=False)) | {option: None}
    for place, missing in enumerate(names, 1):
        rest = {name: a for name, a in named.items() if name != missing}
        call = functools.partial(getattr(mx_driving, operator), **rest)
        with pytest.raises(TypeError) as refused:
            call()
        fact = f"{len(rest)} arguments, {', '.join(rest)} by name" if len(rest) >= len(names) else f"{len(rest)} arguments"
        assert str(refused.value) == f"{missing} must be given as argument {place} of {operator}; got {fact}"
        assert refused.value.argument == missing


APPLIED = [
    mx_driving.MultiScaleDeformableAttnFunction.apply,
    mx_driving.ops.geometric_kernel_attention.GeometricKernelAttentionFunc.apply,
    next(stand_in(entry) for entry in FUNCTIONS if entry.name == "ms_deform_attn_forward"),
]


@pytest.mark.parametrize("call", APPLIED)
def test_two_names_of_one_argument_are_refused(call):
    """The last of the two would silently win."""
    value, shapes, starts, locations, weights = GOOD[MULTI_SCALE]()
    rest = {"level_start_index": starts, "sampling_locations": locations, "attention_weights": weights}
    with pytest.raises(TypeError, match=r" must be given once; got another name of this argument, too: "):
        call(value, spatial_shapes=shapes, value_spatial_shapes=shapes, **rest)


OLDER = [
    ("npu_multi_scale_deformable_attn_function", MULTI_SCALE, "offset"),
    ("npu_geometric_kernel_attention", GEOMETRIC, "level_start_index"),
    ("npu_deformable_aggregation", AGGREGATION, "scale_start_index"),
    ("npu_voxel_pooling_train", None, "voxel_num"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "operator", "missing"), OLDER)
def test_older_names_explain_arguments_too(name, operator, missing):
    args = [*GOOD[operator]()] if operator else [torch.zeros(1, 2, 3).long(), torch.rand(1, 2, 4), None]
    del args[2]
    with pytest.raises(TypeError, match=f"^{missing} must be given as argument 3 of {name}; got {len(args)} arguments$"):
        getattr(mx_driving, name)(*args)


@pytest.mark.parametrize("operator", sorted(GOOD))
def test_forgotten_starts_are_named(operator):
    value, shapes, _, *others = GOOD[operator]()
    optional = [t.name for t in OPERATORS[operator].tensors if t.optional]
    rest = [t for t, name in zip(others, OPERATORS[operator].inputs[3:], strict=False) if name not in optional]
    with pytest.raises(TypeError, match=rf"^\w+_start_index must be given as argument 3 of {operator}; got "):
        getattr(mx_driving, operator)(value, shapes, *rest)


PADDED = "have one size in each axis, as torch.nested.to_padded_tensor makes it; got a nested tensor"
JAGGED = "have the layout torch.strided; got torch.jagged"
MASKED = "be a torch.Tensor without a mask, as get_data() gives it; got MaskedTensor"
KINDS = [
    (lambda t: torch.nested.nested_tensor([*t]), PADDED),
    (lambda t: torch.nested.nested_tensor([*t], layout=torch.jagged), JAGGED),
    (lambda t: torch.nested.nested_tensor([t[0], t[1, :1]], layout=torch.jagged), JAGGED),
    (lambda t: torch.masked.masked_tensor(t, torch.ones_like(t).bool()), MASKED),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of|.* not implemented in __torch_dispatch__:UserWarning")
@pytest.mark.parametrize("place", [0, 3, -1])
@pytest.mark.parametrize(("make", "rule"), KINDS)
@pytest.mark.parametrize("operator", sorted(GOOD))
def test_nested_and_masked_tensors(operator, make, rule, place):
    args = list(GOOD[operator]())
    place = OPERATORS[operator].weights if place < 0 else place
    args[place] = make(args[place])
    assert said(lambda: getattr(mx_driving, operator)(*args)) == f"{OPERATORS[operator].inputs[place]} must {rule}"


def test_symbolic_trace():
    """A traced call of an operator is one node. A pool reads shapes, which a Proxy lacks; its sentence names a way."""
    value, *others = GOOD[MULTI_SCALE]()
    traced = torch.fx.symbolic_trace(lambda value: mx_driving.multi_scale_deformable_attn(value, *others))
    assert torch.equal(traced(value), mx_driving.multi_scale_deformable_attn(value, *others))
    with pytest.raises(TypeError, match=r"^feat must be a torch\.Tensor \(torch\.fx\.symbolic_trace takes .*\); got Proxy$"):
        torch.fx.symbolic_trace(lambda feat: mx_driving.bev_pool(feat, torch.zeros(2, 4).long(), 1, 1, 1, 1))


def test_an_output_that_memory_does_not_hold():
    value, shapes, starts, locations, weights = GOOD[MULTI_SCALE]()
    args = value[:1, ..., :1].expand(-1, -1, -1, 2**20), shapes, starts, *(t[:1, :1] for t in (locations, weights))
    wide = (*args[:3], *(t.expand(-1, 2**24, *t.shape[2:]) for t in args[3:]))
    # By ctypes, and after data_checks(), the sentence is torch's own.
    sentence = rf"output must fit in memory; got shape \(1, {2**24}, {2**21}\)|allocate {2**47} bytes"
    with pytest.raises(RuntimeError, match=sentence):
        mx_driving.multi_scale_deformable_attn(*wide)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("operator", [MULTI_SCALE, AGGREGATION, GEOMETRIC])
def test_tables_that_change_are_read_again(operator, at, inference):
    """A change in place of a legal table is seen by the next call, and so is a value of fewer rows."""
    with torch.inference_mode(inference):
        args, call = [*GOOD[operator]()], getattr(mx_driving, operator)
        output = call(*args)
        assert "leave room for" in said(lambda: call(args[0][:, :-1], *args[1:]))
        args[at] -= 100
        sentence = said(lambda: call(*args))
        assert "must be positive" in sentence if at == 1 else "must not be negative" in sentence
        args[at] += 100
        assert torch.equal(call(*args), output)
        other = [*args[:at], args[at] - 100, *args[at + 1 :]]
        assert said(lambda: call(*other)) == sentence


def test_an_error_without_a_message_is_named_by_its_kind():
    """A sentence about an error of another library ends with the error's first line, or with its class."""
    assert [rules.first_line(error) for error in (MemoryError(), ValueError(" a\nb"))] == ["MemoryError", "a"]
