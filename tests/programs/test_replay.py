"""`mx-driving replay` judges recorded calls, and names known mistakes."""

from __future__ import annotations

import re

import cases
import pytest
import torch
from device_machine import device_machine, run
from recorded_calls import A, G, M, call, computed, replay, save


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_right_results_are_right_in_every_dtype(operator, dtype, tmp_path):
    inputs, grad = call(operator, dtype)
    save(tmp_path / "calls", operator, inputs, grad, computed(operator, inputs, grad))
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0, found.output


def moved(inputs, places, move):
    return tuple(move(t) if i in places else t for i, t in enumerate(inputs))


def swapped(operator, inputs, grad):
    found = computed(operator, moved(inputs, (3,), lambda l: l.flip(-1)), grad)
    return {name: t.flip(-1) if name == "grad_locations" else t for name, t in found.items()}


def shifted(operator, inputs, grad):
    size = inputs[1].flip(-1)[:, None]
    wide = moved(inputs, (0, 3, 4), lambda t: t.double())
    found = computed(operator, moved(wide, (3,), lambda l: l + 0.5 / size), grad.double())
    return {name: t.float() for name, t in found.items()}


def turned(operator, inputs, grad):
    return computed(operator, moved(inputs, (1,), lambda s: s.flip(-1)), grad)


def exchanged(operator, inputs, grad):
    found = computed(operator, moved(inputs, (3,), lambda l: l.flip(3)), grad)
    return {name: t.flip(3) if name == "grad_locations" else t for name, t in found.items()}


def rounded_backward(operator, inputs, grad):
    wrong = computed(operator, moved(inputs, (3,), torch.round), grad)
    return {**wrong, "output": computed(operator, inputs, grad)["output"]}


