"""A run on a Ray cluster: a placement group with a bundle a node, in each an actor that starts that node's supervisor.

bundles    config -> what each bundle asks for, plain data
access     a cluster that asks nobody for a token is refused
cluster    the placement group, and a command line run in one of its bundles
member     the actor
attempts   the starts of a run, one after the other, and what follows where a node is lost
prepare    run folder and process list on disk
__main__   `python -m pipelinerl.launch.ray`, the supervisor of a node, as its actor starts it

Ray places, carries the exit codes and says which node is lost. What begins again, and how often, is decided here: its own restarts are off.
"""
