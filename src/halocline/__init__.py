"""Halocline: hybrid-attention language models served out of one arena of bytes."""
