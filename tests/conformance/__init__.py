"""Rules for everything that is registered: a new one is tested by being registered."""
