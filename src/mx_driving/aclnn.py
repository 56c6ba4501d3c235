"""CANN's two-phase interface over torch tensors on the CPU: the same library, and the same checks, that C programs use."""

from ._vendor.aclnn import *  # noqa: F403
from ._vendor.aclnn import __all__ as __all__
