"""Moving KV pages between instances. Imports nothing from pdmux_ray.

engine ──► api.KvPort = endpoint.Endpoint ──► receivers, senders ──► session     what to do (no I/O)
                             └──► links ──► api.Transport = local or nixl          messages: what is said   plan: which bytes
"""
