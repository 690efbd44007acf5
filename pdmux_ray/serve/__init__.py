"""The Ray layer: a thin shell that puts engines behind an OpenAI-compatible HTTP endpoint. The only package that imports ray."""
