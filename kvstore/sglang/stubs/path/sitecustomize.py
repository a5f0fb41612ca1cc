"""Python imports this by itself at start, where the folder is on PYTHONPATH."""

from rekindle_cpu_stubs import install

install()
