"""The CUDA device: the lanes are green contexts of one process. Imports neither triton nor the CUDA driver by itself."""
