"""viz: recorded looks, and the places of dots and cells in drawings."""

import dataclasses
import io
import pickle
import re

import cases
import pytest
import torch
from pages import BirdsEyeLayer, aggregation, attention, geometric
from programs import python
from refusals import said
from small_cases import GROWING
from values import first

import mx_driving
from mx_driving import viz

matplotlib = pytest.importorskip("matplotlib.image") and pytest.importorskip("matplotlib")


def test_recording_sees_every_sampling_operator_and_no_backward():
    value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(1, 8, 4, 4, requires_grad=True)])
    heads, weights = value.view(1, 16, 2, 4), torch.rand(1, 3, 2, 1, 2)
    with viz.recording() as looks:
        out = mx_driving.multi_scale_deformable_attn(heads, shapes, starts, torch.rand(1, 3, 2, 1, 2, 2), weights)
        out.sum().backward()
        mx_driving.geometric_kernel_attention(heads, shapes, starts, torch.zeros(1, 3, 2, 1, 2, 2).long(), weights)
        maps = mx_driving.nn.flatten_cameras([torch.rand(1, 1, 8, 4, 4)])
        mx_driving.deformable_aggregation(*maps, torch.rand(1, 2, 3, 1, 2), torch.rand(1, 2, 3, 1, 1, 4))
        mx_driving.bev_pool(torch.rand(1, 8), torch.zeros(1, 4).long(), 1, 1, 1, 1)  # a pool samples nothing
    mx_driving.multi_scale_deformable_attn(heads, shapes, starts, torch.rand(1, 3, 2, 1, 2, 2), weights)
    assert [look.operator for look in looks] == [cases.MULTI_SCALE, cases.GEOMETRIC, cases.AGGREGATION]
    assert torch.equal(looks[0].weights, weights)
    assert not looks[0].table.requires_grad


def test_a_look_has_the_name_of_its_layer():
    """The name is of the innermost module, within the outermost called module. A layer that raised before leaves no name."""
    model = torch.nn.ModuleDict({"encoder": BirdsEyeLayer()})
    model.forward = lambda mask: model["encoder"](mask)
    with viz.recording() as looks:
        with pytest.raises(TypeError):
            model(None)
        model(torch.ones(3, 12).bool())
        model["encoder"].temporal(torch.rand(1, 12, 16), torch.rand(1, 2, 12, 1, 2), None, *cases.levels_of((3, 4)))
        mx_driving.multi_scale_deformable_attn(*GROWING[cases.MULTI_SCALE](2, 5))
    spatial = ["encoder.spatial.deformable_attention"] * 3
    decoder = ["encoder.decoder.0", "encoder.decoder.1"]
    assert [look.layer for look in looks] == ["encoder.temporal", "encoder.temporal", *spatial, *decoder, "", ""]
    assert [len(looks.of(name)) for name in ("spatial", "encoder", "decoder.*", "encoder.decoder.1")] == [3, 7, 2, 1]
    assert looks.of("decoder").of("1")[0] is looks[6]
    assert repr(looks[6]).startswith("Look(multi_scale_deformable_attn of encoder.decoder.1: table [1, 12, 8, 2] float32")
    names = "encoder.temporal, encoder.spatial.deformable_attention, encoder.decoder.0, encoder.decoder.1"
    assert said(lambda: looks.of("spatia")) == f"layer must be part of a name of the recorded layers ({names}); got 'spatia'"


@pytest.mark.parametrize("make", [attention, aggregation, geometric])
def test_samples_of_a_look_are_drawn(make):
    """Every sample on the map is a dot, for every operator."""
    look = make()
    camera, scene = (2, 0) if make is aggregation else (0, 1)
    locations, weights = look.samples(3, camera, scene)
    heads, levels, points = weights.shape
    assert locations.shape == (heads, levels, points, 2)
    ax = viz.sampling_points(torch.rand(8, 9), locations, weights)
    assert sum(len(c.get_offsets()) for c in ax.collections) == int(((locations > 0) & (locations < 1)).all(-1).sum())
    if make is aggregation:
        assert torch.equal(weights, look.weights[0, 3, :, 2].permute(2, 1, 0))


def test_what_is_compiled_stays_so():
    """A compiled function runs eagerly while it is recorded, and in its graph afterwards."""
    ran = []

    def backend(graph, _):
        return lambda *inputs: ran.append(graph) or graph.forward(*inputs)

    args = GROWING[cases.MULTI_SCALE](2, 5)
    compiled = torch.compile(lambda *a: mx_driving.multi_scale_deformable_attn(*a) * 2, backend=backend)
    compiled(*args)
    with viz.recording() as looks:
        compiled(*args)
    assert (len(looks), len(ran)) == (1, 1)
    compiled(*args)
    assert len(ran) == 2
    assert ran[0] is ran[1]


