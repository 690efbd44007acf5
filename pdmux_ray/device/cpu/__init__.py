"""The CPU device: oneDNN matrix products, our own kernels for the rest, one runner."""
