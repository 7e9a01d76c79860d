"""What every registered thing must do: a new one is tested by being registered."""
