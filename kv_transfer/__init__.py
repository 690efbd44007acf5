"""Moving KV pages between instances. Imports nothing from pdmux_ray.

So far: `layout`, the description of a KV pool that both ends of a transfer agree on.
"""
