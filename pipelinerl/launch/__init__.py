"""Starting and ending a run's processes, on one machine or under Slurm, and the checks before."""