def test_a_compiled_function_may_record():
    """This needs a process of its own: torch.compile skips functions for good that it has met under a mode."""
    program = """
import torch, mx_driving
value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(1, 8, 4, 4)])
def function(value, locations, weights):
    with mx_driving.viz.recording() as looks:
        mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, weights)
    return len(looks)
compiled = torch.compile(function, backend="eager")
print(compiled(value.view(1, 16, 2, 4), torch.rand(1, 3, 2, 1, 2, 2), torch.rand(1, 3, 2, 1, 2)))
"""
    assert python("-W", "ignore", "-c", program).stdout == "1\n"


@pytest.mark.parametrize("operator", cases.WITH_LOGITS)
def test_a_look_at_an_operator_with_logits_repeats_its_call(operator):
    """A look has the locations and weights that the operator computes, for the bare operator."""
    args = first(operator)
    with viz.recording() as looks:
        output = getattr(mx_driving, operator)(*args)
    (look,) = looks
    again = getattr(mx_driving, look.operator)(look.table, look.shapes, look.starts, look.locations, look.weights)
    assert look.operator == operator.removesuffix("_with_logits")
    torch.testing.assert_close(again, output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels_first", [False, True])
def test_points_land_on_their_pixels(channels_first):
    """A dot lies at the centre of pixel (column 2, row 1) of a 4 x 3 picture. Areas are proportional to weights. Samples
    outside are not drawn."""
    image = torch.rand(3, 4, 3)
    locations = torch.tensor([[[(2 + 0.5) / 4, (1 + 0.5) / 3], [1.2, 0.5]], [[0.125, 0.5], [0.5, 0.5]]])  # [level, point, 2]
    weights = torch.tensor([[0.4, 0.3], [0.2, 0.1]])
    picture = image.permute(2, 0, 1) if channels_first else image
    ax = viz.sampling_points(picture, locations, weights, reference=torch.tensor([[0.5, 0.5, 1.0, 0.5]]))
    first, second = ax.collections
    (place,) = first.get_offsets().tolist()
    assert place == pytest.approx([2.0, 1.0], abs=1e-6)
    assert second.get_offsets()[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)
    assert first.get_sizes()[0] == pytest.approx(2 * second.get_sizes()[0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["level 0", "level 1"]
    (box,) = ax.patches
    assert box.get_bbox().bounds == pytest.approx((-0.5, 0.25, 4.0, 1.5))
    fewer = viz.sampling_points(picture, locations, weights, least=0.15)
    assert [len(c.get_offsets()) for c in fewer.collections] == [1, 1]


def test_bev_is_drawn_forward_up_and_left_left():
    view = torch.zeros(4, 6)
    view[3, 5] = 1  # far ahead, far left
    ax = viz.bev(view, extent=(-2, 2, -3, 3), title="cells")
    (image,) = ax.images
    assert image.get_array()[0, 0] == 1
    assert ax.get_title() == "cells"
    left, right, bottom, top = image.get_extent()
    assert (left, right, bottom, top) == (3, -3, -2, 2)


def drawn(png: bytes) -> torch.Tensor:
    return torch.from_numpy(matplotlib.image.imread(io.BytesIO(png), format="png"))


def test_a_notebook_shows_axes_and_figures():
    """IPython calls `_repr_png_` of a cell's last expression. The picture has later changes, too."""
    ax = viz.bev(torch.rand(4, 6))
    before = drawn(ax._repr_png_())
    ax.set_title("later")
    after = drawn(ax.figure._repr_png_())
    assert before.shape == after.shape
    assert before.shape[0] > 100
    assert not torch.equal(before, after)
    assert drawn(pickle.loads(pickle.dumps(ax))._repr_png_()).shape == after.shape


def test_axes_of_the_caller_stay_the_callers():
    """pyplot shows the caller's figures, so they must not be shown a second time."""
    ax = matplotlib.figure.Figure().add_subplot()
    assert viz.bev(torch.rand(4, 6), ax=ax) is ax
    assert not hasattr(ax, "_repr_png_")


def on_meta(look: viz.Look) -> viz.Look:
    tensors = {name: t.to("meta") for name, t in vars(look).items() if isinstance(t, torch.Tensor)}
    return dataclasses.replace(look, **tensors)


IMAGE, POINTS, SHARES = torch.rand(4, 4, 3), torch.rand(2, 3, 2), torch.rand(2, 3)
REFUSED = [
    (lambda: viz.sampling_points(IMAGE, torch.rand(2), torch.rand(1)),
     "locations must have shape (..., num_levels, num_points, 2); got (2,)"),
    (lambda: viz.sampling_points(IMAGE, POINTS[:, :0], SHARES[:, :0]), "locations must hold a point; got shape (2, 0, 2)"),
    (lambda: viz.sampling_points(IMAGE, [[1]], SHARES),
     "locations must be a torch.Tensor, as torch.tensor(locations) makes it; got list"),
    (lambda: viz.sampling_points(IMAGE, torch.rand(13, 3, 2), torch.rand(13, 3, 2, 4)),
     "weights must have shape (13, 3); got (13, 3, 2, 4), as deformable_aggregation has it: look.samples(query, camera) "
     "returns both as they are drawn"),
    (lambda: attention().samples(0, 1),
     "camera must be 0 for multi_scale_deformable_attn, whose cameras are entries of the batch; got 1"),
    (lambda: viz.sampling_points(IMAGE, POINTS, SHARES, reference=torch.rand(3)),
     "reference must have shape (n, 2) or (n, 4); got (3,)"),
    (lambda: viz.sampling_points(torch.rand(4, 4, 5), POINTS, SHARES),
     "image must have shape (H, W, 3), (3, H, W) or (H, W); got (4, 4, 5)"),
    (lambda: viz.page(attention(), [torch.rand(8, 9, 4)] * 2, "x.html"),
     "pictures[0] must have shape (H, W, 3), (3, H, W) or (H, W); got (8, 9, 4)"),
    (lambda: viz.sampling_points(IMAGE.to("meta"), POINTS, SHARES), "image must hold numbers; got a tensor on the device meta"),
    (lambda: viz.page(attention(), {"front": [IMAGE, 5]}, "x.html"),
     "pictures['front'][1] must be a torch.Tensor [H, W, 3], [3, H, W] or [H, W], or a Pillow image; got int"),
    (lambda: viz.page(attention(), [[IMAGE], IMAGE], "x.html"),
     "pictures[0] must hold one picture, or one for each of the 2 levels of call 1; got 1"),
    (lambda: viz.sampling_points(IMAGE, POINTS.to("meta"), SHARES),
     "locations must hold numbers; got a tensor on the device meta"),
    (lambda: viz.sampling_points(IMAGE, POINTS.cfloat(), SHARES), "locations must have a dtype of real numbers; got complex64"),
    (lambda: viz.sampling_points(IMAGE, POINTS, SHARES, reference=POINTS[0].to("meta")),
     "reference must hold numbers; got a tensor on the device meta"),
    (lambda: attention().samples(4), "query must be a number from 0 to 3; got 4"),
    (lambda: attention().samples(-1), "query must be a number from 0 to 3; got -1"),
    (lambda: attention().samples(0.0), "query must be a whole number; got 0.0"),
    (lambda: attention().samples(0, 0, 2), "scene must be a number from 0 to 1; got 2"),
    (lambda: aggregation().samples(0, 3), "camera must be a number from 0 to 2; got 3"),
    (lambda: on_meta(attention()).samples(0), "looks must hold numbers; got a tensor on the device meta"),
    (lambda: viz.page(on_meta(attention()), [IMAGE] * 2, "x.html"), "looks must hold numbers; got a tensor on the device meta"),
    (lambda: viz.page(attention(), [IMAGE] * 2, "x.html", plane=viz.Plane(POINTS[0].cfloat())),
     "plane.places must have a dtype of real numbers; got complex64"),
    (lambda: viz.page(attention(), [IMAGE] * 2, "x.html", plane=viz.Plane(seen=torch.ones(4, 2, device="meta"))),
     "plane.seen must hold numbers; got a tensor on the device meta"),
    (lambda: viz.page(attention(), [IMAGE] * 2, "x.html", plane=viz.Plane(labels=5)),
     "plane.labels must be strings, one for each query; got 5"),
    (lambda: viz.sampling_points(IMAGE.long(), POINTS, SHARES), "image must hold bytes, or floats from 0 to 1; got int64"),
    (lambda: viz.bev(torch.rand(4, 5, 4)), "view must have shape (nx, ny) or (nx, ny, 3) with cells; got (4, 5, 4)"),
    (lambda: viz.bev(torch.rand(4, 5).to_sparse()), "view must have the layout torch.strided; got torch.sparse_coo"),
    (lambda: viz.page([], IMAGE, "x.html"), "looks must hold a call; got none"),
    (lambda: viz.page(attention(), [], "x.html"), "pictures must hold a picture for each camera; got none"),
    (lambda: viz.page(attention(), [IMAGE] * 2, "/dev/full"),
     "path must be a place to write to; got '/dev/full': No space left on device"),
    (lambda: viz.page(attention(), [IMAGE] * 2, "x.html", plane=viz.Plane((2, 3))),
     "plane.places must be rows and columns of 4 queries; got (2, 3)"),
    (lambda: viz.bev(torch.rand(4, 5), extent=(1, 2)), "extent must be (x0, x1, y0, y1) in metres, rising; got (1, 2)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[row[1] for row in REFUSED])
def test_errors(call, sentence):
    with pytest.raises((TypeError, ValueError)) as refused:
        call()
    assert str(refused.value) == sentence
    assert re.match(r"[\w.]+", sentence)[0] == refused.value.argument


def test_arrays_are_drawn_as_tensors_are():
    array = pytest.importorskip("numpy").random.default_rng(0).random((4, 6))
    read_only = array.copy()
    read_only.flags.writeable = False
    for view in (array, array.astype(">f8"), torch.from_numpy(array), read_only):
        (image,) = viz.bev(view).images
        torch.testing.assert_close(torch.from_numpy(image.get_array().data), torch.from_numpy(array).float().flip(0, 1))
    (image,) = viz.bev((array[..., None] * [255, 255, 255]).astype("u1")).images
    assert image.get_array().dtype == "uint8"
    assert len(viz.sampling_points(array, POINTS, SHARES).images) == 1
