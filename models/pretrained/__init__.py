"""Pretrained language models: GPT-2 and Llama, from their files."""
