"""The tensor road: how a policy travels from the trainer to the engines."""
