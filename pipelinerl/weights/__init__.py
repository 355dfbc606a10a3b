"""The tensor transport: how a policy travels from the trainer to the engines."""
