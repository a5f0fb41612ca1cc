"""Pages, tiers, budgets. A session is an opaque owner id here; this package imports neither `server` nor `sessions`."""
