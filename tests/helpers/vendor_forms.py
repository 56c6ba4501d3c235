"""Tests in the form of the vendor's operator tests: small writings of their calls, for tests/vendor/test_npu.py to run."""

import unittest
from unittest.mock import Mock

import numpy as np
import torch
import torch_npu  # pyright: ignore[reportMissingImports]
import truth
from torch_npu.testing.testcase import TestCase, run_tests  # pyright: ignore[reportMissingImports]

import mx_driving
from mx_driving.ops.npu_deformable_aggregation import AdsDeformableAggregation

DEVICE_NAME = torch_npu.npu.get_device_name(0)[:10]


def exactly(t):
    return t.detach().double().numpy() if t.is_floating_point() else t.numpy()


class TestMultiScale(TestCase):
    def npu_to_exec(self, *inputs):
        value, shapes, offset, locations, weights, grad = [i.npu() for i in inputs]
        for leaf in (value, locations, weights):
            leaf.requires_grad_()
        output = mx_driving.multi_scale_deformable_attn(value, shapes, offset, locations, weights)
        output.backward(grad)
        return [t.detach().cpu().numpy() for t in (output, value.grad, locations.grad, weights.grad)]

    def cpu_to_exec(self, *inputs):
        return [t.astype(np.float32) for t in truth.multi_scale_deformable_attn(*(exactly(i) for i in inputs)).results]

    def test_forward_and_backward(self):
        bs, queries, channels, heads, levels, points = 2, 50, 16, 4, 2, 3
        shapes = torch.tensor([6, 4] * levels).reshape(levels, 2)
        offset = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))
        value = torch.rand(bs, int(shapes.prod(1).sum()), heads, channels)
        locations, weights = torch.rand(bs, queries, heads, levels, points, 2), torch.rand(bs, queries, heads, levels, points)
        inputs = (value, shapes, offset, locations, weights, torch.rand(bs, queries, heads * channels))
        for expected, found in zip(self.cpu_to_exec(*inputs), self.npu_to_exec(*inputs), strict=True):
            self.assertRtolEqual(expected, found)


class TestAggregation(TestCase):
    @unittest.skipIf(DEVICE_NAME != "Ascend910B", "only supported on 910B")
    def test_backward_by_hand(self):
        """Call the autograd function's methods with a Mock as ctx, as the vendor does. The sample lies at a pixel centre."""
        features = torch.rand(1, 4, 2).npu()
        features.requires_grad = True
        tables = torch.tensor([[[2, 2]]], dtype=torch.int32).npu(), torch.tensor([[0]], dtype=torch.int32).npu()
        sample, weights = torch.tensor([0.75, 0.25]).view(1, 1, 1, 1, 2).npu(), torch.full((1, 1, 1, 1, 1, 1), 3.0).npu()
        ctx = Mock()
        ctx.saved_tensors = (features, *tables, sample, weights)
        grad, _, _, _, grad_weights = AdsDeformableAggregation.backward(ctx, torch.ones(1, 1, 2).npu())
        expected = np.zeros((1, 4, 2), np.float32)
        expected[0, 1] = 3
        self.assertRtolEqual(expected, grad.cpu().numpy())
        self.assertRtolEqual(features.detach()[:, 1].sum().view(weights.shape), grad_weights.cpu())


if __name__ == "__main__":
    run_tests()
