"""What is measured and under which name. Exact `prometheus_client` metrics, each process with a registry of its own."""
