"""`pdmux gpu-check`: whether the CUDA device does what it must on the GPU at hand; docs/cuda.md."""
