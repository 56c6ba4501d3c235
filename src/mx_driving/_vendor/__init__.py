"""What only users of the vendor's library need: the stand-in for torch_npu, the patcher, CANN's functions, its `_C`."""
