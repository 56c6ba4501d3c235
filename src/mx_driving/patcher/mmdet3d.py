"""The vendor's patches of mmdet3d's nuScenes."""

from ._needless import ABSENT, leaves

__all__ = ["nuscenes_dataset", "nuscenes_metric"]

nuscenes_dataset = leaves("nuscenes_dataset", ABSENT, __name__)
nuscenes_metric = leaves("nuscenes_metric", ABSENT, __name__)
