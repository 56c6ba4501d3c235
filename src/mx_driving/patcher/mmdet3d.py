"""The vendor's import path for patches of mmdet3d's nuScenes."""

from ._patcher import nuscenes_dataset, nuscenes_metric

__all__ = ["nuscenes_dataset", "nuscenes_metric"]
