"""A run as it is seen: the journal, and the report, view, terminal, trackers and alarms that read it."""
