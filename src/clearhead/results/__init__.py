"""Results as pure data: a trace, findings of a report, effects, scaling. Views draw them."""
