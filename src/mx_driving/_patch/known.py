"""The code that `patch` knows: keys (_code.py) of attention modules, cores, autograd functions and pools of other projects.

`make known` tries the code of packages, and prints rows. Each row was compared with its source, outputs and gradients in
float64; an autograd function over a compiled one was read.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NamedTuple


class Known(NamedTuple):
    """A code and its form.

    Attributes:
        form: the name of the form.
        seen: where the code was seen: project, version or commit, class.
        difference: the largest difference from the source in float64, of outputs and gradients.
        flags: attributes of the layer that the code reads beside sizes and layers -> the values that the form serves.
        options: parameters that the code reads and that have no role -> the values that the form serves.
        widths: last sides of the reference points that the code takes.
        masked: whether the code takes a mask.
        casts: of an autograd function: the dtype to which its code converts all inputs, or "value" for that of value.
    """

    form: str
    seen: str
    difference: float = 0.0
    flags: Mapping[str, tuple[Any, ...]] = types.MappingProxyType({})
    options: Mapping[str, tuple[Any, ...]] = types.MappingProxyType({})
    widths: tuple[int, ...] = (2, 4)
    masked: bool = True
    casts: str = ""


TABLE: dict[str, Known] = {
    # cores
    "146c47cd4869": Known("rows_split", "transformers 4.57.1 multi_scale_deformable_attention", 3e-16),
    "018b9d63f6f9": Known("rows_uneven", "transformers 5.24.0 multi_scale_deformable_attention_v2", 2e-16),
    "12a12fafac18": Known("rows_uneven", "transformers 5.6.0 multi_scale_deformable_attention_v2", 2e-16),
    "4dd9f52b5f22": Known("layer", "transformers 5.24.0 MultiScaleDeformableAttention", 3e-16),
    "c273c4905e60": Known("rows_split", "transformers 5.24.0 multi_scale_deformable_attention", 3e-16),
    "0ae97276abdb": Known("rows_split", "ultralytics 8.3.240 multi_scale_deformable_attn_pytorch", 3e-16),
    "434090c5aad5": Known("rows_split", "facebookresearch/dinov2 b8931f7bf9 ms_deform_attn_core_pytorch", 3e-16),
    "d5f7bada5d34": Known("rows_merged", "ultralytics 8.4.190 multi_scale_deformable_attn_pytorch", 3e-16),
    "e9b91d5bbc65": Known("keys_last_split", "surya-ocr 0.22.1 ms_deform_attn_core_pytorch", 3e-16),
    "da1b72b61490": Known("rows_split", "kornia 0.9.0 _deformable_attention_kernel", 3e-16),
    "179662b5c38d": Known("rows_split", "lyuwenyu/RT-DETR 068dfde65f deformable_attention_core_func", 3e-16),
    "20ac74e83cd5": Known("keys_last_split", "rfdetr 1.8.0 ms_deform_attn_core_pytorch", 3e-16),
    "1d32ef974fe6": Known("keys_last", "rfdetr 1.11.2 ms_deform_attn_core_pytorch", 3e-16),
    "8dcfa0b33b86": Known("keys_last_split", "rfdetr 1.6.0 ms_deform_attn_core_pytorch", 3e-16),
    "5b5a43ce21cc": Known("rows_uneven_bilinear", "lyuwenyu/RT-DETR 068dfde65f deformable_attention_core_func_v2", 2e-16),
    "f381fc309fe6": Known("by_level_uneven_bilinear", "Peterande/D-FINE 4a1f73a8bc deformable_attention_core_func_v2", 2e-16),
    "489807636b5b": Known(
        "by_level_uneven_bilinear", "Intellindust-AI-Lab/DEIMv2 0fff8d4dcd deformable_attention_core_func_v2", 2e-16
    ),
    "8b8e5ec01bc0": Known("rows_split", "otx 2.6.0 deformable_attention_core_func", 3e-16),
    "b06323c84108": Known("rows_uneven_bilinear", "lightly-train 0.18.0 deformable_attention_core_func_v2", 2e-16),
    "754a0fcdc401": Known("rows_split", "xiuqhou/Relation-DETR b485955c72 multi_scale_deformable_attn_pytorch", 3e-16),
    "0817978626f4": Known("rows_split", "libreyolo 1.6.0 deformable_attention_core_func", 3e-16),
    "24fb8f416bbe": Known("rows_split", "libreyolo 1.6.0 ms_deform_attn_core_pytorch", 3e-16),
    "58558ea91bcd": Known(
        "rows_uneven_bilinear",
        "libreyolo 1.6.0 deformable_attention_core_func_v2",
        2e-16,
        options={"allow_acceleration": (True, False)},
    ),
    "82a2c72c6f55": Known("by_level_uneven_bilinear", "libreyolo 1.6.0 deformable_attention_core_func_v2", 2e-16),
    "a22131ae4dc0": Known("keys_last_split", "libreyolo 1.6.0 ms_deform_attn_core_pytorch", 3e-16),
    "a341587809af": Known("by_level_uneven_bilinear", "libreyolo 1.6.0 deformable_attention_core_func_v2", 2e-16),
    "acd25509bcdf": Known("rows_uneven_bilinear", "libreyolo 1.6.0 deformable_attention_core_func_v2", 2e-16),
    "b5fdbe72537c": Known("images_uneven_bilinear", "libreyolo 1.6.0 deformable_attention_core_func_v2", 2e-16),
    "e8c509e588a9": Known("by_level_uneven_bilinear", "libreyolo 1.6.0 deformable_attention_core_func_v2", 2e-16),
    "efadfc684e21": Known("rows_split", "libreyolo 1.6.0 _msda", 3e-16),
    "5611e567cf9c": Known(
        "rows_split",
        "NVIDIA-TAO/tao-pytorch d99ff772e2 multi_scale_deformable_attn_pytorch",
        3e-16,
        options={"deterministic": (False, True)},
    ),
    "97d47155d65c": Known("pixels", "tenstorrent/tt-forge-models 3d75521457 geometry_kernel_attention_cpu", 2e-16),
    "d4396b5efd8d": Known("rows_split", "tenstorrent/tt-forge-models 3d75521457 multi_scale_deformable_attn_pytorch", 3e-16),
    "d636c9907e11": Known("rows_uneven", "birder 0.8.4 multi_scale_deformable_attention_packed", 2e-16),
    "371caa9ecd8a": Known("rows_split", "Beatlesso/DeformableDETR 827959233e ms_deform_attn_core_pytorch", 3e-16),
    "6bdda19cdbf2": Known("keys_last", "masdetr 0.1.1 ms_deform_attn_core_pytorch", 3e-16),
    "79dd56828bcd": Known(
        "rows_split", "eliird/bev-former-fork b3fa7eb900 multi_scale_deformable_attn", 3e-16, options={"im2col_step": (64,)}
    ),
    # autograd functions
    "e85035f6b4d8": Known("attention", "transformers 4.57.1 MultiScaleDeformableAttentionFunction"),
    "ab97ca4209f8": Known("attention", "facebookresearch/dinov3 6876159a11 MSDeformAttnFunction"),
    "2edeac829d3c": Known("attention", "OpenDriveLab/UniAD dd161b220c MultiScaleDeformableAttnFunction_fp32"),
    "9570b7d65ac3": Known("attention", "mmcv-lite 2.2.0 MultiScaleDeformableAttnFunction", casts="value"),
    "62342bfd0a2b": Known("attention", "OpenDriveLab/UniAD dd161b220c MultiScaleDeformableAttnFunction_fp16"),
    "e6f774aaa5a9": Known("sorted_rows", "open-mmlab/mmdetection3d fe25f7a51d QuickCumsumCuda"),
    "53d68182d7a7": Known("attention", "facebookresearch/dinov2 b8931f7bf9 MSDeformAttnFunction"),
    "6b312ffec319": Known("attention", "IDEA-Research/GroundingDINO 856dde20ae MultiScaleDeformableAttnFunction"),
    "d75c2fc66a2b": Known("attention", "facebookresearch/dinov3 6876159a11 MSDeformAttnFunction"),
    "760576983f94": Known("attention", "open-mmlab/mmdetection3d fe25f7a51d MultiScaleDeformableAttnFunction"),
    "7d89b05e29ed": Known("attention", "IDEA-Research/Grounded-SAM-2 2c0178f774 MultiScaleDeformableAttnFunction"),
    "ae126d79524b": Known("lifted", "hustvl/MapTR a6872d8d96 QuickCumsumCuda"),
    "b5bfbc48f4a7": Known("attention", "IDEA-Research/detrex e244e6c3da MultiScaleDeformableAttnFunction"),
    "91c098b6be17": Known("attention", "alibaba/EasyCV 901ff18693 MSDeformAttnFunction"),
    "2c7963ee890f": Known("attention", "czczup/ViT-Adapter fd64a5190f MSDeformAttnFunction"),
    "e1029eba34f7": Known("aggregation", "swc-17/SparseDrive ec0225d4b7 DeformableAggregationFunction", casts="float32"),
    "89b239d480f5": Known("geometric", "hustvl/MapTR a6872d8d96 GeometricKernelAttentionFunc"),
    "ab32a44f5dae": Known("attention", "Intellindust-AI-Lab/DEIMv2 0fff8d4dcd MSDeformAttnFunction"),
    "ac9932c38f8b": Known("attention", "OpenGVLab/VisionLLM 148cc93b72 MultiScaleDeformableAttentionFunction"),
    "cdf5bc1af2b6": Known("attention", "OpenGVLab/VisionLLM 148cc93b72 MultiScaleDeformableAttnFunction", casts="value"),
    "addd137a7040": Known("frustum", "Megvii-BaseDetection/BEVDepth d78c7b58b1 VoxelPoolingTrain"),
    "b3c0a3b965d3": Known("image", "Megvii-BaseDetection/BEVDepth d78c7b58b1 VoxelPoolingInference"),
    "fe57de279eb3": Known("attention", "longzw1997/Open-GroundingDino d248268ac9 MultiScaleDeformableAttnFunction"),
    "8f715de4a630": Known("attention", "wjf5203/VNext db338339b3 MSDeformAttnFunction"),
    "9520f160c6f4": Known("attention", "IDEA-Research/OSX 14b1cb41a3 MultiScaleDeformableAttnFunction"),
    "8e4cd90df02f": Known("attention_without_starts", "timmeinhardt/trackformer e468bf156b MSDeformAttnFunction"),
    "875562a9dd89": Known("attention", "HDETR/H-Deformable-DETR f58ceb1165 MSDeformAttnFunction"),
    "800dc17c4f30": Known("attention", "xiuqhou/Relation-DETR b485955c72 MultiScaleDeformableAttnFunction"),
    "bc93ef2eee6d": Known("attention", "ViTAE-Transformer/DeepSolo dbadae9950 _MSDeformAttnFunction"),
    "8219b57fffdf": Known("aggregation", "NVIDIA-TAO/tao-pytorch d99ff772e2 DeformableAggregationFunction", casts="float32"),
    "e169520c917c": Known("attention", "NVIDIA-TAO/tao-pytorch d99ff772e2 MSDeformAttnFunction"),
    "22439d986cda": Known("lifted", "VDIGPKU/HENet 29ca81dd10 QuickCumsumCuda"),
    "4864879f2f77": Known("attention", "513549146/autoLabel ca5331dc3b MultiScaleDeformableAttnFunction"),
    "832d47a305c1": Known("attention_without_starts", "PeizeSun/TransTrack 91cfaa7217 MSDeformAttnFunction"),
    "bd020464d062": Known("sorted_xyzb", "Yzichen/FlashOCC 4084861d8d QuickBevPoolingCuda"),
    "fe16acd2a364": Known("attention", "eliird/bev-former-fork b3fa7eb900 MultiScaleDeformableAttnFunction_fp32"),
    "1f7bbbcdbd02": Known("lift_splat_function", "mit-han-lab/bevfusion 326653dc06 QuickCumsum"),
    # pools
    "d658c0851761": Known("bev_pool", "open-mmlab/mmdetection3d fe25f7a51d bev_pool", 0e00),
    "e778101b50af": Known("bevdet", "hustvl/MapTR a6872d8d96 bev_pool_v2", 3e-08),
    # modules
    "0f6855c3099c": Known(
        "rt_detr_v2_transformers",
        "transformers 4.57.1 RTDetrV2MultiscaleDeformableAttention",
        3e-16,
        flags={"method": ("default",)},
        widths=(4,),
    ),
    "12ec90985149": Known(
        "transformers",
        "transformers 4.48.3 DeformableDetrMultiscaleDeformableAttention",
        2e-16,
        flags={"disable_custom_kernels": (True, False)},
    ),
    "13e7389aa8b1": Known(
        "transformers",
        "transformers 4.48.3 OmDetTurboMultiscaleDeformableAttention",
        2e-16,
        flags={"disable_custom_kernels": (True, False)},
    ),
    "3d9d4c88ca7d": Known(
        "rt_detr_v2_transformers",
        "transformers 5.0.0 DFineMultiscaleDeformableAttention",
        2e-16,
        flags={"decoder_method": ("default",)},
        widths=(4,),
        masked=False,
    ),
    "42b9e5b0668a": Known(
        "rt_detr_v2_transformers",
        "transformers 4.50.3 RTDetrV2MultiscaleDeformableAttention",
        3e-16,
        flags={"method": ("default",)},
        widths=(4,),
    ),
    "46a09c61e5f0": Known("transformers", "transformers 4.50.3 OmDetTurboMultiscaleDeformableAttention", 2e-16),
    "47f502b449f9": Known("transformers", "transformers 5.0.0 DeformableDetrMultiscaleDeformableAttention", 2e-16),
    "50eb59e1317e": Known(
        "rt_detr_v2_transformers",
        "transformers 4.57.1 DFineMultiscaleDeformableAttention",
        2e-16,
        flags={"decoder_method": ("default",)},
        widths=(4,),
        masked=False,
    ),
    "6035b097bcc0": Known("transformers", "transformers 5.0.0 LwDetrMultiscaleDeformableAttention", 2e-16),
    "606ba15d1023": Known("transformers", "transformers 5.0.0 GroundingDinoMultiscaleDeformableAttention", 2e-16),
    "65129e2c7805": Known(
        "mask2former", "transformers 5.24.0 OneFormerPixelDecoderEncoderMultiscaleDeformableAttention", 5e-16
    ),
    "7fe0c568ae1d": Known(
        "rt_detr_v2_transformers",
        "transformers 5.24.0 DFineMultiscaleDeformableAttention",
        2e-16,
        flags={"decoder_method": ("default",)},
        widths=(4,),
        masked=False,
    ),
    "86569c572da5": Known(
        "rt_detr_v2_transformers",
        "transformers 5.0.0 RTDetrV2MultiscaleDeformableAttention",
        3e-16,
        flags={"method": ("default",)},
        widths=(4,),
    ),
    "a7e44fde7e7e": Known("transformers", "transformers 5.0.0 OmDetTurboMultiscaleDeformableAttention", 2e-16),
    "b237aafc2c7f": Known("transformers", "transformers 5.24.0 DeformableDetrMultiscaleDeformableAttention", 2e-16),
    "c4f279559a46": Known("transformers", "transformers 5.24.0 GroundingDinoMultiscaleDeformableAttention", 2e-16),
    "c88a43d649c6": Known("transformers", "transformers 5.24.0 OmDetTurboMultiscaleDeformableAttention", 2e-16),
    "dbc7ebfd38ac": Known(
        "mask2former", "transformers 5.24.0 Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention", 5e-16
    ),
    "e0f91457cd36": Known(
        "transformers",
        "transformers 4.57.1 DetaMultiscaleDeformableAttention",
        2e-16,
        flags={"disable_custom_kernels": (True, False)},
    ),
    "ef020d68be42": Known(
        "mask2former", "transformers 5.10.0 OneFormerPixelDecoderEncoderMultiscaleDeformableAttention", 5e-16
    ),
    "f0bd27ea1957": Known(
        "transformers",
        "transformers 4.48.3 GroundingDinoMultiscaleDeformableAttention",
        2e-16,
        flags={"disable_custom_kernels": (True, False)},
    ),
    "f728ebe32616": Known(
        "rt_detr_v2_transformers",
        "transformers 5.24.0 RTDetrV2MultiscaleDeformableAttention",
        3e-16,
        flags={"method": ("default",)},
        widths=(4,),
    ),
    "04b23aec4ea3": Known("deformable_detr", "ultralytics 8.3.240 MSDeformAttn", 2e-16),
    "0d6380f68086": Known("deformable_detr", "ultralytics 8.4.190 MSDeformAttn", 3e-16, widths=(4,)),
    "4b33ada3251a": Known("deformable_detr", "surya-ocr 0.22.1 MSDeformAttn", 2e-16),
    "e5e88fff0cab": Known("deformable_detr", "facebookresearch/dinov2 b8931f7bf9 MSDeformAttn", 2e-16),
    "2ed4fa177ed0": Known("bevformer_temporal", "OpenDriveLab/UniAD dd161b220c TemporalSelfAttention", 6e-16),
    "ade95473e31a": Known("bevformer_spatial", "OpenDriveLab/UniAD dd161b220c MSDeformableAttention3D", 3e-16, widths=(2,)),
    "4852d8669d79": Known("mmcv", "OpenDriveLab/UniAD dd161b220c CustomMSDeformableAttention", 6e-16),
    "ba124aa9503b": Known("deformable_detr", "facebookresearch/dinov3 6876159a11 MSDeformAttn", 2e-16),
    "0dd7de693abc": Known("deformable_detr", "IDEA-Research/GroundingDINO 856dde20ae MultiScaleDeformableAttention", 5e-16),
    "1d0280cda20b": Known("deformable_detr", "kornia 0.9.0 MultiScaleDeformableAttention", 3e-16, widths=(4,)),
    "75995411a1d5": Known("deformable_detr", "kornia 0.8.1 MultiScaleDeformableAttention", 3e-16, widths=(4,)),
    "4f4be3638081": Known("deformable_detr", "modelscope 1.40.2 MSDeformAttn", 2e-16),
    "aeebac3bc758": Known("deformable_detr", "modelscope 1.40.2 MSDeformAttn", 2e-16),
    "b1bd12136a21": Known("rt_detr_v2", "lyuwenyu/RT-DETR 068dfde65f MSDeformableAttention", 6e-16, widths=(4,)),
    "c306372b097e": Known("mmcv", "open-mmlab/mmcv a8073c74bf MultiScaleDeformableAttention", 5e-16),
    "fba3380aad67": Known("mmcv", "mmcv-lite 2.2.0 MultiScaleDeformableAttention", 5e-16),
    "4b0e1ea42020": Known("mmcv", "mmcv-full 1.7.2 MultiScaleDeformableAttention", 5e-16),
    "e945ccfba534": Known("deformable_detr", "rfdetr 1.11.2 MSDeformAttn", 4e-16, flags={"_export": (False, True)}),
    "a7e9d228d6f6": Known("deformable_detr", "rfdetr 1.8.0 MSDeformAttn", 4e-16, flags={"_export": (False, True)}),
    "aeff08a25009": Known("uniad", "OpenDriveLab/UniAD dd161b220c MotionDeformableAttention", 5e-16, widths=(2,)),
    "623b238ee5e9": Known("deformable_detr", "lyuwenyu/RT-DETR 068dfde65f MSDeformableAttention", 3e-16, masked=False),
    "4ae3b65718bc": Known("d_fine", "Peterande/D-FINE 4a1f73a8bc MSDeformableAttention", 4e-16, widths=(4,)),
    "48e9dac58c3d": Known("deformable_detr", "facebookresearch/Mask2Former 9b0651c6c1 MSDeformAttn", 2e-16),
    "8d9bef23b33b": Known("deformable_detr", "IDEA-Research/DINO faa8520fe9 MSDeformAttn", 2e-16),
    "cd0ec2dc635d": Known("deformable_detr", "groundingdino-py 0.4.0 MultiScaleDeformableAttention", 5e-16),
    "2c8550baa241": Known("mmcv", "IDEA-Research/detrex e244e6c3da MultiScaleDeformableAttention", 5e-16),
    "9e94e7eab10e": Known("bevformer_temporal", "alibaba/EasyCV 901ff18693 TemporalSelfAttention", 6e-16),
    "d6fab41f28d6": Known("deformable_detr", "alibaba/EasyCV 901ff18693 MSDeformAttn", 2e-16),
    "a5ce1548e91f": Known("deformable_detr", "SHI-Labs/OneFormer 4962ef6a96 MSDeformAttn", 2e-16),
    "0b0d6bb9ae2d": Known(
        "deformable_detr", "OpenGVLab/VisionLLM 148cc93b72 MSDeformAttn", 2e-16, flags={"use_4D_normalizer": (False,)}
    ),
    "0dda1d6d1f1f": Known("deformable_detr", "otx 2.6.0 MSDeformableAttention", 2e-16),
    "4da93ca8cd3e": Known("deformable_detr", "Intellindust-AI-Lab/DEIMv2 0fff8d4dcd MSDeformAttn", 2e-16),
    "e9d6739cc392": Known("d_fine", "otx 2.6.0 MSDeformableAttentionV2", 4e-16, widths=(4,)),
    "99daa04741cd": Known("mmcv", "OpenGVLab/VisionLLM 148cc93b72 MultiScaleDeformableAttention", 5e-16),
    "a5c2c6fbe00c": Known(
        "transformers",
        "OpenGVLab/VisionLLM 148cc93b72 GroundingDinoMultiscaleDeformableAttention",
        2e-16,
        flags={"disable_custom_kernels": (True, False)},
    ),
    "c50d4571853e": Known(
        "transformers",
        "OpenGVLab/VisionLLM 148cc93b72 GroundingDinoMultiscaleDeformableAttention",
        2e-16,
        flags={"disable_custom_kernels": (True,)},
    ),
    "e8bb42a4d242": Known(
        "deformable_detr", "megvii-research/MOTR 8690da3392 MSDeformAttn", 2e-16, flags={"sigmoid_attn": (False,)}
    ),
    "1ec817e7df47": Known("mmcv", "OpenDriveLab/PersFormer_3DLane 3ed3109d62 IdentityMSDeformAttn", 3e-16),
    "fcd0a9305f01": Known(
        "deformable_detr", "Atten4Vis/LW-DETR d5e6e6c4ad MSDeformAttn", 2e-16, flags={"_export": (False, True)}
    ),
    "fdab3638989e": Known(
        "deformable_detr", "ZrrSkywalker/MonoDETR 6994b9f512 MSDeformAttn", 2e-16, flags={"conditional": (False,)}, widths=(2,)
    ),
    "1868daf8b6d9": Known(
        "deformable_detr", "IDEA-Research/ED-Pose 4afc5beb94 MSDeformAttn", 2e-16, flags={"use_4D_normalizer": (False,)}
    ),
    "4bfad86c0bc5": Known("deformable_detr", "xiuqhou/Relation-DETR b485955c72 MultiScaleDeformableAttention", 4e-16),
    "84fcb922a80f": Known(
        "mmcv", "OpenDriveLab/ViDAR 936dbf7e01 PredictionMSDeformableAttention", 6e-16, options={"key": (None,)}
    ),
    "47c7e5a67cef": Known("deformable_detr", "libreyolo 1.6.0 MSDeformAttn", 3e-16),
    "4ca515ba4669": Known("deformable_detr", "libreyolo 1.6.0 MSDeformAttn", 4e-16),
    "5258ccf8b697": Known("d_fine", "libreyolo 1.6.0 MSDeformableAttention", 4e-16, widths=(4,)),
    "7450c9e554a7": Known("d_fine", "libreyolo 1.6.0 MSDeformableAttention", 4e-16, widths=(4,)),
    "997c78cc4d39": Known("rt_detr_v2", "libreyolo 1.6.0 MSDeformableAttention", 3e-16, widths=(4,)),
    "bb36d52f4666": Known("deformable_detr", "ViTAE-Transformer/DeepSolo dbadae9950 MSDeformAttn", 2e-16),
    "d5ce46d8986b": Known("rt_detr", "libreyolo 1.6.0 MSDeformableAttention", 6e-16),
    "e28f505119ff": Known("rt_detr_v2", "libreyolo 1.6.0 MSDeformableAttention", 6e-16, widths=(4,)),
    "e3e9d020e1e8": Known("deformable_detr", "libreyolo 1.6.0 MSDeformAttn", 4e-16, flags={"_export": (False, True)}),
    "f582a77c5d82": Known("rt_detr", "libreyolo 1.6.0 GDMSDeformAttn", 3e-16),
    "3da22cb9c6a4": Known(
        "deformable_detr",
        "MCG-NJU/MeMOTR 7de13f4afe MSDeformAttn",
        2e-16,
        flags={"sigmoid_attn": (False,), "visualize": (False,)},
    ),
    "e1ead4eb9049": Known(
        "deformable_detr", "Michel-liu/GroupPose 127fe0e2e7 MSDeformAttn", 2e-16, flags={"use_4D_normalizer": (False,)}
    ),
    "35303fb7e3a6": Known(
        "deformable_detr", "NVIDIA-TAO/tao-pytorch d99ff772e2 MSDeformAttn", 4e-16, options={"export": (False,)}
    ),
    "55339aa5c4e0": Known("deformable_detr", "NVIDIA-TAO/tao-pytorch d99ff772e2 GDINOMultiScaleDeformableAttention", 6e-16),
    "80dc84523919": Known(
        "deformable_detr", "NVIDIA-TAO/tao-pytorch d99ff772e2 MSDeformAttn", 4e-16, options={"export": (False,)}
    ),
    "03e41e84815b": Known(
        "bevformer_spatial", "tenstorrent/tt-forge-models 3d75521457 MSDeformableAttention3D", 4e-16, widths=(2,)
    ),
    "236596849663": Known("mmcv", "tenstorrent/tt-forge-models 3d75521457 CustomMSDeformableAttention", 5e-16),
    "3d254be21fcc": Known("deformable_detr", "birder 0.8.4 MultiScaleDeformableAttention", 4e-16),
    "405b2eb65a96": Known(
        "bevformer_temporal", "tenstorrent/tt-forge-models 3d75521457 TemporalSelfAttention", 3e-16, widths=(2,)
    ),
    "446b7954485a": Known(
        "birder",
        "birder 0.5.0 MultiScaleDeformableAttention",
        3e-16,
        flags={"method": ("default",), "uniform_points": (False,)},
        widths=(4,),
    ),
    "58e5e2df0950": Known("mmcv", "tenstorrent/tt-forge-models 3d75521457 CustomMSDeformableAttention", 3e-16, widths=(2,)),
    "6948eb3c2d28": Known("mmcv", "tenstorrent/tt-forge-models 3d75521457 MultiScaleDeformableAttention", 5e-16),
    "7a0af0dfdce5": Known("mmcv", "tenstorrent/tt-forge-models 3d75521457 CustomMSDeformableAttention", 5e-16, widths=(2,)),
    "8f9d0ff68181": Known(
        "bevformer_temporal", "tenstorrent/tt-forge-models 3d75521457 TemporalSelfAttention", 3e-16, widths=(2,)
    ),
    "a3631e19d774": Known(
        "bevformer_temporal", "tenstorrent/tt-forge-models 3d75521457 TemporalSelfAttention", 3e-16, widths=(2,)
    ),
    "f9b285f13b1b": Known(
        "bevformer_spatial", "tenstorrent/tt-forge-models 3d75521457 MSDeformableAttention3D", 3e-16, widths=(2,)
    ),
    "0a00949fced2": Known("deformable_detr", "JohnYiZheng/deformable_detr 4ae6f71477 MSDeformAttn", 2e-16),
    "10313c5be4b6": Known(
        "deformable_detr", "encounter1997/SFA 3a0725f6dd MSDeformAttn", 2e-16, flags={"mask_domain": (False,)}
    ),
    "a6dd907880ba": Known("deformable_detr", "dianzl/SODFormer 134857cb2c MSDeformAttn", 2e-16),
    "c1329a2393af": Known("deformable_detr", "1941Zpf/TCEI 145d1b8431 MSDeformAttn", 2e-16),
    "c6c0352ad781": Known("deformable_detr", "513549146/autoLabel ca5331dc3b MultiScaleDeformableAttention", 5e-16),
    "ceafb57cebac": Known("mmcv", "onedl-mmcv 2.3.6 MultiScaleDeformableAttention", 5e-16),
    "daabbce93edc": Known("bevformer_temporal", "eliird/bev-former-fork b3fa7eb900 TemporalSelfAttention", 6e-16),
}
