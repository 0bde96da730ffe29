"""Watch a training: numbers of each head at every logged step, and alarms."""
