"""Text in and out: tokenizer, chat template, incremental detokenization, stop strings. Torch-free; knows nothing of HTTP."""
