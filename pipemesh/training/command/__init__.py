"""Command lines that train: flags, and the programs behind them."""
