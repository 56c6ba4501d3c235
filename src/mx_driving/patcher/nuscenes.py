"""The vendor's import path for patches of nuScenes' tracking metric."""

from ._patcher import nuscenes_mot_metric

__all__ = ["nuscenes_mot_metric"]
