"""The vendor's documented limits: one past each is refused inside atlas_limits(), and only there."""

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys

import cases
import logits_cases
import pytest
import torch
from programs import python
from refusals import said
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from values import Through

import mx_driving
from mx_driving._operator.rules import flag
from mx_driving._vendor import limits


def multi_scale(heads=1, dims=8, levels=1, points=1):
    return cases.MULTI_SCALE, cases.multi_scale(1, 1, dims, heads, [(2, 2)] * levels, points, margin=0)


def aggregation(bs=1, c=64, cams=1, scales=1, anchors=1, points=1, groups=8):
    args = cases.aggregation(bs, anchors, points, c, groups, [[(1, 1)] * scales] * cams)
    return cases.AGGREGATION, (*args[:3], args[3].clamp(0, 1), args[4])


def geometric(heads=1, dims=8, levels=1, points=1):
    return cases.GEOMETRIC, cases.geometric(1, 1, dims, heads, [(2, 2)] * levels, points)


def extra_row(operator, args):
    return operator, (torch.cat([args[0], args[0][:, :1]], 1), *args[1:])


def location_at(x, operator, args):
    return operator, (*args[:3], args[3] * 0 + x, args[4])


def pooling(channels=8, dtype=torch.float32):
    one = torch.zeros(1, dtype=torch.long)
    feat = torch.rand(1, channels, dtype=dtype)
    return "bev_pool_v3", (torch.rand(1, 1, dtype=dtype), feat, one, one, one, (1, 1, 1, 1, channels))


def multi_scale_logits(heads=1, levels=1, points=1):
    args = logits_cases.multi_scale(1, 1, 8, heads, [(2, 2)] * levels, points)
    return cases.MULTI_SCALE_LOGITS, args


def aggregation_logits(groups=8, ahead=True):
    """A camera that sees its point at (1 / 2, 1 / 2), or one that has it behind itself."""
    args = list(logits_cases.aggregation(1, 1, 1, 64, groups, [[(1, 1)]], False, False))
    args[3] = torch.tensor([1.0, 1.0, 2.0 if ahead else -2.0]).view(1, 1, 1, 3)
    args[4] = torch.eye(4)[None, None]
    return cases.AGGREGATION_LOGITS, tuple(args)


def geometric_logits(heads=1, levels=1, window=(1, 1)):
    return cases.GEOMETRIC_LOGITS, logits_cases.geometric(1, 1, 8, heads, [(2, 2)] * levels, window)


