"""`mx-driving replay` judges recorded calls, and names known mistakes."""

import re

import cases
import pytest
import torch
from device_machine import device_machine, run
from recorded_calls import A, G, M, call, computed, replay, save

from mx_driving._measure import plain

pytestmark = pytest.mark.usefixtures("wide_terminal")


def judged(folder, *call, right=True, **facts):
    """Return what replay prints about a call, given as operator, inputs, grad_output and results."""
    save(folder / "calls", *call, **facts)
    result = replay(folder / "calls")
    assert (result.exit_code == 0) == right, result.output
    return result.output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_right_results_are_right_in_every_dtype(operator, dtype, tmp_path):
    inputs, grad = call(operator, dtype)
    judged(tmp_path, operator, inputs, grad, computed(operator, inputs, grad))


@pytest.mark.parametrize("what", ["output", "nothing"])
def test_float32_is_right_where_terms_cancel(what, tmp_path):
    """grid_sample computes the results in float32. The truth is zero, except for rounding."""
    inputs, grad = call(M)
    value, *_, weights = inputs = tuple(t.clone() for t in inputs)
    if what == "output":
        value[:], weights[:] = value[:, :1].clone(), weights - weights.mean((3, 4), True)
    else:
        grad.zero_()
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    output = plain.multi_scale_deformable_attn(*leaves)
    gradients = torch.autograd.grad(output, [leaves[i] for i in (0, 3, 4)], grad)
    results = dict(zip(("grad_value", "grad_locations", "grad_weights"), gradients, strict=True))
    judged(tmp_path, M, [t.detach() for t in leaves], grad, {"output": output.detach(), **results})


def changed(index, change, back=lambda t: t):
    """Return a kernel that changes an input. `back` converts the gradient of changed locations."""

    def planted(operator, inputs, grad):
        inputs = [change(t) if i == index else t for i, t in enumerate(inputs)]
        results = computed(operator, inputs, grad)
        return {name: back(t) if name == "grad_locations" else t for name, t in results.items()}

    return planted


def spoilt(result, change):
    """Return a kernel whose result is changed by a function of the result and of the inputs."""

    def planted(operator, inputs, grad):
        results = computed(operator, inputs, grad)
        return {**results, result: change(results[result].clone(), inputs)}

    return planted


def relocated(move):
    """Return a kernel that moves locations by a function of the locations and of their maps' sizes, in float64. Clamped
    locations have no gradient."""

    def planted(operator, inputs, grad):
        value, shapes, starts, locations, weights = (t.double() if t.is_floating_point() else t for t in inputs)
        size = shapes.flip(-1)[:, None]
        leaf = locations.clone().requires_grad_()
        moved = move(leaf, size)
        (slope,) = torch.autograd.grad(moved.sum(), leaf)
        results = computed(operator, (value, shapes, starts, moved.detach(), weights), grad.double())
        return {name: (t * slope if name == "grad_locations" else t).float() for name, t in results.items()}

    return planted


def rounded_backward(operator, inputs, grad):
    wrong = changed(3, torch.round)(operator, inputs, grad)
    return {**wrong, "output": computed(operator, inputs, grad)["output"]}


def never_run(operator, inputs, grad):
    return {name: torch.zeros_like(t) for name, t in computed(operator, inputs, grad).items()}


def partly(fault, dim, *parts):
    """Return a kernel with the fault in some parts of an axis of the weights. Results are sums, except gradients of weights."""

    def planted(operator, inputs, grad):
        *rest, weights = inputs
        chosen = torch.zeros(weights.shape[dim], dtype=torch.bool)
        chosen[list(parts)] = True
        chosen = chosen.view([-1 if i == dim else 1 for i in range(weights.dim())])
        wrong = fault(operator, (*rest, torch.where(chosen, weights, 0)), grad)
        right = computed(operator, (*rest, torch.where(chosen, 0, weights)), grad)
        both = {name: wrong[name] + right[name] for name in wrong}
        return {**both, "grad_weights": torch.where(chosen, wrong["grad_weights"], right["grad_weights"])}

    return planted


