"""Language models whose weights others have trained: GPT-2 and Llama, from their files."""
