"""Devices: runners that compute steps. Imports torch; each device is one folder beside the KV pool and the sampler they share."""
