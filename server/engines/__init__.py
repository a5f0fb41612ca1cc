"""The engine port, its typed channel, and the engines behind it."""