PAST = [
    (lambda: multi_scale(levels=5, points=13), "sampling_locations must have num_points * num_levels <= 64; got 65"),
    (lambda: multi_scale(heads=9), "value must have num_heads <= 8; got 9"),
    (lambda: multi_scale(dims=12), "value must have embed_dims a multiple of 8; got 12"),
    (lambda: multi_scale(dims=264), "value must have embed_dims <= 256; got 264"),
    (lambda: aggregation(bs=129), "feature_maps must have bs <= 128; got 129"),
    (lambda: aggregation(c=320), "feature_maps must have c <= 256; got 320"),
    (lambda: aggregation(cams=7), "weight must have cam <= 6; got 7"),
    (lambda: aggregation(scales=5), "weight must have scale <= 4; got 5"),
    (lambda: aggregation(anchors=2049), "weight must have anchor <= 2048; got 2049"),
    (lambda: aggregation(points=2049), "weight must have pts <= 2048; got 2049"),
    (lambda: aggregation(groups=4), "weight must have group == 8; got 4"),
    (lambda: aggregation(c=96), "feature_maps must have c / group a multiple of 8; got 12"),
    (lambda: extra_row(*aggregation()), "feature_maps must have num_feat == sum of H * W (1); got 2"),
    (lambda: location_at(1.25, *aggregation()), "sample_locations must have the largest value <= 1; got 1.25"),
    (lambda: location_at(-0.5, *aggregation()), "sample_locations must have the smallest value >= 0; got -0.5"),
    (lambda: geometric(dims=12), "value must have embed_dims a multiple of 8; got 12"),
    (lambda: geometric(heads=8, dims=256, points=8),
     "sampling_locations must have num_heads * num_levels * num_points (rounded up to 8) * embed_dims < 16384; got 16384"),
    (lambda: geometric(heads=8, levels=4, points=4),
     "sampling_locations must have num_heads * num_levels * num_points (rounded up to 8) < 256; got 256"),
    (lambda: pooling(channels=12), "feat must have C a multiple of 8; got 12"),
    (lambda: pooling(channels=368), "feat must have C <= 360; got 368"),
    (lambda: pooling(dtype=torch.float64), "feat must have dtype == float32; got float64"),
    # with logits, in the words of the bare operator
    (lambda: multi_scale_logits(levels=5, points=13), "sampling_locations must have num_points * num_levels <= 64; got 65"),
    (lambda: multi_scale_logits(heads=9), "value must have num_heads <= 8; got 9"),
    (lambda: aggregation_logits(groups=4), "weight must have group == 8; got 4"),
    (lambda: aggregation_logits(ahead=False), "sample_locations must have the largest value <= 1; got 100000"),
    (lambda: geometric_logits(heads=8, levels=4, window=(2, 4)),
     "sampling_locations must have num_heads * num_levels * num_points (rounded up to 8) < 256; got 256"),
]  # fmt: skip
WITHIN = [
    lambda: multi_scale_logits(heads=8, levels=7, points=9),
    aggregation_logits,
    lambda: geometric_logits(heads=31, window=(2, 4)),
    lambda: multi_scale(heads=8, dims=64, levels=7, points=9),
    lambda: multi_scale(heads=8, dims=256, levels=8, points=8),
    lambda: pooling(channels=360),
    lambda: aggregation(bs=128, cams=6, scales=4),
    lambda: aggregation(c=256, anchors=2048),
    lambda: aggregation(points=2048),
    lambda: geometric(heads=31, points=8),
]


@pytest.mark.parametrize(("make", "sentence"), PAST, ids=[row[1] for row in PAST])
def test_one_past_a_limit(make, sentence):
    operator, args = make()
    function = getattr(mx_driving, operator)
    function(*args)  # fine where nobody asked for the limits
    with mx_driving.atlas_limits(), pytest.raises(ValueError) as caught:
        function(*args)
    assert str(caught.value).startswith(sentence.replace("; got", " (Atlas A2 limit of 26.2); got"))
    function(*args)


@pytest.mark.parametrize("make", WITHIN)
def test_at_the_limits(make):
    operator, args = make()
    with mx_driving.atlas_limits(), mx_driving.atlas_limits():
        assert getattr(mx_driving, operator)(*args).isfinite().all()


FULL = "value must have num_heads <= 7 when num_points * num_levels is 64 and embed_dims 64"
BY_RELEASE = [  # a call, the releases that refuse it, and their sentence
    (lambda: multi_scale(heads=8, dims=64, levels=8, points=8), ("7.1",), FULL),
    (lambda: multi_scale(heads=7, dims=64, levels=8, points=8), (), ""),
    (lambda: multi_scale(dims=72), ("7.1", "7.2", "7.3"), "value must have embed_dims <= 64"),
    (lambda: multi_scale(dims=264), ("7.1", "7.2", "7.3", "26.0", "26.2"), "value must have embed_dims <= "),
    (lambda: multi_scale(heads=9), ("7.1", "7.2", "7.3", "26.0", "26.2"), "value must have num_heads <= 8"),
    (lambda: pooling(channels=368), ("26.2",), "feat must have C <= 360"),
]


