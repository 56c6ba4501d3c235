"""mx_driving.geometry against numpy written from the definitions, and against the operators that read its results."""

import numpy as np
import pytest
import torch

import mx_driving
from mx_driving import geometry
from mx_driving._operator import composition


@pytest.fixture
def cameras():
    """Calibrations of four cameras: K [4, 3, 3], R [4, 3, 3], t [4, 3]."""
    random = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(4, 3, 3, dtype=torch.float64, generator=random))[0]
    rotation *= torch.det(rotation)[:, None, None]
    focal, centre = (torch.rand(4, 2, dtype=torch.float64, generator=random) * 50 + low for low in (60, 20))
    intrinsics = torch.diag_embed(torch.nn.functional.pad(focal, (0, 1), value=1))
    intrinsics[:, :2, 2] = centre
    return intrinsics, rotation, torch.randn(4, 3, dtype=torch.float64, generator=random)


@pytest.mark.parametrize("first_pixel", [0.0, 0.5])
def test_projection(cameras, first_pixel):
    """Of one point after the other, in numpy."""
    points = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 5
    augmentation = geometry.augmentation_matrix(0.5, (3, 2))
    projection = geometry.projection_matrix(*cameras, augmentation, first_pixel=first_pixel)
    locations, depths = geometry.image_locations(points, projection, torch.tensor([50.0, 30.0]))
    assert locations.shape == (7, 4, 2)
    for p, point in enumerate(points.numpy()):
        for c, (intrinsics, rotation, translation) in enumerate(zip(*(t.numpy() for t in cameras), strict=True)):
            u, v, depth = intrinsics @ (rotation @ point + translation)
            assert depths[p, c].item() == pytest.approx(depth)
            if depth < 1e-5:
                assert locations[p, c].tolist() == [-1, -1]
                continue
            pixel = (np.array([u, v]) / depth + 0.5 - first_pixel) * 0.5 - [3, 2]
            np.testing.assert_allclose(locations[p, c], pixel / [50, 30])
    assert (depths > 0).any()
    assert (depths < 0).any()


def test_augmentations_move_pixels_as_pillow_moves_a_picture():
    """A bright pixel lies where the matrix says, after each of Pillow's own operations."""
    Image = pytest.importorskip("PIL.Image")
    picture = Image.new("L", (40, 30))
    picture.paste(255, (24, 8, 28, 12))  # its centre: (26, 10)
    steps = picture.resize((80, 60)).crop((10, 6, 70, 56)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    turned = steps.rotate(20, resample=Image.Resampling.BILINEAR)
    for size, degrees, image in ((None, 0, steps), ((60, 50), 20, turned)):
        matrix = geometry.augmentation_matrix(2, (10, 6), 60, degrees, size)
        light = np.asarray(image, float)
        rows, columns = np.indices(light.shape)
        found = [(light * (axis + 0.5)).sum() / light.sum() for axis in (columns, rows)]
        np.testing.assert_allclose(found, (matrix @ torch.tensor([26.0, 10, 1]).double())[:2], atol=0.1)


def test_a_frustum_is_seen_where_it_was_made(cameras):
    projection = geometry.projection_matrix(*cameras)
    pixels = geometry.frustum((80, 60), (8, 6), torch.tensor([2.0, 5.0], dtype=torch.float64))
    assert pixels.shape == (2, 6, 8, 3)
    assert pixels[1, 0, 0].tolist() == [5, 5, 5]
    points = geometry.unproject(pixels, projection)
    for cam in range(4):
        locations, depths = geometry.image_locations(points[cam], projection, torch.tensor([80.0, 60.0]))
        torch.testing.assert_close(locations[..., cam, :] * torch.tensor([80.0, 60.0]), pixels[..., :2])
        torch.testing.assert_close(depths[..., cam], pixels[..., 2])


def test_ranks_lift_as_a_loop_does():
    random = torch.Generator().manual_seed(2)
    points = torch.rand(2, 3, 4, 2, 5, 3, generator=random) * 14 - 7
    depth, feat = torch.rand(2, 3, 4, 2, 5, generator=random), torch.randn(2, 3, 2, 5, 6, generator=random)
    ranks = geometry.bev_ranks(points, (-5, -4, -2), (1, 2, 4), (10, 4, 1))
    assert (ranks[2].diff() >= 0).all()
    found = mx_driving.bev_pool_v3(depth, feat, *ranks, (2, 1, 4, 10, 6))
    expected = np.zeros((2, 6, 1, 4, 10))
    for b, cam, d, h, w in np.ndindex(2, 3, 4, 2, 5):
        x, y, z = np.floor((points[b, cam, d, h, w].numpy() - [-5, -4, -2]) / [1, 2, 4]).astype(int)
        if 0 <= x < 10 and 0 <= y < 4 and z == 0:
            expected[b, :, 0, y, x] += depth[b, cam, d, h, w].item() * feat[b, cam, h, w].numpy()
    assert (expected != 0).any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float64, torch.float16])
