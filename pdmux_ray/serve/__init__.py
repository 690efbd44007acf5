"""The Ray layer: a thin shell that puts engines behind an OpenAI-compatible HTTP endpoint. Only this package imports ray."""
