"""TensorRT plugins of dflash-trt: a folder each, a kernel in the Triton language and a plugin class.

Kernels are compiled ahead of time for the capabilities of a plan and travel inside it. Building
needs `triton`; running a plan needs `cuda-python` only.
"""
