
import torch
from torch import nn
from torch.nn import functional as F
from torch.autograd import Function

class MSDeformAttnFunction(Function):
    @staticmethod
    def forward(ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step):
        ctx.save_for_backward(value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)
        return torch.ops.nvidia.MultiscaleDeformableAttnPlugin_TRT(value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops.nvidia.DMHA_backward(*ctx.saved_tensors, grad)

def core(value, value_spatial_shapes, sampling_locations, attention_weights, deterministic=False):
    bs, _, heads, dim = value.shape
    _, queries, _, levels, points, _ = sampling_locations.shape
    maps = value.split([h * w for h, w in value_spatial_shapes], dim=1)
    grids, samples = 2 * sampling_locations - 1, []
    for level, (h, w) in enumerate(value_spatial_shapes):
        one = maps[level].flatten(2).transpose(1, 2).reshape(bs * heads, dim, h, w)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sample = F.grid_sample(one, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        samples.append(sample + 0 if deterministic else sample)
    weights = attention_weights.transpose(1, 2).reshape(bs * heads, 1, queries, levels * points)
    return (torch.stack(samples, dim=-2).flatten(-2) * weights).sum(-1).view(bs, heads * dim, queries).transpose(1, 2)

class MSDeformAttn(nn.Module):
    def __init__(self, d_model=32, n_levels=2, n_heads=4, n_points=4):
        super().__init__()
        self.im2col_step, self.d_model, self.n_levels, self.n_heads, self.n_points = 64, d_model, n_levels, n_heads, n_points
        self.sampling_offsets = nn.Linear(d_model, n_heads * n_levels * n_points * 2)
        self.attention_weights = nn.Linear(d_model, n_heads * n_levels * n_points)
        self.value_proj, self.output_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index, input_padding_mask=None, export=False):
        N, Len_q, _ = query.shape
        value = self.value_proj(input_flatten).view(N, -1, self.n_heads, self.d_model // self.n_heads)
        offsets = self.sampling_offsets(query).view(N, Len_q, self.n_heads, self.n_levels, self.n_points, 2)
        weights = self.attention_weights(query).view(N, Len_q, self.n_heads, -1).softmax(-1).view(N, Len_q, self.n_heads, self.n_levels, self.n_points)
        normalizer = torch.stack([input_spatial_shapes[..., 1], input_spatial_shapes[..., 0]], -1)
        locations = reference_points[:, :, None, :, None, :] + offsets / normalizer[None, None, None, :, None, :]
        if value.is_cuda and not export:
            out = MSDeformAttnFunction.apply(value, input_spatial_shapes, input_level_start_index, locations, weights, self.im2col_step)
        else:
            out = core(value, input_spatial_shapes, locations, weights, deterministic=False)
        return self.output_proj(out)
