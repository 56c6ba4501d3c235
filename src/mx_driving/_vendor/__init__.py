"""What only users of the vendor's library need: the stand-in for torch_npu, the patcher, its `_C`, recorded calls."""
