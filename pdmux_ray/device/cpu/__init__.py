"""The CPU device: one runner over kernels of our own; where those cannot run, oneDNN or plain torch."""
