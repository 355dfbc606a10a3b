"""`pipelinerl init`: looks at a model and at rows, and writes a commented config for the two.

`look` measures, `propose` decides, `__main__` writes and checks.
"""
