"""Simulated against measured serving points of GPUs: `python -m pdmux_ray.bench.calibration`."""
