"""LMCache behind our own words: the only place that says chunk, L1 and L2. Pinned to lmcache 0.5.6.

daemon.py  how the daemon is started      module.py  what we add inside it (runs in the daemon)
client.py  the engine's side of it        sweep.py   /dev/shm leftovers and the disk cap
"""
