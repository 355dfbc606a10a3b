"""What `scripts/bench/schedule.py` consists of."""
