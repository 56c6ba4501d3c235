"""mx_driving.geometry against numpy written from the definitions, and against the operators that read its results."""

import numpy as np
import pytest
import torch

import mx_driving
from mx_driving import geometry


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: geometry.projection_matrix(torch.eye(4), torch.eye(3), torch.zeros(3)), "intrinsics must have the last axes"),
        (lambda: geometry.projection_matrix(torch.eye(3), torch.eye(3), torch.zeros(4)), r"translation must .*got \(4,\)"),
        (lambda: geometry.augmentation_matrix(degrees=3), r"size must be the \(width, height\) .*; got None"),
        (lambda: geometry.bev_ranks(torch.zeros(3), (0,) * 3, (1,) * 3, (1,) * 3), r"points must .* \[B, cam, D, H, W, 3\]"),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="depths must be a tensor; got list"):
        geometry.frustum((8, 6), (4, 3), [1.0])
