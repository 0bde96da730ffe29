"""Results as pure data: a trace, findings of a report, effects, what scaling does. Views draw them."""
