"""One table of sentences for all layers of an operator: the public function, torch.ops on each device, the reference and the C
interface.

Modules have sentences of their own: tests/nn/test_nn_errors.py. So have CANN's functions, whose arguments have other names
and limits: tests/native/test_aclnn_refusals.py.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from small_cases import GOOD


class Refusal(NamedTuple):
    """A call with one wrong argument, and the sentence that refuses the call."""

    operator: str
    index: int  # of the argument
    change: Callable[[Any], Any]
    sentence: str

    def args(self) -> list[Any]:
        args = list(GOOD[self.operator]())
        args[self.index] = self.change(args[self.index])
        return args

    def __str__(self) -> str:
        return f"{self.operator}: {self.sentence}"

    @property
    def changes_shape_of_value(self) -> bool:
        """Return whether several inputs disagree with value. C++ names the first of these inputs, a backward grad_output."""
        return self.index == 0 and "dtype" not in self.sentence


MAPS = [(3, 5), (2, 3)]
CAMERAS = [[(3, 4), (2, 2)]] * 3
# Legal calls, of which no two axes are alike, so that each wrong size is found.
CALLS = {
    "samples": (MULTI_SCALE, lambda: cases.multi_scale(3, 5, 7, 4, MAPS, 6)),
    "nearest": (GEOMETRIC, lambda: cases.geometric(3, 5, 7, 4, MAPS, 6)),
    "cameras": (AGGREGATION, lambda: cases.aggregation(4, 7, 6, 5, 5, CAMERAS)),
    "references": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(3, 5, 7, 4, MAPS, 7)),
    "boxes": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(3, 5, 7, 4, MAPS, 7, box=True)),
    "window": (GEOMETRIC_LOGITS, lambda: logits_cases.geometric(3, 5, 7, 4, MAPS, (2, 3))),
    "projected": (AGGREGATION_LOGITS, lambda: logits_cases.aggregation(4, 7, 6, 5, 5, CAMERAS)),
}

FLOATING = "have dtype float32, float64, float16 or bfloat16"
QUERIES = "bs=2, num_queries=3, num_heads=2"
LEVELS = "value_level_start_index"
t = torch.tensor

# Arguments of which Python alone says this: torch or C++ refuses them in its own words.
ARGUMENTS = [Refusal(*row) for row in [
    (MULTI_SCALE, 0, lambda a: a.numpy(), "value must be a torch.Tensor; got ndarray"),
    (AGGREGATION, 4, lambda a: None, "weight must be a torch.Tensor; got NoneType"),
    (GEOMETRIC_LOGITS, 4, lambda a: a.tolist(), "window must be a torch.Tensor, as torch.tensor(window) makes it; got list"),
    (MULTI_SCALE, 0, lambda a: a.to_sparse(), "value must have the layout torch.strided; got torch.sparse_coo"),
    (MULTI_SCALE, 1, lambda a: a.to_sparse(), "value_spatial_shapes must have the layout torch.strided; got torch.sparse_coo"),
    (GEOMETRIC, 2, lambda a: a.to_sparse(), "level_start_index must have the layout torch.strided; got torch.sparse_coo"),
    (AGGREGATION_LOGITS, 7, lambda a: a.to_mkldnn(), "pair_scale must have the layout torch.strided; got torch._mkldnn"),
    (GEOMETRIC, 4, lambda a: torch.nested.nested_tensor([*a], layout=torch.jagged),
     "attention_weights must have the layout torch.strided; got torch.jagged"),
    (MULTI_SCALE, 1, lambda a: t([[3, 4], [2**62, 2**62]]),
     f"{LEVELS}[1] must leave room for {2**62} x {2**62} rows among 16; got 12 (needs {12 + 2**124} rows)"),
]]  # fmt: skip

# Shapes, dtypes, devices and options, which every layer checks. tests/ops/test_checks.py has every size and dtype.
SHAPES = [Refusal(*row) for row in [
    (MULTI_SCALE, 1, lambda a: a[0], "value_spatial_shapes must have shape (num_levels=2, 2); got (2,)"),
    (MULTI_SCALE, 2, lambda a: a[:1], f"{LEVELS} must have shape (num_levels=2,); got (1,)"),
    (MULTI_SCALE, 4, lambda a: a[..., :1],
     f"attention_weights must have shape ({QUERIES}, num_levels=2, num_points=2); got (2, 3, 2, 2, 1)"),
    (GEOMETRIC, 0, lambda a: a.transpose(1, 2),
     "value must have shape (bs=2, num_keys, num_heads=2, embed_dims); got (2, 2, 16, 4), whose axes 1 and 2 look swapped"),
    (AGGREGATION, 3, lambda a: a[:, :, :, :1],
     "sample_locations must have shape (bs=2, anchor=3, pts=2, cam=2, 2); got (2, 3, 2, 1, 2)"),
    (AGGREGATION, 4, lambda a: a[:, :2],
     "weight must have shape (bs=2, anchor=3, pts=2, cam=2, scale=1, group); got (2, 2, 2, 2, 1, 2)"),
    (AGGREGATION, 0, lambda a: a[..., :3], "weight must have a group count that divides c=3; got 2"),
    (AGGREGATION, 4, lambda a: a[..., :0], "weight must have a group count that divides c=4; got 0"),
    (MULTI_SCALE_LOGITS, 3, lambda a: torch.cat([a, a[..., :1]], -1),
     "reference_points must have shape (bs=2, num_queries=3, num_levels=2 or 1, 2 or 4); got (2, 3, 2, 3)"),
    (MULTI_SCALE_LOGITS, 5, lambda a: a[..., :3],
     f"attention_logits must have shape ({QUERIES}, num_levels * num_points=4); got (2, 3, 2, 3)"),
    (MULTI_SCALE_LOGITS, 5, lambda a: a.view(2, 3, 2, 4, 1),
     f"attention_logits must have shape ({QUERIES}, num_levels=2, num_points=2); got (2, 3, 2, 4, 1)"),
    (AGGREGATION_LOGITS, 5, lambda a: a.transpose(3, 4),
     "logits must have shape (bs=2, anchor=3, cam=2, scale=1, pts=2, group); "
     "got (2, 3, 2, 2, 1, 2), whose axes 3 and 4 look swapped"),
    (AGGREGATION_LOGITS, 7, lambda a: a.transpose(2, 3)[:, :, :1],
     "pair_scale must have shape (bs=2, anchor=3, cam=2, pts=2); got (2, 3, 1, 2)"),
    (AGGREGATION_LOGITS, 0, lambda a: a[..., :3], "logits must have a group count that divides c=3; got 2"),
    (MULTI_SCALE, 0, lambda a: a.cfloat(), f"value must {FLOATING}; got complex64"),
    (MULTI_SCALE, 2, lambda a: a.short(), f"{LEVELS} must have dtype int32 or int64; got int16"),
    (GEOMETRIC, 3, lambda a: a.bool(), "sampling_locations must have a floating or an integer dtype; got bool"),
    (AGGREGATION_LOGITS, 7, lambda a: a.to("meta"), "pair_scale must be on feature_maps's device (cpu); got meta"),
    (MULTI_SCALE_LOGITS, 6, lambda a: "heads", "reference_axis must be 'level' or 'point'; got 'heads'"),
    (MULTI_SCALE, 2, lambda a: torch.rand(2, 3, 2, 2, 2, 2),
     f"{LEVELS} must have shape (num_levels=2,); got (2, 3, 2, 2, 2, 2), which looks like sampling_locations"),
    (GEOMETRIC_LOGITS, 4, lambda a: torch.rand(2, 3, 2, 4),
     "window must have shape (num_points, 2); got (2, 3, 2, 4), which looks like attention_logits"),
    (MULTI_SCALE_LOGITS, 3, lambda a: a.repeat(1, 1, 2, 1)[:, :, :3],
     "reference_points must have shape (bs=2, num_queries=3, num_levels=2 or 1, 2 or 4); got (2, 3, 3, 2)"),
]]  # fmt: skip

# Numbers in index tables, which layers on a CPU check.
NUMBERS = [Refusal(*row) for row in [
    (MULTI_SCALE, 1, lambda a: t([[3, 4], [0, 2]]), "value_spatial_shapes[1] must be positive (H, W); got (0, 2)"),
    (AGGREGATION, 1, lambda a: t([[[3, 4]], [[2, -2]]]), "spatial_shape[1, 0] must be positive (H, W); got (2, -2)"),
    (GEOMETRIC, 2, lambda a: t([-1, 12]), "level_start_index[0] must not be negative; got -1"),
    (MULTI_SCALE, 2, lambda a: a + 1, f"{LEVELS}[1] must leave room for 2 x 2 rows among 16; got 13 (needs 17 rows)"),
    (AGGREGATION, 2, lambda a: t([[5], [12]]),
     "scale_start_index[0, 0] must leave room for 3 x 4 rows among 16; got 5 (needs 17 rows)"),
    (AGGREGATION, 0, lambda a: torch.rand(2, 4, 16),
     "scale_start_index[0, 0] must leave room for 3 x 4 rows among 4; "
     "got 0 (needs 12 rows); axes 1 and 2 of feature_maps look swapped"),
    (AGGREGATION_LOGITS, 2, lambda a: a + 1,
     "scale_start_index[1, 0] must leave room for 2 x 2 rows among 16; got 13 (needs 17 rows)"),
    (GEOMETRIC_LOGITS, 1, lambda a: t([[3, 4], [2, 4]]),
     "level_start_index[1] must leave room for 2 x 4 rows among 16; got 12 (needs 20 rows)"),
]]  # fmt: skip


def without_hint(sentence: str) -> str:
    """Return name, rule and fact, which Python and C++ have in common. C takes fewer integer dtypes than torch."""
    sentence = sentence.replace("a floating dtype, int32 or int64", "a floating or an integer dtype")
    return re.sub(r"(, whose axes|, which looks like|; axes 1 and 2) .*", "", sentence)


def said(call: Callable[[], Any]) -> str:
    """Return the sentence of a refusal in Python. The class and the argument of the error follow from the sentence."""
    with pytest.raises((TypeError, ValueError)) as refused:
        call()
    sentence = str(refused.value)
    is_of_type = re.search("dtype|a torch.Tensor|a list of", sentence)
    assert refused.type is (TypeError if is_of_type else ValueError)
    assert refused.value.argument == re.match(r"[\w.]+", sentence)[0]  # pyright: ignore
    return sentence
