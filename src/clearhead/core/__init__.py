"""One call of attention."""
