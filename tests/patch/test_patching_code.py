"""patch: which code has the same key, and how a core that the caller names is tried."""

import importlib
import re
import sys
import types

import pytest
import torch
from attention_modules import BARE, close, core_arguments, library, operators, plain_core

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
    casts, half = "cast_inputs=torch.float32", "cast_inputs=torch.float16"
    changes = [(casts, half), (f", {casts}", ""), ("grad / 2", "grad"), ("", "")]
    assert len({key_of(SAMPLE.replace(old, new), "Halves") for old, new in changes}) == 4


CLOSURE = "def make(times):\n  class Attention(Base):\n    def forward(self, query): return times\n  return Attention\n"
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
SCALE, OPTIONS = 1.0, {"scale": 1.0}
def late(x):
    return x * SCALE
def core(value, value_spatial_shapes, sampling_locations, attention_weights):
    bs, _, heads, channels = value.shape
    PRE
    out = plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)
    POST
    return out
"""


def core_of(place="", code=""):
    source = CORE.replace(place or "PRE", code or "pass")
    return library(plain_core, source=source.replace("PRE", "pass").replace("POST", "pass"))


DIFFERS = "its result on a small example differs from the operator's by"
CLAMPED = "{0} = {0}.clamp({1})"
# Edits of a core, and why a trial refuses the core.
EDITS = [
    ("PRE", CLAMPED.format("value", "-0.3, 0.3"), DIFFERS),
    ("PRE", CLAMPED.format("value", "-100, 100"), DIFFERS),
    ("PRE", CLAMPED.format("attention_weights", "-0.4, 1"), DIFFERS),
    ("PRE", CLAMPED.format("attention_weights", "-1e3, 1e3"), DIFFERS),
    ("PRE", CLAMPED.format("sampling_locations", "-0.3, 1.3"), DIFFERS),
    ("PRE", "sampling_locations = sampling_locations.detach()", DIFFERS),
    ("PRE", "value = value.nan_to_num() * 1.00001", DIFFERS),
    ("POST", "out = out * 2 if torch.is_grad_enabled() else out", DIFFERS),
    ("POST", "out = out * 2 if value.dtype == torch.float64 else out", DIFFERS),
    ("POST", "out = out * 2 if value.requires_grad else out", DIFFERS),
    ("POST", "out = out * (1 + max(0, heads - 2))", DIFFERS),
    ("POST", "out = out.transpose(0, 1)", "its results have other shapes"),
    ("POST", "out = out.float()", "its results have another dtype"),
    ("POST", "out = out.half() if value.dtype == torch.bfloat16 else out", "its results are torch.float16"),
    ("POST", "out = [out]", "it returns a list"),
    ("POST", "out = {'out': out}", "it returns a dict"),
    ("POST", "out = out.tolist()", "it returns something else beside tensors"),
    ("POST", "yield out", "it returns something else beside tensors"),
    ("POST", "raise RuntimeError('Not implemented on the CPU')", "it does not run on a small example: RuntimeError"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "code", "reason"), EDITS)
def test_an_unknown_core_keeps_its_code_and_a_named_core_that_computes_something_else_is_refused(place, code, reason):
    module = core_of(place, code)
    own = module.core.__code__
    with mx_driving.patched(module) as done:
        assert done.skipped["a_library.core"].startswith("its code is not known")
        assert done.skipped["a_library.core"].endswith('To replace it, try: mx_driving.patch(..., forms={core: "core"})')
        assert module.core.__code__ is own
    with pytest.raises(ValueError, match=f"^forms must name the form .*; got 'core' for core: {re.escape(reason)}"):
        mx_driving.patch(module, forms={module.core: "core"})
    assert module.core.__code__ is own


REACHED = [  # code, and what changes after patch
    ("out = out * SCALE", lambda module: setattr(module, "SCALE", 2.0)),
    ("out = out * OPTIONS['scale']", lambda module: setattr(module, "OPTIONS", {"scale": 2.0})),
    ("out = late(out)", lambda module: setattr(module, "SCALE", 2.0)),
    ("out = late(out)", lambda module: setattr(module, "late", torch.neg)),
    ("out = late(out)", lambda module: setattr(module.late, "__code__", (lambda x: 2 * x).__code__)),
    ("out = out", lambda module: setattr(module, "plain_core", lambda *a: 2 * plain_core(*a))),
]


@pytest.mark.parametrize("keyless", ["", "globals(); "])
@pytest.mark.parametrize(("code", "change"), REACHED)
def test_a_named_core_runs_its_own_code_after_a_change_of_what_it_reaches(code, change, keyless):
    module, arguments = core_of("POST", keyless + code), core_arguments((2, 4))
    with mx_driving.patched(module, forms={module.core: "core"}):
        before = module.core(*arguments)
        assert operators(module.core, *arguments) == [BARE]
        change(module)
        expected = core_of().core(*arguments)  # its plain_core is replaced, too
        torch.testing.assert_close(before, expected)
        changed = module.core(*arguments)
    torch.testing.assert_close(changed, module.core(*arguments))
    assert not torch.allclose(changed, before)


def double(name):
    return lambda space: setattr(space, name, 2.0)


def replace_more(module):
    module.utils.more = types.ModuleType("utils.more")
    module.utils.more.SCALE = 2.0


NESTED = "types.SimpleNamespace(a=types.SimpleNamespace(b=1.0))"
# How known code reads a constant: a line of its file, the expression, and a change to 2.
CONSTANTS = {
    "of a dtype": ("A = torch.int8", "(1 + (A is not torch.int8))", lambda module: setattr(module, "A", torch.bool)),
    "of another module": ("import utils", "utils.SCALE", lambda module: double("SCALE")(module.utils)),
    "by an alias": ("import utils as u", "u.SCALE", lambda module: double("SCALE")(module.u)),
    "of a module in a module": ("import utils", "utils.more.SCALE", lambda module: double("SCALE")(module.utils.more)),
    "of a module that takes another's place": ("import utils", "utils.more.SCALE", replace_more),
    "in a dict of another": ("import utils", "utils.OPTIONS['a']", lambda module: module.utils.OPTIONS.update(a=2.0)),
    "imported by its name": ("from utils import SCALE", "SCALE", double("SCALE")),
    "in an imported dict": ("from utils import OPTIONS", "OPTIONS['a']", lambda module: module.OPTIONS.update(a=2.0)),
    "in a nested dict": ("OPTIONS = {'a': {'b': 1.0}}", "OPTIONS['a']['b']", lambda module: module.OPTIONS["a"].update(b=2.0)),
    "in a list": ("OPTIONS = [1.0]", "OPTIONS[0]", lambda module: module.OPTIONS.insert(0, 2.0)),
    "of a call": ("SCALE = float('1')", "SCALE", double("SCALE")),
    "in a dict of a call": ("OPTIONS = dict(a=1.0)", "OPTIONS['a']", lambda module: module.OPTIONS.update(a=2.0)),
    "of an object": ("OPTIONS = types.SimpleNamespace(a=1.0)", "OPTIONS.a", lambda module: double("a")(module.OPTIONS)),
    "of a nested object": (f"OPTIONS = {NESTED}", "OPTIONS.a.b", lambda module: double("b")(module.OPTIONS.a)),
    "in a list in a tuple": ("S = ([1.0],)", "S[0][0]", lambda module: module.S[0].insert(0, 2.0)),
    "in a default": ("def one(x=[1.0]):\n    return x[0]", "one()", lambda module: module.one.__defaults__[0].insert(0, 2.0)),
    "by keyword": ("def one(*, x=1.0):\n    return x", "one()", lambda module: module.one.__kwdefaults__.update(x=2.0)),
}
OBJECT = """class Options:
    a = 1.0
    p = property(lambda self: self.a)
    def m(self):
        return self.a
    def __getattr__(self, name):
        return self.a
    def __getitem__(self, name):
        return self.a
