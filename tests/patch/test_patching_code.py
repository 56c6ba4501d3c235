"""patch: which code has the same key, which unknown cores are tried, and that all other code keeps its own numbers."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from attention_modules import SIZES, core_arguments, library, plain_core

import mx_driving
from mx_driving._patch._code import NoKey, Reader
from mx_driving._patch._search import is_core

pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch")
SAMPLE = """
import math
FACTOR = 2
def double(x, times=FACTOR):
    return times * x
class Base(torch.nn.Module):
    def scale(self, x):
        return math.sqrt(4) * x
class Attention(Base):
    def forward(self, query, mask=None):
        hidden = query if mask is None else query * ~mask[..., None]
        x, (y, *_) = [double(h) for h in hidden], {"a": -1, **{}}
        return self.scale(x[0]) @ hidden[0, 1:, ...].T
class Halves(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        return x / 2
    @staticmethod
    def backward(ctx, grad):
        return grad / 2
"""


def key_of(source, name="Attention"):
    return Reader(is_core).read(vars(library(source=source))[name]).key


def test_a_key_is_the_same_in_each_python():
    assert (key_of(SAMPLE), key_of(SAMPLE, "Halves")) == KEYS


KEYS = ("3c8206e7bc33", "2d73d017f5db")
SAME = [  # edits that do not change the key
    ("Attention", "Other"),
    ("mask=None):", 'mask: "torch.Tensor | None" = None) -> None:\n        """Return something."""  # and a comment'),
    ("        return self", "        assert len(query) > 1, mask\n        return self"),
    (
        "        return self",
        "        if query.size(0) > 5 or len(query) == 0:\n            raise ValueError(f'no {query}')\n        return self",
    ),
    ("        return self", "        print(query)\n        return self"),
    ("    return times", "    '''Twice.'''\n    return times"),
    ("    def forward(self", "    @torch.no_grad()\n    def forward(self"),  # whose wrapper goes on to wrap the new code
    ("math.sqrt(4)", "(  math . sqrt( 4 ))"),
]
OTHERS = [  # edits that change the key
    *(("FACTOR = 2", "FACTOR = 3"), ("times * x", "x * times"), ("times * x", "times * x * times"), ("sqrt(4)", "sqrt(5)")),
    *(("sqrt", "floor"), ("import math", "import cmath as math"), ("math.sqrt(4)", "self.factor"), ("1:, ...", "1:")),
    *(("mask=None", "mask=0"), ("is None", "is not None"), ("~mask", "mask"), ("-1", "1"), ("(self, query", "(self, *, query")),
    ("        return self", "        if query.mul_(2).sum() > 5:\n            raise ValueError\n        return self"),
    ("        return self", "        if (query := 2 * query).dim() > 5:\n            raise ValueError\n        return self"),
    ("        return self", "        assert query.mul_(2).sum() > 0\n        return self"),
    ("class Attention(Base):", "class Attention(Base):\n    def scale(self, x):\n        return x\n"),
    ("hidden[0, 1:", "torch.nn.functional.relu(hidden)[0, 1:"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), SAME)
def test_comments_and_checks_do_not_change_a_key(old, new):
    assert SAMPLE.replace(old, new) != SAMPLE
    assert key_of(SAMPLE.replace(old, new), "Other" if new == "Other" else "Attention") == key_of(SAMPLE)


@pytest.mark.parametrize(("old", "new"), OTHERS)
def test_every_other_edit_changes_the_key(old, new):
    assert key_of(SAMPLE.replace(old, new)) != key_of(SAMPLE)


def test_decorators_of_an_autograd_function_count():
    """mmcv's two functions differ in their decorators alone."""
    changes = [
        ("cast_inputs=torch.float32", "cast_inputs=torch.float16"),
        (", cast_inputs=torch.float32", ""),
        ("grad / 2", "grad"),
    ]
    keys = {key_of(SAMPLE.replace(old, new), "Halves") for old, new in [*changes, ("", "")]}
    assert len(keys) == 4


CLOSURE = (
    "def make(times):\n  class Attention(Base):\n    def forward(self, query):\n        return times\n  return Attention\n"
)
NOT_READ = [
    ("class Attention(Base):", f"{CLOSURE}Attention = make(2)\nclass Other(Base):"),
    ("    def forward(self", "    forward = lambda self, query: query\n    def other(self"),
    ("self.scale(", "super().scale("),
]


@pytest.mark.parametrize(("old", "new"), NOT_READ)
def test_code_that_cannot_be_read_whole_has_no_key(old, new):
    with pytest.raises(NoKey):
        key_of(SAMPLE.replace(old, new))


@pytest.mark.parametrize("text", ["", SAMPLE.replace("sqrt(4)", "sqrt(5)"), f"\n{SAMPLE}"])
def test_a_file_that_changed_after_its_import_has_no_key(text, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_changed_library.py").write_text("import torch\n" + SAMPLE)
    module = importlib.import_module("a_changed_library")
    monkeypatch.delitem(sys.modules, "a_changed_library")
    (tmp_path / "a_changed_library.py").write_text("import torch\n" + text)
    with pytest.raises(NoKey, match="is not at hand"):
        Reader(is_core).read(module.Attention)


CORE = """
import contextlib, os, random
SCALE, OPTIONS, CLASS_OF = 1.0, {"scale": 1.0}, type("Options", (), {"scale": 1.0})
def post(x):
    return x
def late():
    return SCALE
class Context:
    def __enter__(self): return 1
    def __exit__(self, *a): pass
def core(value, value_spatial_shapes, sampling_locations, attention_weights):
    bs, _, heads, channels = value.shape
    PRE
    out = plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)
    POST
    return out
"""
# Edits of a core, and why the core keeps its code.
IMPURE = [
    ("POST", "out = out * SCALE", "reads the global SCALE"),
    ("POST", "out = out * OPTIONS['scale']", "reads the global OPTIONS"),
    ("POST", "out = out * late()", "calls late, which reads the global SCALE"),
    ("POST", "out = out * [late() for _ in '1'][0]", "calls late, which reads the global SCALE"),
    ("POST", "out = out * getattr(out, 'scale', 1)", "reads the global getattr"),
    ("POST", "out = out * float(os.environ.get('SCALE', 1))", "asks for environ"),
    ("POST", "out = out * (1 + 0 * random.random())", "random"),
    ("POST", "global SCALE; SCALE = 2", "sets the global SCALE"),
    ("POST", "core.calls = 1", "sets the attribute calls"),
    ("POST", "import os", "imports os"),
    ("POST", "out = yield out", "is not a plain function"),
    ("POST", "out = out * 2 if torch.is_grad_enabled() else out", "asks for is_grad_enabled"),
    ("POST", "out = out * 2 if torch.get_default_dtype() == torch.float64 else out", "asks for get_default_dtype"),
    ("POST", "out = out * 2 if torch.is_autocast_enabled() else out", "asks for is_autocast_enabled"),
    ("POST", "out = out * 2 if value.dtype == torch.float64 else out", "has a branch on value.dtype == torch.float64"),
    ("POST", "out = out * 2 if value.is_cuda else out", "has a branch on value.is_cuda"),
    ("POST", "out = out * 2 if value.requires_grad else out", "has a branch on value.requires_grad"),
    ("POST", "out = out * 2 if bs > 3 else out", "has a branch on bs > 3"),
    ("POST", "out = out * 2 if channels >= 64 else out", "has a branch on channels >= 64"),
    ("POST", "out = out * (1 + (heads == 8))", "has a branch on heads == 8"),
    ("POST", "out = [out, 2 * out][value.shape[0] > 3]", "has a branch on value.shape[0] > 3"),
    ("POST", "while bs > 3: bs, out = 0, 2 * out", "has a branch on bs > 3"),
    ("POST", "out = sum(2 * out for _ in [1] if bs > 3) + out", "has a branch on bs > 3"),
    ("POST", "out = out * (bs > 3 and 2 or 1)", "has a branch on bs > 3"),
    ("POST", "if SCALE == 1: pass", "reads the global SCALE"),
    ("PRE", "value = value.clamp(-0.3, 0.3)", "differs from the operator's by"),
    ("PRE", "sampling_locations = sampling_locations.detach()", "differs from the operator's by"),
    ("POST", "out = out.transpose(0, 1)", "other shapes"),
    ("POST", "out = out.float()", "another dtype"),
    ("POST", "raise RuntimeError('Not implemented on the CPU')", "does not run on a small example: RuntimeError"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "code", "reason"), IMPURE)
def test_an_unknown_core_that_is_not_pure_or_computes_something_else_keeps_its_code(place, code, reason):
    module = library(plain_core, source=CORE.replace(place, code).replace("PRE", "pass").replace("POST", "pass"))
    own = module.core.__code__
    with mx_driving.patched(module) as done:
        assert reason in done.skipped["a_library.core"]
        assert f"left alone a_library.core: {done.skipped['a_library.core']}" in repr(done)
        assert module.core.__code__ is own


LAYER = """
SCALE = 1.0
class Core(torch.nn.Module):
    def forward(self, value, value_spatial_shapes, sampling_locations, attention_weights):
        return self.post(plain_core(value, value_spatial_shapes, sampling_locations, attention_weights))
    def post(self, x):
        return x * SCALE
"""


def test_methods_of_a_core_that_is_a_layer_must_be_pure():
    with mx_driving.patched(library(plain_core, source=LAYER)) as done:
        assert "calls post, which reads the global SCALE" in done.skipped["a_library.Core"]
    with mx_driving.patched(library(plain_core, source=LAYER.replace("x * SCALE", "x"))) as done:
        assert done.replaced == ("attention_modules.plain_core", "a_library.Core")


CLAMPED = "{0} = {0}.clamp({1})"
# Edits of a pure core that small examples might not show, and the arguments that show them.
HIDDEN = [
    ("PRE", CLAMPED.format("value", "-0.6, 0.6"), {}),
    ("PRE", CLAMPED.format("value", "-100, 100"), {"times": 1e3}),
    ("PRE", CLAMPED.format("attention_weights", "-1, 1"), {}),
    ("PRE", CLAMPED.format("attention_weights", "-1e3, 1e3"), {"times": 1e5}),
    ("PRE", CLAMPED.format("sampling_locations", "-0.3, 1.3"), {"sizes": [(1, 1)]}),
    ("POST", "out = out * (1 + max(0, heads - 7))", {"heads": 8}),
    ("POST", "out = out * (1 + int(value.abs().max() // 50))", {"times": 1e3}),
    ("PRE", "sampling_locations = sampling_locations.expand(-1, -1, heads, -1, -1, -1)", {"broadcast": 2}),
    ("PRE", "sampling_locations = sampling_locations.expand(bs, -1, -1, -1, -1, -1)", {"broadcast": 0}),
]


def core_inputs(bs=2, queries=9, heads=3, channels=4, sizes=SIZES, times=1.0, broadcast=None):
    value, _, locations, weights = core_arguments((len(sizes), 4), sides=(bs, queries, heads, channels), sizes=sizes)
    locations = locations * 5 - 2
    locations = locations if broadcast is None else locations.narrow(broadcast, 0, 1)
    return times * (value - 0.4), sizes, locations, times * (weights - 0.4)


@pytest.mark.parametrize(("place", "code", "more"), HIDDEN)
def test_an_unknown_core_has_its_own_numbers_on_all_inputs(place, code, more):
    """The numbers are the same, whether `patch` replaces the core or not."""
    module = library(plain_core, source=CORE.replace(place, code).replace("PRE", "pass").replace("POST", "pass"))
    inputs = core_inputs(**more)
    expected = module.core(*inputs)
    with mx_driving.patched(module):
        out = module.core(*inputs)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