@pytest.mark.parametrize("release", limits.RELEASES)
@pytest.mark.parametrize(("make", "refusing", "sentence"), BY_RELEASE)
def test_releases_have_limits_of_their_own(make, refusing, sentence, release):
    operator, args = make()
    with mx_driving.atlas_limits(release):
        if release in refusing:
            with pytest.raises(ValueError, match=rf"{re.escape(sentence)}.* \(Atlas A2 limit of {release}\); got "):
                getattr(mx_driving, operator)(*args)
        else:
            assert getattr(mx_driving, operator)(*args).isfinite().all()
        with mx_driving.atlas_limits("26.2"):  # both hold
            assert limits.current() == "26.2"
            refused = {release, "26.2"} & {*refusing}
            with pytest.raises(ValueError, match="Atlas A2 limit of ") if refused else contextlib.nullcontext():
                getattr(mx_driving, operator)(*args)
        assert limits.current() == release
    assert limits.current() == "26.2"


@pytest.mark.parametrize("release", ["7.4", "", 26.2, None])
def test_a_release_that_is_not_known_is_refused(release):
    assert said(lambda: mx_driving.atlas_limits(release)) == f"release must be 7.1, 7.2, 7.3, 26.0 or 26.2; got {release!r}"


def test_compiled_calls_follow_the_limits_of_the_moment():
    compiled = torch.compile(mx_driving.multi_scale_deformable_attn, backend="eager")
    _, args = multi_scale(dims=72)
    compiled(*args)
    with mx_driving.atlas_limits("7.3"), pytest.raises(Exception, match="embed_dims <= 64"):
        compiled(*args)
    with mx_driving.atlas_limits("26.0"):
        compiled(*args)


WAYS = {
    "vmap": lambda call, at, args: torch.vmap(call)(torch.stack([args[at]] * 3)),
    "vmap of grad": lambda call, at, args: torch.vmap(torch.func.grad(lambda t: call(t).sum()))(torch.stack([args[at]] * 3)),
    "grad": lambda call, at, args: torch.func.grad(lambda t: call(t).sum())(args[at]),
    "jvp": lambda call, at, args: torch.func.jvp(call, (args[at],), (args[at],)),
    "compile": lambda call, at, args: torch.compile(call, fullgraph=True, backend="eager")(args[at]),
    "dynamic": lambda call, at, args: torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")(args[at]),
    "export": lambda call, at, args: torch.export.export(Through(call), (args[at],)).module()(args[at]),
    "make_fx": lambda call, at, args: make_fx(call)(args[at])(args[at]),
}


BARE = [multi_scale, aggregation, geometric, pooling]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [*BARE, multi_scale_logits, aggregation_logits, geometric_logits])
def test_what_works_outside_works_inside(make, way):
    """Reading a wrapped tensor, or one of a graph, would raise torch's own error."""
    operator, args = make()
    at = len(args) - 1 if torch.is_tensor(args[-1]) else 1
    at = next(i for i in (at, *range(len(args))) if torch.is_tensor(args[i]) and args[i].is_floating_point())

    def call(t):
        return getattr(mx_driving, operator)(*args[:at], t, *args[at + 1 :])

    outside = WAYS[way](call, at, args)
    with mx_driving.atlas_limits():
        inside = WAYS[way](call, at, args)
    torch.testing.assert_close(inside, outside, rtol=0, atol=0)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("make", [*BARE, aggregation_logits])
def test_tensors_without_numbers_keep_the_limits_of_shapes(make, fake):
    operator, args = make()
    with FakeTensorMode() if fake else contextlib.nullcontext() as mode, mx_driving.atlas_limits():
        there = [(mode.from_tensor(a) if mode else a.to("meta")) if torch.is_tensor(a) else a for a in args]
        output = getattr(mx_driving, operator)(*there)
        if operator == cases.AGGREGATION:
            many = [torch.cat([t] * 129) if i in (0, 3, 4) else t for i, t in enumerate(there)]
            with pytest.raises(ValueError, match="bs <= 128"):
                mx_driving.deformable_aggregation(*many)
    assert output.shape == getattr(mx_driving, operator)(*args).shape


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
@pytest.mark.parametrize("rule", ["the largest value <= 1", "sum of H"])
def test_numbers_inside_transforms_are_read(transform, rule):
    """A location beyond the picture in one entry of a vmapped axis, and maps that do not fill the rows."""
    _, args = extra_row(*aggregation()) if rule == "sum of H" else location_at(1.25, *aggregation())
    locations = torch.stack([args[3] * 0 + 0.5, args[3]])

    def call(t):
        return mx_driving.deformable_aggregation(*args[:3], t, args[4])

    run = functools.partial(torch.vmap(call), locations) if transform == "vmap" else lambda: WAYS[transform](call, 3, args)
    with mx_driving.atlas_limits(), pytest.raises(ValueError, match=rule):
        run()


