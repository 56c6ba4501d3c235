"""Code for users of the vendor's library: the stand-in for torch_npu, the compiled functions, and the limits of Atlas A2."""
