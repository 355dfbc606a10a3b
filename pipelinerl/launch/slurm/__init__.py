"""A run as a Slurm job: one allocation, one supervisor a node, saved and requeued at the limit by exactly one owner.

script     config -> a readable sbatch script
address    where the first node is to listen, so that the others reach it
submit     run folder, script and process list on disk; sbatch
__main__   `python -m pipelinerl.launch.slurm`, the supervisor of one node, as srun starts it

The limit: Slurm sends USR1 to the script, which leaves a wish to save for the supervisors; the run saves, the first supervisor exits with
`UNFINISHED` when all nodes have ended, and the script requeues the job; nobody else does. A process that fails ends the job with 1, which
requeues nothing, after the others have had `save_s` to write their checkpoint.
"""
