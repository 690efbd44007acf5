"""PD-multiplexed LLM serving on Ray Serve.

Importing this package pulls in neither torch nor ray; the map of its parts is in docs/architecture.md.
"""

__version__ = "0.1.0"
