"""Clustered attention in plain PyTorch, for many queries at once (prefill) and for few (decoding)."""
