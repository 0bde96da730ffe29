"""What comes back, as pure data: a trace, a report, what scaling does. Views draw it."""
