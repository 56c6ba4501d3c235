"""The vendor's import path of patches of nuScenes' tracking metric."""

from ._patcher import nuscenes_mot_metric

__all__ = ["nuscenes_mot_metric"]
