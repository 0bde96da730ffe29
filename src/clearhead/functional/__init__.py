"""One call of attention, and what can be asked of it."""