def halved(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    return {**found, "grad_value": found["grad_value"] / 2}


def in_pixels(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    return {**found, "grad_locations": found["grad_locations"] / inputs[1].flip(-1)[:, None]}


def never_run(operator, inputs, grad):
    return {name: torch.zeros_like(t) for name, t in computed(operator, inputs, grad).items()}


def one_nan(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["output"][1, 7, 3] = torch.nan
    return found


def one_wrong(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["output"][1, 7, 3] += 1
    return found


def partly(fault, dim, *parts):
    """Make the fault on some parts of an axis of the weights alone. Results are sums over parts, but for weights' gradients."""

    def planted(operator, inputs, grad):
        *rest, weights = inputs
        chosen = torch.zeros(weights.shape[dim], dtype=torch.bool)
        chosen[list(parts)] = True
        chosen = chosen.view([-1 if i == dim else 1 for i in range(weights.dim())])
        wrong = fault(operator, (*rest, torch.where(chosen, weights, 0)), grad)
        right = computed(operator, (*rest, torch.where(chosen, 0, weights)), grad)
        both = {name: wrong[name] + right[name] for name in wrong}
        return {**both, "grad_weights": torch.where(chosen, wrong["grad_weights"], right["grad_weights"])}

    planted.__name__ = f"{fault.__name__}-{dim}-{parts}"
    return planted


def clamped(axis):
    def planted(operator, inputs, grad):
        size = inputs[1].flip(-1)[:, None]
        wide = moved(inputs, (0, 3, 4), lambda t: t.double())
        least, on = 0.5 / size, torch.tensor([axis == "x", axis == "y"])
        at = torch.where(on, torch.minimum(torch.maximum(wide[3], least), 1 - least), wide[3])
        found = computed(operator, moved(wide, (3,), lambda l: at), grad.double())
        found["grad_locations"] = torch.where(at == wide[3], found["grad_locations"], 0)
        return {name: t.float() for name, t in found.items()}

    planted.__name__ = f"clamped_{axis}"
    return planted


def row_scaled(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["output"][1, 7] *= 1.5
    return found


def gradient_of_a_level_is_zero(operator, inputs, grad):
    found = computed(operator, inputs, grad)
    found["grad_value"][:, inputs[2][1] :] = 0
    return found


EVERY = "output, grad_value, grad_locations, grad_weights: "
PLANTED = [
    (M, swapped, "output, grad_value, grad_locations, grad_weights: x and y are swapped in the locations"),
    (A, swapped, "output, grad_value, grad_locations, grad_weights: x and y are swapped in the locations"),
    (G, swapped, "output, grad_value, grad_weights: x and y are swapped in the locations"),
    (M, turned, r"output, grad_value, grad_locations, grad_weights: shapes are read as \(W, H\)"),
    (M, shifted, "output, grad_value, grad_locations, grad_weights: samples lie half a pixel too far right and down"),
    (M, exchanged, "output, grad_value, grad_locations, grad_weights: levels of locations are read in the order 1, 0"),
    (G, exchanged, "output, grad_value, grad_weights: levels of locations are read in the order 1, 0"),
    (
        M,
        one_nan,
        r"output: 1 of 1440 entries are NaN, in \[1, 7, 3\], at batch 1, at head 0, while the inputs give numbers; all other",
    ),
    (G, rounded_backward, "grad_value, grad_weights: locations are rounded half to even, as the vendor's backward does"),
    (M, halved, "grad_value: it is 0.5 times the truth"),
    (M, in_pixels, "grad_locations: it is the gradient in pixels; it must be in fractions of the map"),
    (A, never_run, "output, grad_value, grad_locations, grad_weights: it is zero everywhere, as if the kernel had not run"),
    (M, partly(shifted, 3, 1), "grad_weights: nothing known explains it; .*, at level 1$"),
    (M, partly(swapped, 3, 1), "grad_locations: nothing known explains it; .*, at level 1$"),
    (G, partly(swapped, 3, 0), "grad_weights: nothing known explains it; .*, at level 0$"),
    (A, partly(swapped, 3, 1), "grad_weights: nothing known explains it; .*, at camera 1$"),
    (A, partly(swapped, 4, 1), "grad_weights: nothing known explains it; .*, at level 1$"),
    (M, partly(turned, 2, 0, 2), "grad_weights: nothing known explains it; .*, at heads 0 and 2$"),
    (M, partly(swapped, 0, 1), "output: nothing known explains it; .*, at batch 1$"),
    (M, partly(never_run, 4, 2), "grad_weights: all wrong entries are zero: .*, at point 2$"),
    (A, partly(never_run, 2, 2), "grad_weights: all wrong entries are zero: .*, at point 2$"),
    (M, clamped("y"), EVERY + "samples beyond the border read the border's pixels in y alone"),
    (M, clamped("x"), EVERY + "samples beyond the border read the border's pixels in x alone"),
    (M, row_scaled, r"output: 24 of 1440 entries are 1.5 times the truth, in \[1, 7, 0\.\.23\], at batch 1"),
    (M, gradient_of_a_level_is_zero, "grad_value: all wrong entries are zero: "),
    (A, one_wrong, r"output: nothing known explains it; 1 of 480 entries are wrong, in \[1, 7, 3\], at batch 1, at group 0"),
]


@pytest.mark.parametrize(("operator", "fault", "words"), PLANTED, ids=[f"{o}-{f.__name__}" for o, f, _ in PLANTED])
def test_planted_faults_are_named(operator, fault, words, tmp_path):
    inputs, grad = call(operator)
    save(tmp_path / "calls", operator, inputs, grad, fault(operator, inputs, grad))
    found = replay(tmp_path / "calls")
    assert found.exit_code == 1
    assert re.search(f"wrong: call-000000, .*{words}", found.output, re.MULTILINE)
    assert found.output.rstrip().endswith("1 of 1 calls wrong")


def test_a_fault_on_the_device_machine_is_recorded_and_named(tmp_path):
    """From the program on one machine to the sentence on the other."""
    folder = device_machine(tmp_path)
    kernels = folder / "mmcv/kernels.py"
    kernels.write_text(kernels.read_text().replace("locations[:, :, :, l]", "locations.flip(-1)[:, :, :, l]"))
    run(folder, "record.py", "program.py")
    found = replay(folder / "calls")
    assert found.exit_code == 1
    wrong = re.findall("wrong: (call-.*)", found.output)
    assert [re.sub("call-[0-9]*, ", "", sentence) for sentence in wrong] == [
        "output: x and y are swapped in the locations",
        "grad_value, grad_locations, grad_weights: x and y are swapped in the locations",
    ]


def test_nan_weights_off_the_map(tmp_path):
    """The rule gives numbers; multiplying everything, as the vendor's did before 7.2, does not."""
    (value, shapes, starts, locations, weights), grad = call(M)
    locations[0, 3, 1, 0, 0], weights[0, 3, 1, 0, 0] = -5.0, torch.nan
    inputs = (value, shapes, starts, locations, weights)
    right = computed(M, inputs, grad)
    assert right["output"].isfinite().all()
    save(tmp_path / "right", M, inputs, grad, right)
    assert replay(tmp_path / "right").exit_code == 0
    spoilt = {**right, "output": right["output"].clone()}
    spoilt["output"][0, 3, 8:16] = torch.nan
    save(tmp_path / "wrong", M, inputs, grad, spoilt)
    found = replay(tmp_path / "wrong")
    assert found.exit_code == 1
    assert re.search(r"call-000000, output: (it is grid_sample \* weight|NaN are not masked).*7\.2", found.output)


def test_nan_that_come_in_are_not_the_operators(tmp_path):
    (value, *rest), grad = call(M)
    value[:, 5] = torch.nan
    save(tmp_path / "calls", M, (value, *rest), grad, computed(M, (value, *rest), grad))
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0, found.output
    assert "call-000000: its NaN and infinities come from the inputs: float64 has the same" in found.output
    assert "48 NaN" in found.output  # of value: 2 batches, 3 heads, 8 channels


def test_an_input_read_as_if_it_were_contiguous(tmp_path):
    (value, *rest), grad = call(M)
    strides = (value[0].numel(), 8, value.shape[1] * 8, 1)  # heads before keys
    memory = torch.empty_strided(value.shape, strides).copy_(value)
    misread = memory.as_strided((value.numel(),), (1,)).view(value.shape)
    wrong = {**computed(M, (value, *rest), grad), "output": computed(M, (misread, *rest), grad)["output"]}
    save(tmp_path / "calls", M, (value, *rest), grad, wrong, strides={"value": strides})
    assert "call-000000, output: value is not contiguous, and is read as if it were" in replay(tmp_path / "calls").output


def test_sums_in_16_bits_are_coarse_not_wrong(tmp_path):
    inputs, grad = call(M, torch.float16)
    results = computed(M, inputs, grad)
    results["output"] += 6e-4 * results["output"].abs().max() * torch.sign(torch.randn_like(results["output"]))
    save(tmp_path / "calls", M, inputs, grad, results)
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0, found.output
    assert (
        "coarse: call-000000, output: error typical of sums in float16; the operator's rules have sums in float32"
        in found.output
    )


def test_calls_that_the_vendors_device_would_refuse_are_remarked_on(tmp_path):
    def saved(name, heads, points):
        inputs = cases.multi_scale(1, 5, 8, heads, [(4, 6)], points)
        inputs = tuple(t.float() if t.is_floating_point() else t for t in inputs)
        grad = cases.grad_for(M, inputs).float()
        save(tmp_path / "calls", M, inputs, grad, computed(M, inputs, grad), name)

    saved("call-000000", 8, 4)
    assert "device would refuse" not in replay(tmp_path / "calls").output
    saved("call-000001", 16, 4)
    saved("call-000002", 16, 4)
    saved("call-000003", 2, 65)
    found = replay(tmp_path / "calls")
    assert found.exit_code == 0
    said = [line for line in found.output.splitlines() if "device would refuse" in line]
    assert said == [
        "the vendor's device would refuse call-000001 and 1 more: "
        "value must have num_heads <= 8 (Atlas A2 limit of 26.2); got 16",
        "the vendor's device would refuse call-000003: "
        "sampling_locations must have num_points * num_levels <= 64 (Atlas A2 limit of 26.2); got 65",
    ]
