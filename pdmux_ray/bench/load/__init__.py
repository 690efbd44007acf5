"""`pdmux bench`: load on servers that speak the OpenAI API, and what their users would have seen of it."""
