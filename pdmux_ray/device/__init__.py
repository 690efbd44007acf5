"""Devices: runners that compute steps. Imports torch.

Each device is one folder; the KV pool, the step tensors and the sampler are shared.
"""