OPTIONS = Options()"""
# The values of these may change where nobody looks: such code has no key.
UNSEEN = {
    "a tensor": ("SCALE = torch.ones(())", "SCALE"),
    "a tensor in a dict": ("OPTIONS = {'a': torch.ones(())}", "OPTIONS['a']"),
    "of a parameter": ("SCALE = torch.nn.Parameter(torch.ones(()))", "SCALE.detach()"),
    "an array": ("import numpy as np\nSCALE = np.ones(1)", "SCALE[0]"),
    "a deque": ("import collections\nSCALE = collections.deque([1.0])", "SCALE[0]"),
    "an iterator": ("import itertools\nSCALE = itertools.cycle([1.0, 2.0])", "next(SCALE)"),
    "a context variable": ("import contextvars\nSCALE = contextvars.ContextVar('SCALE', default=1.0)", "SCALE.get()"),
    "an object in a tuple": (f"OPTIONS = ({NESTED},)", "OPTIONS[0].a.b"),
    "by getattr from an object": (f"OPTIONS = {NESTED}", "getattr(OPTIONS.a, 'b')"),
    "by vars": (f"OPTIONS = {NESTED}", "vars(OPTIONS)['a'].b"),
    "of an object's function": ("OPTIONS = types.SimpleNamespace(a=lambda: 1.0)", "OPTIONS.a()"),
    **{
        f"{word} of an object": (OBJECT, word)
        for word in ("OPTIONS.a", "OPTIONS.p", "OPTIONS.m()", "OPTIONS.g", "OPTIONS['i']")
    },
    "of an object with slots": ("class Slots:\n    __slots__ = ('a',)\nOPTIONS = Slots()\nOPTIONS.a = 1.0", "OPTIONS.a"),
    "of a function": ("def one():\n    return one.a\none.a = 1.0", "one()"),
    "by getattr": ("import utils", "getattr(utils, 'SCALE')"),
    "by another name of getattr": ("import utils", "[get(utils, 'SCALE') for get in [getattr]][0]"),
    "by a module's dict": ("import utils", "utils.__dict__['SCALE']"),
    "by a local import": ("def one():\n    import utils\n    return utils.SCALE", "one()"),
    "by a local import of a name": ("def one():\n    from utils import SCALE\n    return SCALE", "one()"),
    "by import_module": ("import importlib", "importlib.import_module('utils').SCALE"),
    "by __import__": ("", "__import__('utils').SCALE"),
    "by sys.modules": ("import sys", "sys.modules['utils'].SCALE"),
    "a tensor in another module's dict": ("import utils\nutils.OPTIONS = {'a': torch.ones(())}", "utils.OPTIONS['a']"),
    "by globals": ("SCALE = 1.0", "globals()['SCALE']"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CONSTANTS)
def test_known_code_follows_a_constant_that_changes_before_patch_or_after_it(name, when, monkeypatch):
    (line, word, change), arguments = CONSTANTS[name], core_arguments((2, 4))
    make_module(line, word, monkeypatch, known="core")
    module = make_module(line, word, monkeypatch)
    if when == "before":
        change(module)
    with mx_driving.patched(module) as done:
        if when == "after":
            assert "a_library.core" in done.replaced
            assert operators(module.core, *arguments) == [BARE]
            change(module)
        close(module.core(*arguments), 2 * plain_core(*arguments))


def make_module(line, word, monkeypatch, known=""):
    """Return a library whose core multiplies by a constant."""
    utils, more = types.ModuleType("utils"), types.ModuleType("utils.more")
    vars(utils).update(SCALE=1.0, OPTIONS={"a": 1.0}, more=more)
    vars(more).update(SCALE=1.0)
    monkeypatch.setitem(sys.modules, "utils", utils)
    core = CORE[CORE.index("def core") :].replace("PRE", "pass").replace("POST", f"out = out * {word}")
    return library(plain_core, source=f"import types\n{line}\n{core}", known=known)


@pytest.mark.parametrize("name", UNSEEN)
def test_code_that_reads_what_may_change_unseen_has_no_key(name, monkeypatch):
    with pytest.raises(NoKey):
        make_module(*UNSEEN[name], monkeypatch, known="core")


LAYER = """
SCALE = 1.0
class Core(torch.nn.Module):
    def forward(self, value, value_spatial_shapes, sampling_locations, attention_weights):
        return self.post(plain_core(value, value_spatial_shapes, sampling_locations, attention_weights))
    def post(self, x):
        return x * SCALE
