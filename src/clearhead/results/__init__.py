"""Results as pure data: a trace, a report, what scaling does. Views draw them."""