def clamped(x, y):
    on = torch.tensor([x, y])
    return relocated(lambda at, size: torch.where(on, torch.minimum(torch.maximum(at, 0.5 / size), 1 - 0.5 / size), at))


def put(index, change):
    """Return a function that changes some entries."""

    def spoil(t, inputs):
        t[index] = change(t[index])
        return t

    return spoil


swapped = changed(3, lambda l: l.flip(-1), lambda g: g.flip(-1))
turned = changed(1, lambda s: s.flip(-1))
exchanged = changed(3, lambda l: l.flip(3), lambda g: g.flip(3))
shifted = relocated(lambda at, size: at + 0.5 / size)
EVERY = "output, grad_value, grad_locations, grad_weights: "
NO_LOCATIONS = "output, grad_value, grad_weights: "
NOTHING = "nothing known explains it; .*, "
PLANTED = {
    "swapped, M": (M, swapped, EVERY + "x and y are swapped in the locations"),
    "swapped, A": (A, swapped, EVERY + "x and y are swapped in the locations"),
    "swapped, G": (G, swapped, NO_LOCATIONS + "x and y are swapped in the locations"),
    "turned": (M, turned, EVERY + r"shapes are read as \(W, H\)"),
    "shifted": (M, shifted, EVERY + "samples lie half a pixel too far right and down"),
    "exchanged, M": (M, exchanged, EVERY + "levels of locations are read in the order 1, 0"),
    "exchanged, G": (G, exchanged, NO_LOCATIONS + "levels of locations are read in the order 1, 0"),
    "clamped y": (M, clamped(False, True), EVERY + "samples beyond the border read the border's pixels in y alone"),
    "clamped x": (M, clamped(True, False), EVERY + "samples beyond the border read the border's pixels in x alone"),
    "rounded": (G, rounded_backward, "grad_value, grad_weights: locations are rounded half to even, as the vendor's backward"),
    "never run": (A, never_run, EVERY + "it is zero everywhere, as if the kernel had not run"),
    "halved": (M, spoilt("grad_value", lambda t, _: t / 2), "grad_value: it is 0.5 times the truth"),
    "in pixels": (M, spoilt("grad_locations", lambda t, inputs: t / inputs[1].flip(-1)[:, None]),
        "grad_locations: it is the gradient in pixels; it must be in fractions of the map"),
    "a NaN": (M, spoilt("output", put((1, 7, 3), lambda t: torch.nan)),
        r"output: 1 of 1440 entries are NaN, in \[1, 7, 3\], at batch 1, at head 0, while the inputs give numbers; all other"),
    "a number": (A, spoilt("output", put((1, 7, 3), lambda t: t + 1)),
        r"output: nothing known explains it; 1 of 480 entries are wrong, in \[1, 7, 3\], at batch 1, at group 0"),
    "a row": (M, spoilt("output", put((1, 7), lambda t: t * 1.5)),
        r"output: 24 of 1440 entries are 1.5 times the truth, in \[1, 7, 0\.\.23\], at batch 1"),
    "rows of zeros": (M, spoilt("grad_value", put((slice(None), slice(364, None)), torch.zeros_like)),
        "grad_value: all wrong entries are zero: "),
    "shifted at a level": (M, partly(shifted, 3, 1), f"grad_weights: {NOTHING}at level 1$"),
    "swapped at a level, M": (M, partly(swapped, 3, 1), f"grad_locations: {NOTHING}at level 1$"),
    "swapped at a level, G": (G, partly(swapped, 3, 0), f"grad_weights: {NOTHING}at level 0$"),
    "swapped at a camera": (A, partly(swapped, 3, 1), f"grad_weights: {NOTHING}at camera 1$"),
    "swapped at a level, A": (A, partly(swapped, 4, 1), f"grad_weights: {NOTHING}at level 1$"),
    "turned at heads": (M, partly(turned, 2, 0, 2), f"grad_weights: {NOTHING}at heads 0 and 2$"),
    "swapped in a batch": (M, partly(swapped, 0, 1), f"output: {NOTHING}at batch 1$"),
    "zero at a point, M": (M, partly(never_run, 4, 2), "grad_weights: all wrong entries are zero: .*, at point 2$"),
    "zero at a point, A": (A, partly(never_run, 2, 2), "grad_weights: all wrong entries are zero: .*, at point 2$"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_named(fault, tmp_path):
    operator, plant, words = PLANTED[fault]
    inputs, grad = call(operator)
    output = judged(tmp_path, operator, inputs, grad, plant(operator, inputs, grad), right=False)
    assert re.search(f"wrong: call-000000, .*{words}", output, re.MULTILINE)
    assert output.rstrip().endswith("1 of 1 calls wrong")


def test_a_fault_on_the_device_machine_is_recorded_and_named(tmp_path):
    """The program runs on one machine, and replay names the fault on the other."""
    folder = device_machine(tmp_path)
    kernels = folder / "mmcv/kernels.py"
    kernels.write_text(kernels.read_text().replace("locations[:, :, :, l]", "locations.flip(-1)[:, :, :, l]"))
    run(folder, "record.py", "program.py")
    result = replay(folder / "calls")
    assert result.exit_code == 1
    wrong = re.findall("wrong: (call-.*)", result.output)
    assert [re.sub("call-[0-9]*, ", "", sentence) for sentence in wrong] == [
        "output: x and y are swapped in the locations",
        "grad_value, grad_locations, grad_weights: x and y are swapped in the locations",
    ]


def test_nan_weights_off_the_map(tmp_path):
    """The rule gives numbers. The vendor's operator before 7.2 multiplied every sample, which gives NaN."""
    (value, shapes, starts, locations, weights), grad = call(M)
    locations[0, 3, 1, 0, 0], weights[0, 3, 1, 0, 0] = -5.0, torch.nan
    inputs = (value, shapes, starts, locations, weights)
    right = computed(M, inputs, grad)
    assert right["output"].isfinite().all()
    judged(tmp_path / "right", M, inputs, grad, right)
    spoilt = {**right, "output": right["output"].clone()}
    spoilt["output"][0, 3, 8:16] = torch.nan
    output = judged(tmp_path / "wrong", M, inputs, grad, spoilt, right=False)
    assert re.search(r"call-000000, output: (it is grid_sample \* weight|NaN are not masked).*7\.2", output)


def test_nan_that_come_in_are_not_the_operators(tmp_path):
    (value, *rest), grad = call(M)
    value[:, 5] = torch.nan
    output = judged(tmp_path, M, (value, *rest), grad, computed(M, (value, *rest), grad))
    assert "call-000000: its NaN and infinities come from the inputs: float64 has the same" in output
    assert "NaN in: 48" in output  # of value: 2 batches, 3 heads, 8 channels


def test_an_input_read_as_if_it_were_contiguous(tmp_path):
    (value, *rest), grad = call(M)
    strides = (value[0].numel(), 8, value.shape[1] * 8, 1)  # heads before keys
    memory = torch.empty_strided(value.shape, strides).copy_(value)
    misread = memory.as_strided((value.numel(),), (1,)).view(value.shape)
    wrong = {**computed(M, (value, *rest), grad), "output": computed(M, (misread, *rest), grad)["output"]}
    output = judged(tmp_path, M, (value, *rest), grad, wrong, right=False, strides={"value": strides})
    assert "call-000000, output: value is not contiguous, and is read as if it were" in output


def test_sums_in_16_bits_are_coarse_not_wrong(tmp_path):
    inputs, grad = call(M, torch.float16)
    results = computed(M, inputs, grad)
    results["output"] += 6e-4 * results["output"].abs().max() * torch.sign(torch.randn_like(results["output"]))
    words = "coarse: call-000000, output: error typical of sums in float16; the operator's rules have sums in float32"
    assert words in judged(tmp_path, M, inputs, grad, results)