def test_elements_limit_counts_without_memory():
    args = aggregation()[1]
    big = torch.zeros(1).expand(100, 2048, 2048, 1, 2)
    weight = torch.zeros(1).expand(100, 2048, 2048, 1, 1, 8)
    with mx_driving.atlas_limits(), pytest.raises(ValueError, match=r"num_elements <= 150000000"):
        mx_driving.deformable_aggregation(torch.zeros(100, 1, 64), *args[1:3], big, weight)


CALL = (
    "import torch, mx_driving\n"
    "mx_driving.multi_scale_deformable_attn(torch.zeros(1, 1, 1, 12), torch.tensor([[1, 1]]), torch.tensor([0]),\n"
    "    torch.zeros(1, 1, 1, 1, 1, 2), torch.zeros(1, 1, 1, 1, 1))\n"
)


def with_flag(word, dims):
    return python("-c", CALL.replace("12", str(dims)), env={**os.environ, "MX_DRIVING_ATLAS_LIMITS": word}, check=False)


WORDS = [("On", 264, "26.2"), ("7.3", 72, "7.3"), ("26.0", 72, ""), ("0", 264, "")]


@pytest.mark.parametrize(("word", "dims", "release"), WORDS)
def test_environment_variable(word, dims, release):
    done = with_flag(word, dims)
    assert done.returncode == bool(release)
    assert ("Atlas A2 limit" in done.stderr) == bool(release)
    assert f"(Atlas A2 limit of {release})" in done.stderr or not release


def test_word_that_is_no_release_stops_the_import():
    done = with_flag("ture", 8)
    rule = "be 1, true, yes or on; 0, false, no, off or empty; or a release: 7.1, 7.2, 7.3, 26.0 or 26.2; got 'ture'"
    assert done.stderr.splitlines()[-1] == f"mx_driving._operator.rules.SettingError: MX_DRIVING_ATLAS_LIMITS must {rule}"


ON, OFF = ("1", "true", "Yes", "ON"), ("0", "False", "no", "OFF", "")


@pytest.mark.parametrize("word", [None, *ON, *OFF, "2", "y", " 1", "none"])
@pytest.mark.parametrize("name", ["MX_DRIVING_CHECK", "MX_DRIVING_TRITON"])
def test_words_of_flags(name, word, monkeypatch):
    monkeypatch.delenv(name, raising=False) if word is None else monkeypatch.setenv(name, word)
    if word in (None, *ON, *OFF):
        assert flag(name) == (word in ON)
        assert flag(name, default=True) == (word in (None, *ON, ""))
    else:
        with pytest.raises(ValueError) as caught:
            flag(name)
        assert str(caught.value) == f"{name} must be 1, true, yes or on, or 0, false, no, off or empty; got {word!r}"


FLAGS = [f"MX_DRIVING_{name}" for name in ("CHECK", "TRITON", "GPU_LAUNCH", "CTYPES", "ATLAS_LIMITS")]
COMMANDS = ["-c from mx_driving_portable.command import main; main()", "-m mx_driving", "-m mx_driving.__main__"]


@pytest.mark.parametrize(("name", "command"), [*zip(FLAGS, itertools.cycle(COMMANDS), strict=False)])
def test_a_command_says_in_a_sentence_what_the_environment_must_be(name, command):
    words = [sys.executable, *command.split(" ", 1), "--help"]
    done = subprocess.run(words, env={**os.environ, name: "2"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"mx-driving: {name} must be 1, true, yes or on.*; got '2'\n", done.stderr)
