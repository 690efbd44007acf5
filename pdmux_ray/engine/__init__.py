"""The control plane of one instance: requests, pages, scheduling and the step loop. Torch-free; runs without Ray."""
