"""Calls of user functions in worker processes: slots, queues, limits, deadlines."""
