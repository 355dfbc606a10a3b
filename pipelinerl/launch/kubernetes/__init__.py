"""A run as Kubernetes Jobs: one pod a node, the run folder on a volume that all of them mount.

manifest   config -> the manifests that `pipelinerl k8s` prints, plain data
__main__   `python -m pipelinerl.launch.kubernetes`, a pod: it makes the run folder (the first one) and is the supervisor of its node

A pod that is lost is made again by its Job, and its processes join the attempt that goes on. Where the first pod is lost, with the
orchestrator, the next one begins an attempt, and the others join that. A pod exits with 0 where the run is finished; with `UNFINISHED`
where it has saved, or where its processes lost the others, and is then made anew; and with 1, which fails its Job, where the first one
found that a process of the run failed by itself: a new start would meet that again.
"""
