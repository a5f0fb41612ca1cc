"""Runs inside SGLang's processes (0.5.17), loaded by its plugin entry point: sessions own radix nodes here.

plugin.py    the table of hooks            config.py   what the worker tells the scheduler
cache.py     SessionRadixCache: owners     ops.py      spill, restore, store, ... as generators
tasks.py     polls them once per step      control.py  the typed command channel, both ends
images.py    image records: paid for once  compat.py   versions, and proof that each hook applied
cpu.py       what the CPU mode asks Triton for
"""