def test_inputs_of_any_dtype_give_the_numbers_of_float32(dtype):
    """Every tensor of each function has another dtype than the others, which have float32."""
    points = torch.tensor([[3.0, 1, 2], [4, 4, 8]])
    K, R, t = torch.tensor([[8.0, 0, 4], [0, 8, 4], [0, 0, 1]]), torch.eye(3), torch.tensor([1.0, 0, 2])
    projection = geometry.projection_matrix(K, R, t)[None]
    grid = (-1, -1, -1), (0.5, 0.5, 0.5), (12, 12, 20)
    calls = [
        (geometry.projection_matrix, K, R, t, 2 * R),
        (geometry.image_locations, points, projection, torch.tensor([8.0, 8])),
        (geometry.unproject, points, projection),
        (lambda depths: geometry.frustum((8, 6), (4, 3), depths), torch.tensor([1.0, 2])),
        (lambda points: geometry.bev_ranks(points, *grid), points.expand(1, 1, 1, 1, 2, 3)),
    ]
    for function, *args in calls:
        expected = function(*args)
        for place, arg in enumerate(args):
            if torch.equal(arg.to(dtype).float(), arg):
                got = function(*args[:place], arg.to(dtype), *args[place + 1 :])
                torch.testing.assert_close(got, expected, check_dtype=False, rtol=2e-3, atol=2e-3)
    assert geometry.bev_ranks(*calls[-1][1:], *grid)[0].numel() == 2


