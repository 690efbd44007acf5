"""The decoder-only transformer, its weights and rotary embeddings. Imports torch; knows nothing of requests or scheduling."""
