"""Import this before SGLang, to have it in the tests' own process (for its data structures; no engine runs here)."""

import os

from kvstore.sglang import stubs

os.environ |= {name: value for name, value in stubs.environment().items() if name != "PYTHONPATH"}
stubs.install()
