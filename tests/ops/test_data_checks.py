"""data_checks() warns once of legal inputs that look like a mistake, does not warn of others, and changes no result."""

import functools
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import cases
import pytest
import torch
from attention_modules import results
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE, POOL
from programs import python
from small_cases import TINY
from values import Through

import mx_driving
from mx_driving import _data_checks
from mx_driving._dispatch.registered import REGISTERED
from mx_driving._operator.description import OPERATORS

NAN = float("nan")
SIZES = [(12, 20), (6, 10)]


def smooth(args):
    """Replace value by smooth pictures: neighbours differ little, except where a row ends."""
    value, shapes, starts = args[0].clone(), args[1].view(-1, 2).tolist(), args[2].flatten().tolist()
    rest = value.shape[2:].numel()
    for (h, w), start in zip(shapes, starts, strict=True):
        coarse = torch.randn(len(value), rest, 1 + h // 4, 1 + w // 4, generator=torch.Generator().manual_seed(0))
        picture = torch.nn.functional.interpolate(coarse, size=(h, w), mode="bilinear")
        value[:, start : start + h * w] = picture.flatten(2).transpose(1, 2).unflatten(2, value.shape[2:])
    return (value, *args[1:])


def on_map(args):
    """Clamp pixels of geometric_kernel_attention to their maps."""
    return (*args[:3], args[3].clamp(torch.tensor(0), (args[1].flip(-1) - 1)[:, None]), args[4])


def softmaxed(args):
    """Scale weights so that they sum to 1 over the samples of a query."""
    axes = (2, 3, 4) if args[4].dim() == 6 else (3, 4)
    return (*args[:4], args[4].abs() / args[4].abs().sum(axes, keepdim=True))


GOOD = {
    MULTI_SCALE: softmaxed(smooth(cases.multi_scale(2, 30, 8, 4, SIZES, 3))),
    # one camera stands upright
    AGGREGATION: softmaxed(smooth(cases.aggregation(2, 30, 7, 32, 4, [SIZES, [(16, 9), (8, 5)]]))),
    GEOMETRIC: softmaxed(smooth(on_map(cases.geometric(2, 30, 8, 4, SIZES, 3)))),
    POOL: (torch.randn(20, 8), torch.rand(5, 20).softmax(0).flatten(), *torch.randint(12, (3, 30)), 1, 1, 3, 4),
}


def of(operator, place, change):
    args = list(GOOD[operator])
    args[place] = change(args[place])
    return operator, args


def turned(shapes):
    return shapes.flip(-1)


def in_pixels(locations):
    return locations * 100


def one_nan(t):
    t = t.clone()
    t.view(-1)[: t.numel() // 4] = NAN
    return t


def tall_samples():
    """Return pixels that fit the maps only if height and width of the maps are exchanged."""
    args = (torch.zeros_like(GOOD[GEOMETRIC][0]), *GOOD[GEOMETRIC][1:])
    return GEOMETRIC, [*args[:3], args[3].flip(-1), args[4]]


def other_groups():
    """Return the tables that Sparse4D's feature_maps_format makes for cameras whose maps have different sizes."""
    shapes = torch.tensor([[[4, 6], [2, 3]], [[4, 6], [2, 3]], [[5, 6], [3, 3]]])
    args = [torch.rand(1, 99, 32), shapes, torch.tensor([[0, 24], [30, 54], [0, 30]])]
    return AGGREGATION, [*args, torch.rand(1, 30, 7, 3, 2), torch.rand(1, 30, 7, 3, 2, 4)]


def six_cameras():
    return softmaxed(smooth(cases.aggregation(1, 10, 2, 32, 4, [[(24, 44), (12, 22)]] * 6)))


def by_scale():
    """Return six cameras whose maps lie scale by scale."""
    args = six_cameras()
    maps = args[0].split(args[1].view(-1, 2).prod(-1).tolist(), 1)  # camera by camera
    return AGGREGATION, [torch.cat([*maps[::2], *maps[1::2]], 1), *args[1:]]


# (operator and arguments), the sentence
ROWS = [
    (lambda: of(MULTI_SCALE, 0, one_nan), "value should have no NaN; got 25 %"),
    (lambda: of(AGGREGATION, 3, one_nan), "sample_locations should have no NaN; got 25 %"),
    (lambda: of(POOL, 0, one_nan), "feat should have no NaN; got 25 %"),
    (lambda: of(POOL, 1, one_nan), "depth should have no NaN; got 25 %"),
    (lambda: of(POOL, 1, lambda depth: torch.arange(100.0) - 12),
     "depth should say how much of a pixel lies at each depth, 0..1; got 12 % below 0, as if they were logits"),
    (lambda: of(GEOMETRIC, 4, one_nan), "attention_weights should have no NaN; got 25 %"),
    (lambda: of(MULTI_SCALE, 3, in_pixels),
     "sampling_locations should be fractions of the map, 0..1; got 77.2 % that look like pixels, up to 115.3"),
    (lambda: of(AGGREGATION, 3, in_pixels),
     "sample_locations should be fractions of the map, 0..1; got 94 % that look like pixels, up to 170"),
    (lambda: of(MULTI_SCALE, 3, lambda locations: locations.clamp(0, 1) * 2 - 1),
     "sampling_locations should mostly lie on their maps, 0..1; got 73.5 % of samples off them and all in -1..1, "
     "the range of grid_sample"),
    (lambda: of(MULTI_SCALE, 3, lambda locations: locations - 3),
     "sampling_locations should mostly lie on their maps, 0..1; got 100 % of samples off them"),
    (lambda: of(AGGREGATION, 3, lambda locations: locations - 3),
     "sample_locations should lie in some camera's picture, 0..1, for most points; got 100 % of points in none"),
    (lambda: of(GEOMETRIC, 3, lambda locations: locations / 100 % 1),
     "sampling_locations should be pixels of each level; got none beyond 1 on a map of 12 x 20, as if 0..1 were the map"),
    (lambda: of(GEOMETRIC, 3, in_pixels), "sampling_locations should mostly lie on their maps; got 93.7 % of samples off them"),
    (tall_samples, "spatial_shapes should be (H, W); got 45.3 % of samples off their maps, and 0 % if the shapes were (W, H)"),
    (lambda: of(MULTI_SCALE, 1, lambda shapes: torch.stack([shapes[0], turned(shapes[1])])),
     "value_spatial_shapes should be (H, W) on every level; got (12, 20) beside (10, 6) in one pyramid"),
    (lambda: of(MULTI_SCALE, 1, turned),
     "value_spatial_shapes should be (H, W); got (20, 12), while rows of value seem to end every 20"),
    (lambda: of(AGGREGATION, 1, turned),
     "spatial_shape should be (H, W); got (20, 12), while rows of feature_maps seem to end every 20"),
    (other_groups, "scale_start_index should give each map rows of its own; got maps that overlap, "
     "while 39 of 99 rows of feature_maps are in none"),
    (by_scale, "feature_maps should hold the maps camera by camera, as the starts say; "
     "got maps that seem to lie scale by scale, all cameras of a scale together"),
    (lambda: of(MULTI_SCALE, 4, lambda t: t - 0.04),
     "attention_weights should come from a softmax, 0..1; got 10.5 % below 0, as if they were logits"),
    (lambda: of(AGGREGATION, 4, torch.neg),
     "weight should come from a softmax, 0..1; got 100 % below 0, as if they were logits"),
    (lambda: of(GEOMETRIC, 4, lambda t: t * 3),
     "attention_weights should sum to about 1 for each query, as after a softmax; got sums around 3"),
    (lambda: of(AGGREGATION, 4, lambda t: t / 2),
     "weight should sum to about 1 for each query, as after a softmax; got sums around 0.5"),
    (lambda: (POOL, [*GOOD[POOL][:5], 1, 4, 1, 3]),
     "bev_feat_shape should be (B, D, H, W, C); got D=4 beside H=1 and W=3, as if D and H were exchanged"),
]  # fmt: skip


def warned(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found if w.category is mx_driving.DataWarning]


def call(operator, args):
    return getattr(torch.ops.mx_driving if operator == POOL else mx_driving, operator)(*args)


@pytest.mark.parametrize(("make", "sentence"), ROWS, ids=[row[1] for row in ROWS])
def test_sentence(make, sentence):
    operator, args = make()
    assert warned(lambda: call(operator, args)) == []
    with mx_driving.data_checks():
        assert f"{operator}: {sentence}" in warned(lambda: call(operator, args))


@pytest.mark.parametrize("operator", [*cases.OPERATORS, POOL, "maps that lie camera by camera"])
def test_correct_inputs_are_not_warned_of(operator):
    operator, args = (operator, GOOD[operator]) if operator in GOOD else (AGGREGATION, six_cameras())
    with mx_driving.data_checks():
        assert warned(lambda: call(operator, args)) == []


def test_points_of_no_features_and_second_derivatives_are_not_warned_of():
    """Second derivatives are sums of other tensors than depth."""
    feat, depth, *rest = GOOD[POOL]
    leaves = feat.clone().requires_grad_(), depth.clone().requires_grad_()
    with mx_driving.data_checks():
        assert warned(lambda: call(POOL, (feat[:, :0], -depth, *rest))) == []
        first = torch.autograd.grad(call(POOL, (*leaves, *rest)).square().sum(), leaves, create_graph=True)
        assert warned(lambda: sum(g.square().sum() for g in first).backward()) == []
        assert warned(lambda: torch.func.jvp(lambda *t: call(POOL, (*t, *rest)), (feat, depth), (-feat, -depth))) == []


@pytest.mark.parametrize("starts", [[0, 240], [0, 300], [30, 300]])
def test_gaps_alone_and_shared_maps_alone_are_not_warned_of(starts):
    """Programs pad maps, and share a map between cameras or levels."""
    value, shapes, _, *rest = GOOD[MULTI_SCALE]
    padded = torch.nn.functional.pad(value, (0, 0, 0, 0, 0, 60))
    with mx_driving.data_checks():
        assert warned(lambda: call(MULTI_SCALE, (padded, shapes, torch.tensor(starts), *rest))) == []
        shared = (value[:, :240], shapes[:1].expand(2, -1), torch.tensor([0, 0]), *rest)
        assert warned(lambda: call(MULTI_SCALE, shared)) == []


@pytest.mark.parametrize("operator", cases.OPERATORS)
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_empty_inputs(operator, empty):
    """No batch, no queries, no points."""
    args = list(GOOD[operator])
    points = 4 if operator != AGGREGATION else 2
    for place in (0, 3, 4) if empty == 0 else (3, 4):
        args[place] = args[place].narrow((0, 1, points)[empty], 0, 0)
    with mx_driving.data_checks():
        assert warned(lambda: call(operator, args)) == []


def test_once_for_each_operator_and_kind_and_again_in_the_next_block():
    operator, args = of(MULTI_SCALE, 3, in_pixels)
    other = of(AGGREGATION, 3, in_pixels)
    for _ in range(2):
        with mx_driving.data_checks():
            assert len(warned(lambda: call(operator, args))) == 1
            with mx_driving.data_checks():
                assert warned(lambda: call(operator, args)) == []
            assert len(warned(lambda: call(*other))) == 1
            args[0] = one_nan(GOOD[operator][0])
            assert len(warned(lambda: call(operator, args))) == 1
            args[0] = GOOD[operator][0]


def test_warning_points_at_the_caller():
    operator, args = of(MULTI_SCALE, 3, in_pixels)
    with mx_driving.data_checks(), pytest.warns(mx_driving.DataWarning) as found:
        call(operator, args)
    assert found[0].filename == __file__


def test_an_error_comes_before_warnings():
    operator, args = of(MULTI_SCALE, 2, lambda starts: starts + 1)
    with mx_driving.data_checks(), pytest.raises(ValueError, match="must leave room"):
        call(operator, args)


WAYS = {
    "eager": lambda function: function,
    "compile": lambda function: torch.compile(function, fullgraph=True, backend="aot_eager"),
    "vmap": lambda function: lambda *args: torch.vmap(lambda weights: function(*args[:4], weights))(args[4][None])[0],
    "autocast": torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_same_results_and_one_warning_everywhere(operator, way):
    _, args = of(operator, 4, lambda weights: one_nan(weights))
    run = WAYS[way](getattr(mx_driving, operator))
    expected = results(run, *args)
    with mx_driving.data_checks():
        found = warned(lambda: results(run, *args))
        assert found == [f"{operator}: {OPERATORS[operator].inputs[4]} should have no NaN; got 25 %"]
        got = results(run, *args)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_an_exported_program_is_checked_when_it_runs(operator):
    args = tuple(of(operator, 0, one_nan)[1])
    with mx_driving.data_checks():
        program = torch.export.export(Through(getattr(mx_driving, operator)), args).module()
        assert len(warned(lambda: program(*args))) == 1


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_checks_run_only_inside_the_block_and_on_tensors_with_data(operator, monkeypatch):
    monkeypatch.setattr(_data_checks, "check", lambda *call: pytest.fail("looked"))
    call(operator, GOOD[operator])
    with mx_driving.data_checks():
        call(operator, [a.to("meta") for a in GOOD[operator]])
        with torch._subclasses.FakeTensorMode() as mode:
            call(operator, [mode.from_tensor(a) for a in GOOD[operator]])


@pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU"])
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_every_device(operator, key):
    """CPU tensors are passed to the kernels of other devices: Triton's executed PTX, and the reference."""
    small = cases.cast(TINY[operator](), torch.float32)
    args = (*small[:4], one_nan(small[4]))
    device = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    run = functools.partial(getattr(torch.ops.mx_driving, operator).default.redispatch, device)
    with mx_driving.data_checks():
        assert any("should have no NaN" in sentence for sentence in warned(lambda: run(*args)))


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on a device that is not here."""

    device = property(lambda _: torch.device("xpu"))  # pyright: ignore


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_tables_are_refused_on_every_device(operator):
    args = [a.as_subclass(Elsewhere) for a in GOOD[operator]]
    args[2] = args[2] + 1000
    run = REGISTERED[operator].run_reference
    with mx_driving.data_checks(), pytest.raises(ValueError, match="must leave room"):
        run(*args)
    assert run(*args).isfinite().all()  # without data checks


def test_environment_variable():
    code = (
        "import torch, mx_driving\n"
        "mx_driving.multi_scale_deformable_attn(torch.zeros(1, 1, 1, 12), torch.tensor([[1, 1]]), torch.tensor([0]),\n"
        "    torch.full((1, 1, 1, 1, 1, 2), 9.0), torch.zeros(1, 1, 1, 1, 1))\n"
    )
    for word, told in (("true", True), ("off", False)):
        env = {**os.environ, "MX_DRIVING_CHECK": word}
        done = python("-c", code, env=env)
        assert ("<string>:2: DataWarning: multi_scale_deformable_attn: sampling_locations should" in done.stderr) == told


def test_calls_of_other_threads_are_checked():
    """A server opens the checks in one thread and runs its model in another."""
    operator, args = of(MULTI_SCALE, 3, in_pixels)
    with mx_driving.data_checks(), ThreadPoolExecutor(1) as threads:
        assert len(warned(lambda: threads.submit(call, operator, args).result())) == 1
