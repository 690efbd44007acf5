"""The decoder-only transformer, its weights and its rotary embeddings. Imports torch; knows nothing of requests or scheduling."""
