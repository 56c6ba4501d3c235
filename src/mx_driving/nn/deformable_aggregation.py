"""Deformable feature aggregation as a module: the features of Sparse4D v3's 3D anchors, from all cameras."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._operator import composition
from .._operator.checks import check_shapes
from .._operator.rules import FLOATING, FLOATING_RULE, fail, need_dtype
from ..ops.deformable_aggregation_with_logits import deformable_aggregation_with_logits
from . import _layers

__all__ = ["FIX_SCALE", "DeformableFeatureAggregation", "KeyPoints"]

# The anchor's centre, and points just inside its six faces, as fractions of its width, length and height, as in Sparse4D v3.
FIX_SCALE = ((0, 0, 0), (0.45, 0, 0), (-0.45, 0, 0), (0, 0.45, 0), (0, -0.45, 0), (0, 0, 0.45), (0, 0, -0.45))


class KeyPoints(nn.Module):
    """Key points of an anchor: some at fixed fractions of its size, some placed by the instance's feature.

        point = centre + R(yaw) * (scale * size)        scale: fix_scale, and sigmoid(learnable_fc(feature)) - 1/2

    An anchor is (x, y, z, log w, log l, log h, sin yaw, cos yaw, ...); later numbers are not read. Points of a 16-bit anchor
    are computed in float32, because 16-bit rounding at every step would move a point by centimetres.
    """

    def __init__(self, embed_dims: int, num_learnable_pts: int, fix_scale: Sequence[Sequence[float]]) -> None:
        super().__init__()
        _layers.check_counts(0, num_learnable_pts=num_learnable_pts)
        try:
            points = torch.as_tensor(fix_scale, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            fail(ValueError, "fix_scale", "be rows of three numbers", repr(fix_scale))
        if points.numel():
            check_shapes({}, fix_scale=(points, "points, 3"))
        elif num_learnable_pts < 1:
            fail(ValueError, "fix_scale", f"hold a point where num_learnable_pts is {num_learnable_pts}", "none")
        self.fix_scale = nn.Parameter(points.reshape(-1, 3).clone(), requires_grad=False)
        # Keep the numbers: on the device meta the parameter has none.
        self._fixed = [[float(number) for number in row] for row in fix_scale]
        self.num_learnable_pts = num_learnable_pts
        self.num_pts = len(self.fix_scale) + num_learnable_pts
        if num_learnable_pts:
            self.learnable_fc = nn.Linear(embed_dims, num_learnable_pts * 3)

    def reset_parameters(self) -> None:
        """Initialise as Sparse4D does. Also set the fixed points: a module built on the device meta has none."""
        _layers.fill(self.fix_scale, torch.tensor(self._fixed, dtype=torch.float32).view(-1, 3))
        if self.num_learnable_pts:
            _layers.initialise(nn.init.xavier_uniform_, self.learnable_fc)

    def forward(self, anchor: Tensor, instance_feature: Tensor) -> Tensor:
        """Return the points [bs, anchor, pts, 3] in metres.

        anchor is [bs, anchor, >= 8], instance_feature [bs, anchor, embed_dims].
        """
        anchor = anchor.to(torch.promote_types(anchor.dtype, torch.float32))
        scale = self.fix_scale.expand(*anchor.shape[:2], -1, -1)
        if self.num_learnable_pts:
            learned = self.learnable_fc(instance_feature).unflatten(2, (self.num_learnable_pts, 3)).sigmoid() - 0.5
            scale = torch.cat([scale, learned], 2)
        x, y, z = (scale * anchor[:, :, None, 3:6].exp()).unbind(-1)
        sin, cos = anchor[:, :, 6, None], anchor[:, :, 7, None]
        return torch.stack([cos * x - sin * y, sin * x + cos * y, z], -1) + anchor[:, :, None, :3]


class DeformableFeatureAggregation(nn.Module):
    """An anchor's feature from all cameras: key points inside it, projected into each picture, sampled and weighted.

        point = a key point of the anchor, projected into each camera
        logit = weights_fc(feature + anchor_embed + camera_embed), for softmax over cameras, scales and points
        out   = output_proj(deformable_aggregation_with_logits(feature_maps, point, logit)), with the input added or appended

    Sparse4D's checkpoints load as they are: `kps_generator.fix_scale`, `kps_generator.learnable_fc`, `camera_encoder`,
    `weights_fc`, `output_proj`. The defaults are those of Sparse4D v3's configuration.

    Args:
        embed_dims: channels; a multiple of num_groups.
        num_groups: groups of channels that share a weight.
        num_levels: scales of a camera's pyramid.
        num_cams: number of cameras. With use_camera_embed this number may differ from call to call.
        num_learnable_pts: key points placed by the instance's feature.
        fix_scale: the other key points, [n, 3] fractions of the anchor's width, length and height.
        use_camera_embed: compute a camera's weights from its projection matrix. Otherwise weights_fc has outputs for every
            camera.
        attn_drop: in training, the fraction of (point, camera) pairs left out.
        proj_drop: in training, the dropout rate of the projected output.
        residual_mode: "cat" appends instance_feature (2 * embed_dims channels), "add" adds it.

    Gradients: of all inputs but spatial_shape, scale_start_index and image_wh, and of all parameters but fix_scale.

    Source: Lin et al., "Sparse4D v3", 2023.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_groups: int = 8,
        num_levels: int = 4,
        num_cams: int = 6,
        *,
        num_learnable_pts: int = 6,
        fix_scale: Sequence[Sequence[float]] = FIX_SCALE,
        use_camera_embed: bool = True,
        attn_drop: float = 0.15,
        proj_drop: float = 0.0,
        residual_mode: str = "cat",
    ) -> None:
        super().__init__()
        _layers.check_counts(embed_dims=embed_dims, num_levels=num_levels, num_cams=num_cams)
        _layers.check_divides("num_groups", num_groups, "embed_dims", embed_dims)
        _layers.check_dropout_rates(attn_drop=attn_drop, proj_drop=proj_drop)
        if residual_mode not in ("add", "cat"):
            fail(ValueError, "residual_mode", "be 'add' or 'cat'", repr(residual_mode))
        self.embed_dims, self.num_groups, self.num_levels, self.num_cams = embed_dims, num_groups, num_levels, num_cams
        self.attn_drop, self.residual_mode = attn_drop, residual_mode
        self.proj_drop = nn.Dropout(proj_drop)
        self.kps_generator = KeyPoints(embed_dims, num_learnable_pts, fix_scale)
        self.num_pts = self.kps_generator.num_pts
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.camera_encoder = None
        if use_camera_embed:  # layers that embed the upper 3 x 4 of a projection matrix
            self.camera_encoder = nn.Sequential(
                nn.Linear(12, embed_dims),
                nn.ReLU(),
                nn.LayerNorm(embed_dims),
                nn.Linear(embed_dims, embed_dims),
                nn.ReLU(),
                nn.LayerNorm(embed_dims),
            )
        cams = 1 if use_camera_embed else num_cams
        self.weights_fc = nn.Linear(embed_dims, cams * num_levels * self.num_pts * num_groups)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as Sparse4D does: all weights are equal."""
        _layers.initialise(nn.init.zeros_, self.weights_fc)
        _layers.initialise(nn.init.xavier_uniform_, self.output_proj)
        self.kps_generator.reset_parameters()

    def forward(
        self,
        instance_feature: Tensor,
        anchor: Tensor,
        anchor_embed: Tensor,
        feature_maps: Tensor,
        spatial_shape: Tensor,
        scale_start_index: Tensor,
        projection_mat: Tensor,
        image_wh: Tensor | None = None,
    ) -> Tensor:
        """Return the aggregated features.

        Args:
            instance_feature: [bs, anchor, embed_dims].
            anchor: [bs, anchor, >= 8]: x, y, z in metres, log width, log length, log height, sin yaw, cos yaw, ...
            anchor_embed: [bs, anchor, embed_dims].
            feature_maps, spatial_shape, scale_start_index: as `flatten_cameras` makes them.
            projection_mat: [bs, cam, 4, 4], from metres to homogeneous pixels: (u * depth, v * depth, depth, 1). The last row
                is not read and may be missing.
            image_wh: [bs, cam, 2], width and height of the pictures in pixels; None if projection_mat gives 0..1.

        Returns:
            [bs, anchor, embed_dims], or twice as many channels with residual_mode "cat".

        Raises:
            TypeError, ValueError: an input breaks a rule above; the sentence names the input and the rule.
        """
        sizes = {"embed_dims": self.embed_dims, "scale": self.num_levels}
        if self.camera_encoder is None:
            sizes["cam"] = self.num_cams
        check_shapes(
            sizes,
            instance_feature=(instance_feature, "bs, anchor, embed_dims"),
            anchor=(anchor, "bs, anchor, 8 or more"),
            anchor_embed=(anchor_embed, "bs, anchor, embed_dims"),
            projection_mat=(projection_mat, "bs, cam, 3 or 4, 4"),
            feature_maps=(feature_maps, "bs, num_feat, embed_dims"),
            spatial_shape=(spatial_shape, "cam, scale, 2"),
            scale_start_index=(scale_start_index, "cam, scale"),
            image_wh=(image_wh, "bs, cam, 2 or None"),
        )
        _layers.check_layer_dtype(self.weights_fc, instance_feature=instance_feature)
        need_dtype("anchor", anchor, FLOATING, FLOATING_RULE)
        points = self.kps_generator(anchor, instance_feature)
        feature = _layers.add_embedding(self.weights_fc, instance_feature, anchor_embed=anchor_embed)
        logits = self._logits(feature, projection_mat)
        features = deformable_aggregation_with_logits(
            feature_maps,
            spatial_shape,
            scale_start_index,
            points,
            F.pad(projection_mat, (0, 0, 0, 4 - projection_mat.shape[2])),
            logits,
            image_wh,
            self._pair_scale(logits),
        )
        output = self.proj_drop(self.output_proj(features.to(instance_feature.dtype)))
        if self.residual_mode == "add":
            return output + instance_feature
        return torch.cat([output, instance_feature], -1)

    def weights(self, feature: Tensor, projection_mat: Tensor) -> Tensor:
        """Return the weights of each anchor, for inspection.

        `forward` does not call this method: its operator computes the weights. In training, each call leaves out new pairs,
        drawn from torch's generator; `mx_driving.viz.recording()` keeps the weights that a `forward` used.

        Args:
            feature: [bs, anchor, embed_dims], the sum of instance_feature and anchor_embed.
            projection_mat: as for `forward`. With use_camera_embed=False it is not read.

        Returns:
            [bs, anchor, pts, cam, scale, group]. If no pairs are left out, a group's weights sum to 1 over points, cameras and
            scales.
        """
        cameras = None if self.camera_encoder is None else projection_mat
        check_shapes(
            {"embed_dims": self.embed_dims},
            feature=(feature, "bs, anchor, embed_dims"),
            projection_mat=(cameras, "bs, cam, 3 or 4, 4" + " or None" * (self.camera_encoder is None)),
        )
        _layers.check_layer_dtype(self.weights_fc, feature=feature)
        logits = self._logits(feature, projection_mat)
        return composition.Aggregation.softmax_weights(logits, self._pair_scale(logits))[1]

    def _logits(self, feature: Tensor, projection_mat: Tensor) -> Tensor:
        """Return the logits, [bs, anchor, cam, scale, pts, group]."""
        sizes = (self.num_levels, self.num_pts, self.num_groups)
        if self.camera_encoder is None:
            return self.weights_fc(feature).unflatten(2, (-1, *sizes))
        cameras = self.camera_encoder(projection_mat[:, :, :3].flatten(2).to(feature.dtype))
        if not _layers.is_plain(self.weights_fc):  # a modified layer need not be affine
            return self.weights_fc(feature[:, :, None] + cameras[:, None]).unflatten(3, sizes)
        # W (feature + camera) + b = (W feature + b) + (W camera + b) - b. So W multiplies each anchor and each camera, but
        # not each pair (anchor, camera).
        by_anchor = self.weights_fc(feature)
        of_cameras_and_zero = self.weights_fc(F.pad(cameras, (0, 0, 0, 1)))
        by_camera = of_cameras_and_zero[:, :-1] - of_cameras_and_zero[:, -1:]
        return (by_anchor[:, :, None] + by_camera[:, None]).unflatten(3, sizes)

    def _pair_scale(self, logits: Tensor) -> Tensor | None:
        """Return factors of dropout [bs, anchor, cam, pts], 0 for dropped pairs and 1 / (1 - attn_drop) for others; or None."""
        if not (self.training and self.attn_drop > 0):
            return None
        bs, anchors, cams, _, points, _ = logits.shape
        kept = torch.rand(bs, anchors, points, cams, device=logits.device).transpose(2, 3) > self.attn_drop
        return kept.to(torch.promote_types(logits.dtype, torch.float32)) / (1 - self.attn_drop)

    def extra_repr(self) -> str:
        names = ("embed_dims", "num_groups", "num_levels", "num_cams", "num_pts", "residual_mode")
        return _layers.list_settings(self, *names)
