"""`pdmux gpu-check`: whether the CUDA device does what it must on the GPU at hand, in under five minutes; docs/cuda.md."""
