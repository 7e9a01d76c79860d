"""Translation by a pipelined encoder-decoder."""
