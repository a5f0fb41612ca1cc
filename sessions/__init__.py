"""Durable conversation: sessions, turns, branches and their limits. Imports neither `server` nor `kvstore`."""
