"""Tinker's API in front of our engines and trainer: training loops written for its SDK drive them, unchanged.

    server      routes, the key, errors by category
    asks        what a request's JSON says
    data        what a request for a gradient says, checked, as the trainer takes it
    wire        the protobuf messages among all this
    ledger      what is owed to clients, in a file: sessions, samplers, requests until a checkpoint covers them
    training    what each request about a model means: accepted once, carried out as often as a trainer is given it
    dispatch    hands requests to the trainer in their order, and again after a loss; checkpoints
    futures     requests under way and their answers; one that is sent again is not carried out again
    sessions    clients, their models, their samplers, and what they have saved
    provenance  which token was sampled under which version, and what was trained on it
    backend     the seam to engines and trainer, which `orchestrator.serving` fills

Nothing here knows torch, an engine or a socket to one.
"""
