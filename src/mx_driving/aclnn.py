"""CANN's two-phase interface over torch tensors on the CPU: the same library, and the same checks, that C programs use.

    status, size, executor = multi_scale_deformable_attention_grad_get_workspace_size(value, ..., grad_attn_weight)
    workspace = torch.empty(size, dtype=torch.uint8)
    status = multi_scale_deformable_attention_grad(workspace, size, executor, stream)
    status = synchronize(stream)

Phase one checks and returns a status; it does not raise where CANN returns a status. `recent_error()` is the sentence that
belongs to the status. Phase two runs the call and returns. Only the data show that a level does not fit in num_keys; then the
stream remembers a status, and `synchronize` returns it. The header
native/include/aclnnop/aclnn_multi_scale_deformable_attention_grad.h is the reference. Its names are in camelCase, as are the
names in the sentences of errors.
"""

from ._vendor import aclnn as _aclnn
from ._vendor.aclnn import *  # noqa: F403

__all__: list[str] = []
__all__ += _aclnn.__all__