def test_numbers_come_in_any_sequence():
    expected = geometry.augmentation_matrix((0.5, 0.25), (1, 2), None, 30, (8, 6))
    for kind in (list, np.array, torch.tensor):
        got = geometry.augmentation_matrix(kind((0.5, 0.25)), kind((1, 2)), None, 30, kind((8, 6)))
        torch.testing.assert_close(got, expected)
    assert torch.equal(geometry.augmentation_matrix(np.float32(0.5)), geometry.augmentation_matrix(0.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: geometry.projection_matrix(torch.eye(4), torch.eye(3), torch.zeros(3)), "intrinsics must have the last axes"),
        (lambda: geometry.projection_matrix(torch.eye(3), torch.eye(3), torch.zeros(4)), r"translation must .*got \(4,\)"),
        (lambda: geometry.augmentation_matrix(degrees=3), r"size must be the \(width, height\) .*; got None"),
        (lambda: geometry.augmentation_matrix((1, 2, 3)), r"scale must hold 2 numbers; got \(1, 2, 3\)"),
        (lambda: geometry.bev_ranks(torch.zeros(1, 1, 1, 1, 1, 3), (0,) * 3, (1, 0, 1), (1,) * 3), "cell must be positive"),
        (lambda: geometry.bev_ranks(torch.zeros([1] * 5 + [3]), (0,) * 3, 0.5, (1,) * 3), "cell must hold 3 numbers; got 0.5"),
        (lambda: geometry.unproject(torch.zeros(3), torch.zeros(1, 4, 4).to("meta")), "projection must be on pixels's device"),
        (lambda: geometry.bev_ranks(torch.zeros(3), (0,) * 3, (1,) * 3, (1,) * 3), r"points must .* \[B, cam, D, H, W, 3\]"),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="depths must be a tensor; got list"):
        geometry.frustum((8, 6), (4, 3), [1.0])
    with pytest.raises(TypeError, match="depths must have a dtype of real numbers; got complex64"):
        geometry.frustum((8, 6), (4, 3), torch.ones(1, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_tensors_are_rounded_once(cameras, dtype):
    """Each result is that of the same numbers in float32, rounded. Rounding at every step moves points into other cells."""
    rounded = [t.to(dtype) for t in cameras]
    projection = geometry.projection_matrix(*(t.float() for t in cameras)).to(dtype)
    points = torch.linspace(-40, 40, 2 * 6 * 3).to(dtype).view(1, 2, 1, 2, 3, 3)
    size = torch.tensor([1600, 900]).to(dtype)
    calls = [
        (geometry.projection_matrix, *rounded),
        (geometry.image_locations, points, projection, size),
        (geometry.unproject, points[0, 0], projection),
        (lambda depths: geometry.frustum((1600, 900), (600, 300), depths), torch.arange(1.0, 9).to(dtype)),
        (lambda points: geometry.bev_ranks(points, (-41.3, -41.3, -41.3), (0.7, 0.7, 0.7), (120, 120, 120)), points),
    ]
    for function, *inputs in calls:
        found, exact = function(*inputs), function(*(t.float() for t in inputs))
        found, exact = ([each] if isinstance(each, torch.Tensor) else each for each in (found, exact))
        assert {t.dtype for t in found} <= {dtype, torch.int32}
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widest", [torch.float32, torch.float64], ids=str)
def test_no_function_computes_in_the_dtype_of_autocast(cameras, widest, dtype):
    """Autocast would multiply matrices in 16 bits: locations would be 92 pixels of 1600 off."""
    intrinsics, rotation, translation = (t.to(widest) for t in cameras)

    def compute():
        augmentation = geometry.augmentation_matrix(0.5, (3, 2), 60, 20, (60, 50)).to(torch.float32)
        projection = geometry.projection_matrix(intrinsics, rotation, translation.half(), augmentation)
        frustum = geometry.frustum((50, 30), (5, 3), torch.arange(1.0, 9, dtype=widest))
        points = geometry.unproject(frustum, projection=projection)
        locations, depths = geometry.image_locations(points.flatten(0, -2)[:7], projection, torch.tensor([50, 30]))
        ranks = geometry.bev_ranks(points[None], (-9.0, -9, -9), (1.0, 1, 1), (18, 18, 18))
        return (projection, frustum, points, locations, depths, *ranks)

    alone = compute()
    with torch.autocast("cpu", dtype):
        under = compute()
        assert (torch.eye(2) @ torch.eye(2)).dtype == dtype  # autocast works
    assert [t.dtype for t in under] == [widest] * 5 + [torch.int32] * 3
    assert under[-1].numel() > 9
    torch.testing.assert_close(alone, under, rtol=0, atol=0)


def test_the_autocast_of_the_tensors_device_is_left(cameras, monkeypatch):
    """A tensor without memory stands for one on another device, because a CPU cannot make one."""
    left, autocast = [], torch.autocast
    monkeypatch.setattr(composition, "autocasts", lambda device: True)
    record = lambda device, enabled: left.append((device, enabled)) or autocast("cpu", enabled=enabled)  # noqa: E731
    monkeypatch.setattr(torch, "autocast", record)
    intrinsics, rotation, translation = (t.to("meta") for t in cameras)
    geometry.projection_matrix(intrinsics=intrinsics, rotation=rotation, translation=translation)
    geometry.frustum((50, 30), (5, 3), torch.empty(8, device="meta"))
    assert left == [("meta", False)] * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_under_autocast(cameras, dynamic):
    intrinsics, rotation, translation = (t.float() for t in cameras)
    compiled = torch.compile(geometry.projection_matrix, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        found = compiled(intrinsics, rotation, translation)
    torch.testing.assert_close(found, geometry.projection_matrix(intrinsics, rotation, translation))