"""


def test_methods_of_a_core_that_is_a_layer_count():
    module, arguments = library(plain_core, source=LAYER), core_arguments((2, 4))
    with mx_driving.patched(module) as done:
        assert done.skipped["a_library.Core"].endswith('forms={Core: "core"})')
    with mx_driving.patched(module, forms={module.Core: "layer"}):
        assert operators(module.Core(), *arguments) == [BARE]
        before, module.Core.post = module.Core()(*arguments), lambda self, x: 3 * x
        torch.testing.assert_close(module.Core()(*arguments), 3 * before)
    doubled = library(plain_core, source=LAYER.replace("x * SCALE", "2 * x"))
    with pytest.raises(ValueError, match=f"got 'layer' for Core: {DIFFERS}"):
        mx_driving.patch(doubled, forms={doubled.Core: "layer"})


def test_a_method_of_tensors_that_a_library_restored_is_torchs(monkeypatch):
    """A library's tracer replaces an inherited method, and sets it back on Tensor itself."""
    module = make_module("", "(1 + 0 * out.reshape(-1)[0])", monkeypatch, known="core")
    own = torch.Tensor.reshape
    try:
        torch.Tensor.reshape = lambda *args: own(*args)
        with pytest.raises(ValueError, match=r"because torch\.Tensor\.reshape is replaced"):
            mx_driving.patch(module)
        torch.Tensor.reshape = own
        with mx_driving.patched(module) as done:
            assert "a_library.core" in done.replaced
    finally:
        if "reshape" in vars(torch.Tensor):
            del torch.Tensor.reshape
